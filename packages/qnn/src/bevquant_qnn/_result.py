"""What `quantize_model` says it did."""

from __future__ import annotations

from dataclasses import dataclass, field

from torch import nn

from bevquant_graph import HtmlTable


@dataclass(frozen=True)
class QuantizedModule:
    """One module that now carries quantizers.

    Attributes:
        path: Where it is in the model.
        kind: Name of its class now.
        was: Name of the class it replaced, or what was added.
    """

    path: str
    kind: str
    was: str


@dataclass(frozen=True)
class SharedQuantizer:
    """One quantizer that serves several readers.

    Attributes:
        tensor: The tensors whose range it holds.
        readers: Paths under which the model holds it.
        reason: Why these readers must agree.
    """

    tensor: str
    readers: tuple[str, ...]
    reason: str


@dataclass(frozen=True)
class SkippedModule:
    """One module that stays as it was although it might have been quantized, or worth a note.

    Attributes:
        path: Where it is in the model.
        reason: Why, and what to do if that is not wanted.
    """

    path: str
    reason: str


@dataclass(frozen=True, eq=False)
class QuantizeResult(HtmlTable):
    """The quantized model and an account of every decision.

    Attributes:
        model: The quantized model: a copy. With ``inplace=True`` the object that was given, unless
            that was itself a layer.
        quantized: Modules replaced or added, in model order.
        shared: Groups of readers that hold one quantizer.
        skipped: What stays float, with the reason.
    """

    model: nn.Module = field(repr=False)
    quantized: tuple[QuantizedModule, ...]
    shared: tuple[SharedQuantizer, ...]
    skipped: tuple[SkippedModule, ...]

    def __str__(self) -> str:
        lines = [f"{len(self.quantized)} modules quantized"]
        lines += [f"  {item.path}: {item.was} -> {item.kind}" for item in self.quantized]
        lines += [f"{len(self.shared)} quantizers shared"]
        lines += [f"  {', '.join(item.readers)}: {item.reason}" for item in self.shared]
        lines += [f"{len(self.skipped)} notes"]
        lines += [f"  {item.path or '(model)'}: {item.reason}" for item in self.skipped]
        return "\n".join(lines)
