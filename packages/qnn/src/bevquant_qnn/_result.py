"""Result of `quantize_model`."""

from __future__ import annotations

from dataclasses import dataclass, field

from torch import nn

from bevquant_graph import HtmlTable


@dataclass(frozen=True)
class QuantizedModule:
    """One module that has quantizers now.

    Attributes:
        path: Path in the model.
        kind: Name of its class now.
        was: Name of the class it replaced, or of the addition.
    """

    path: str
    kind: str
    was: str


@dataclass(frozen=True)
class SharedQuantizer:
    """One quantizer of several consumers.

    Attributes:
        tensor: Tensors whose range it has.
        readers: Paths of the quantizer in the model.
        reason: Why these consumers need one range.
    """

    tensor: str
    readers: tuple[str, ...]
    reason: str


@dataclass(frozen=True)
class SkippedModule:
    """One module that stays float although it could be quantized, or that needs a note.

    Attributes:
        path: Path in the model.
        reason: Why, and what to do to quantize it.
    """

    path: str
    reason: str


@dataclass(frozen=True, eq=False)
class QuantizeResult(HtmlTable):
    """The quantized model and a record of every decision.

    Attributes:
        model: The quantized model: a copy. With ``inplace=True`` the given object, unless that is
            itself a replaced layer.
        quantized: Replaced or added modules, in model order.
        shared: Groups of consumers that have one quantizer.
        skipped: Modules that stay float, with the reason.
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
