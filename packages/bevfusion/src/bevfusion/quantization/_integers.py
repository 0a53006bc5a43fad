"""What running in integers gave, a line for each stage of the model."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from bevfusion.quantization._stage_maps import STAGE_TITLES
from bevquant_int8sim import LayerRow

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
        and (rows := [row for row in layers if any(lies_below(row.path, path) for path in paths)])
    )


def lies_below(path: str, part: str) -> bool:
    """Whether a module's path is `part`, or lies below it."""
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
