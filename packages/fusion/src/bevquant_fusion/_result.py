"""Result of fusion: every batch norm of a model, folded or skipped."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Literal

from torch import nn

from bevquant_graph import HtmlTable

Removal = Literal["identity", "removed", "rebuilt", "rest", "neutral", "depthwise"]
_HOW = {
    "identity": "now nn.Identity",
    "removed": "taken out of its SparseSequential",
    "rebuilt": "deleted, and its call with it",
    "rest": "now the operations after the normalisation",
    "neutral": "still called, as an exact identity",
    "depthwise": "now a depthwise 1×1 convolution",
}


@dataclass(frozen=True)
class Skipped:
    """A batch norm that was not folded.

    Attributes:
        bn: Its path in the model.
        reason: The obstacle, in one sentence.
        location: ``file:line`` of the code that calls it, where known.
    """

    bn: str
    reason: str
    location: str = ""


@dataclass(frozen=True)
class Fused:
    """A batch norm that was folded.

    Attributes:
        conv: Path of the layer that it was folded into, before the rewrite (a ``SparseSequential``
            renumbers its members); the first of several.
        bn: Path of the batch norm before the rewrite.
        how: Replacement of the batch norm. ``"identity"``: an ``nn.Identity``. ``"removed"``:
            nothing (from a ``SparseSequential``). ``"rebuilt"``: its block's forward without the
            call. ``"rest"``: an ``nn.Sequential`` of its own children, as for timm's
            ``BatchNormAct2d``. ``"neutral"``: statistics and weights that return the input in
            evaluation mode, where a forward calls ``F.batch_norm``. ``"depthwise"``: a depthwise
            1×1 convolution, in a sum with convolutions of the same input; it is its own ``conv``.
    """

    conv: str
    bn: str
    how: Removal


@dataclass(frozen=True, eq=False)
class FusionResult(HtmlTable):
    """Result of ``fuse_model``; ``print(result)`` shows a table.

    Attributes:
        model: The fused model: a copy, or the model itself with ``inplace=True``.
        fused: Folded batch norms.
        skipped: Other batch norms, each with the reason. Every batch norm of the model is in
            exactly one of the two.
        not_inplace: Activations of sparse encoders whose ``inplace`` became False, by path before
            the rewrite.
        untraced: Modules whose forward could not be captured, with the reason.
        max_error: Largest relative difference of an output on the example inputs. In float64 where
            rounding changed a choice between values (the largest ones, for example). None without
            example inputs.
        plain: Paths of layers whose weight was not the one that they multiply by: computed from
            parameters alone (standardised weights, parametrizations, pruning masks), or read along
            another kernel's rulebook (spconv 1). They are plain layers with that weight now.
    """

    model: nn.Module = field(repr=False)
    fused: tuple[Fused, ...]
    skipped: tuple[Skipped, ...]
    not_inplace: tuple[str, ...] = ()
    untraced: Mapping[str, str] = field(default_factory=dict)
    max_error: float | None = None
    plain: tuple[str, ...] = ()

    def __str__(self) -> str:
        rows = [(f.bn, f"into {f.conv or 'the model'}", _HOW[f.how]) for f in self.fused]
        rows += [(path, "plain", "now has the weight that it multiplied by") for path in self.plain]
        for item in self.skipped:
            where = f" ({item.location})" if item.location else ""
            rows.append((item.bn or "the model", "kept", item.reason + where))
        widths = [max((len(row[i]) for row in rows), default=0) for i in (0, 1)]
        lines = [f"{a:<{widths[0]}}  {b:<{widths[1]}}  {c}" for a, b, c in rows]
        total = f"{len(self.fused)} batch norms folded, {len(self.skipped)} kept"
        if self.max_error is not None:
            total += f", outputs within {self.max_error:.1e} of the unfused model"
        elif self.untraced:
            total += "; example_inputs would let forwards be followed: " + ", ".join(
                path or "the model" for path in self.untraced
            )
        return "\n".join([*lines, total])


def joined(model: nn.Module, parts: Mapping[str, FusionResult]) -> FusionResult:
    """The account of a model whose parts were folded, by their paths."""

    def at(part: str, path: str) -> str:
        return f"{part}.{path}" if path else part

    items = parts.items()
    errors = [r.max_error for r in parts.values() if r.max_error is not None]
    return FusionResult(
        model,
        tuple(replace(f, conv=at(p, f.conv), bn=at(p, f.bn)) for p, r in items for f in r.fused),
        tuple(replace(s, bn=at(p, s.bn)) for p, r in items for s in r.skipped),
        not_inplace=tuple(at(p, path) for p, r in items for path in r.not_inplace),
        untraced={at(p, path): why for p, r in items for path, why in r.untraced.items()},
        max_error=max(errors, default=None),
        plain=tuple(at(p, path) for p, r in items for path in r.plain),
    )
