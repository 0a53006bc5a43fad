"""What stays float in the integer model, and why it does."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, cast

from torch import nn

from bevfusion.model import PART_PATHS
from bevfusion_quant.options import Branch
from bevfusion_quant.steps import quantized_parts, why_float
from bevquant_sparse import is_sparse_conv

if TYPE_CHECKING:
    from bevfusion.model import BEVFusion
    from bevquant_int8sim import Island

__all__ = ["FloatIsland", "float_islands"]


@dataclass(frozen=True)
class FloatIsland:
    """Something computed in float: the module, its class or the function's name, and why.

    `share` is that of the model's operations, 0 to 1; None where they were not counted.
    """

    path: str
    what: str
    reason: str
    share: float | None = None


def float_islands(
    islands: Sequence[Island], model: BEVFusion, branch: str
) -> tuple[FloatIsland, ...]:
    """The islands with the reason that lies furthest back.

    Of a part without any quantizer that is the choice not to quantize it; of a convolution or
    linear layer in a quantized part, that it was left out.
    """
    chosen = cast(Branch, branch)
    with_head = any("_quantizer" in path for path, _ in _modules(model, PART_PATHS["head"]))
    quantized = quantized_parts(chosen, with_head=with_head)
    left = {
        PART_PATHS[part]: why_float(part, chosen) for part in model.parts if part not in quantized
    }
    known = dict(model.named_modules())
    found = []
    for island in islands:
        reason = island.reason
        part = next((path for path in left if _below(island.path, path)), None)
        if part is not None:
            reason = left[part]
        elif _could_be_quantized(known.get(island.path), island.what):
            reason = "it was left without quantizers, as --exclude said"
        found.append(FloatIsland(island.path, island.what, reason, island.share))
    return tuple(found)


def _modules(model: BEVFusion, below: str) -> list[tuple[str, object]]:
    return [(path, module) for path, module in model.named_modules() if _below(path, below)]


def _could_be_quantized(module: nn.Module | None, what: str) -> bool:
    """Whether the island is the module itself, of a kind that gets quantizers."""
    if module is None or hasattr(module, "_input_quantizer"):
        return False
    kinds = (nn.Conv1d, nn.Conv2d, nn.ConvTranspose2d, nn.Linear)
    return type(module).__name__ == what and (isinstance(module, kinds) or is_sparse_conv(module))


def _below(path: str, part: str) -> bool:
    return path == part or path.startswith(f"{part}.")
