"""The model's stages in integers, a line for each, and what in it stays float and why."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import cast

from torch import nn

from bevfusion.model import PART_PATHS, BEVFusion
from bevfusion_quant.measure import STAGE_TITLES
from bevfusion_quant.options import Branch
from bevfusion_quant.steps import quantized_parts, why_float
from bevquant_int8sim import Island, LayerRow
from bevquant_sparse import is_sparse_conv

# Stage → the module paths that belong to it.
_STAGES = {
    "neck": ("encoders.camera.backbone", "encoders.camera.neck"),
    "camera": ("encoders.camera.vtransform",),
    "lidar": ("encoders.lidar",),
    "fuser": ("fuser",),
    "decoder": ("decoder",),
    "head": ("heads.object.shared_conv", "heads.object.heatmap_head"),
}
# Of which part of the model a stage is; the head's stage ends before it chooses its queries.
_PARTS = {"neck": "camera"}


@dataclass(frozen=True)
class IntegerStage:
    """One stage: how its last layer came out, and the widest gap in it.

    Attributes:
        stage: Its name.
        title: Its title.
        layer: The last step in it.
        integers: How many of its steps compute in integers, and
        floats: in float.
        fake_sqnr_db: Of the last step's output, fake-quantized against float; None where equal.
        integer_sqnr_db: In integers against float.
        max_steps: Largest difference of fake-quant and integer results in the stage, in steps of
            the layer's output; None where no output is held in integers.
        mean_steps: Mean of its size at the last output that is.
        forced_max_steps: Largest difference of a layer in the stage on the same inputs.
    """

    stage: str
    title: str
    layer: str
    integers: int
    floats: int
    fake_sqnr_db: float | None
    integer_sqnr_db: float | None
    max_steps: int | None
    mean_steps: float | None
    forced_max_steps: int | None


def in_integers(row: LayerRow) -> bool:
    """Whether the step computes in integers, whatever its reader takes: a last layer gives floats.

    Only layers have accumulators.
    """
    return row.form != "float" or row.peak_bits is not None


def integer_stages(layers: Sequence[LayerRow], parts: Sequence[str]) -> tuple[IntegerStage, ...]:
    """A line for every stage of the parts that the model has."""
    return tuple(
        _stage(stage, STAGE_TITLES[stage], rows)
        for stage, paths in _STAGES.items()
        if _PARTS.get(stage, stage) in parts
        and (rows := [row for row in layers if any(_lies_below(row.path, path) for path in paths)])
    )


def _lies_below(path: str, part: str) -> bool:
    return path == part or path.startswith(f"{part}.")


def _stage(stage: str, title: str, rows: Sequence[LayerRow]) -> IntegerStage:
    exact = [row for row in rows if row.max_steps is not None]
    last = rows[-1]
    computed = sum(map(in_integers, rows))
    return IntegerStage(
        stage,
        title,
        last.path,
        computed,
        len(rows) - computed,
        last.fake_sqnr_db,
        last.integer_sqnr_db,
        max((row.max_steps or 0 for row in exact), default=None),
        exact[-1].mean_steps if exact else None,
        max((row.forced_max_steps or 0 for row in exact), default=None),
    )


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
        part = next((path for path in left if _lies_below(island.path, path)), None)
        if part is not None:
            reason = left[part]
        elif _could_be_quantized(known.get(island.path), island.what):
            reason = "it was left without quantizers, as --exclude said"
        found.append(FloatIsland(island.path, island.what, reason, island.share))
    return tuple(found)


def _modules(model: BEVFusion, below: str) -> list[tuple[str, object]]:
    return [(path, module) for path, module in model.named_modules() if _lies_below(path, below)]


def _could_be_quantized(module: nn.Module | None, what: str) -> bool:
    """Whether the island is the module itself, of a kind that gets quantizers."""
    if module is None or hasattr(module, "_input_quantizer"):
        return False
    kinds = (nn.Conv1d, nn.Conv2d, nn.ConvTranspose2d, nn.Linear)
    return type(module).__name__ == what and (isinstance(module, kinds) or is_sparse_conv(module))
