"""The model's stages in integers, what stays float and why, and a simulation as text."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, cast

from torch import nn

from bev_data.metrics import agreement_text, record_table
from bevfusion.model import PART_PATHS
from bevfusion_quant.measure import STAGE_TITLES
from bevfusion_quant.options import Branch
from bevfusion_quant.steps import quantized_parts, why_float
from bevquant_sparse import is_sparse_conv

if TYPE_CHECKING:
    from bevfusion.model import BEVFusion
    from bevfusion_quant.integer._simulation import Simulation
    from bevquant_int8sim import Island, LayerRow

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


QUERIES = (
    "Behind the head's choice of queries the models may look at different places of the map; "
    "their figures there say little."
)
_LONGEST = 46


def simulation_text(simulation: Simulation, *, layers: bool) -> str:
    """What departs first, then tables: layers if wanted, stages, detections; kernels and time."""
    parts = ["\n".join(verdict(simulation)), _stage_table(simulation)]
    if layers:
        computed = [row for row in simulation.layers if in_integers(row)]
        floats = len(simulation.layers) - len(computed)
        counted = [island.share for island in simulation.islands if island.share is not None]
        much = f" with {100 * sum(counted):.2g} % of the operations" if counted else ""
        steps = f"\nand {_counted(floats, 'step')} in float{much}; the page says why"
        more = steps if floats else ""
        parts.insert(0, _layer_table(computed) + more)
    if simulation.agreement:
        detections = agreement_text(simulation.agreement, simulation.found, "integer")
        parts += ["Detections, float against integer, same class", detections]
    seconds = ", ".join(f"{s:.2f}" for s in simulation.frame_seconds[:8])
    more = " …" if len(simulation.frame_seconds) > 8 else ""
    parts.append(
        f"Kernels: {simulation.backend}; seconds in integers, frame by frame: {seconds}{more}"
    )
    return "\n\n".join(parts)


def verdict(simulation: Simulation) -> list[str]:
    """Which layer departs first and by how much; which layers are off by themselves, and why."""
    first = simulation.first_departure
    text = "Integer and fake-quantized results agree within one step everywhere."
    if first is not None:
        text = (
            f"{first.path} ({first.op}) departs first: up to {_counted(first.max_steps, 'step')} "
            f"from the fake-quantized result, {100 * (first.off or 0):.2g} % of its values differ; "
            f"on the same input {_up_to(first.forced_max_steps)}."
        )
    lines = [text]
    if simulation.wrong:
        lines.append(f"WRONG on the same input: {_named(simulation.wrong)}.")
    for row in simulation.explained:
        steps = _counted(row.forced_max_steps, "step")
        lines.append(f"On the same input {row.path} is {steps} off: {row.why}.")
    if len(lines) == 1:
        lines.append("On the same input every layer agrees within one step.")
    if any(row.path.startswith("heads.") and in_integers(row) for row in simulation.layers):
        lines.append(QUERIES)
    return lines


def _named(rows: Sequence[LayerRow]) -> str:
    more = f" and {len(rows) - 5} more" if len(rows) > 5 else ""
    named = (f"{row.path} ({_counted(row.forced_max_steps, 'step')})" for row in rows[:5])
    return ", ".join(named) + more


def _up_to(steps: int | None) -> str:
    return f"up to {_counted(steps, 'step')}" if steps else "none"


def _counted(number: int | None, thing: str) -> str:
    return f"{number or 0} {thing}{'s' * (number != 1)}"


def _stage_table(simulation: Simulation) -> str:
    columns = {
        "stage": "{title}",
        "int": "{integers}",
        "float": "{floats}",
        "fake dB": "{fake_sqnr_db:.2f}",
        "int dB": "{integer_sqnr_db:.2f}",
        "max steps": "{max_steps:.0f}",
        "mean steps": "{mean_steps:.4f}",
        "same input": "{forced_max_steps:.0f}",
    }
    return record_table(simulation.stages, columns)


def _layer_table(rows: Sequence[LayerRow]) -> str:
    columns = {
        "layer": "{path}",
        "step": "{op}",
        "fake dB": "{fake_sqnr_db:.1f}",
        "int dB": "{integer_sqnr_db:.1f}",
        "cosine": "{integer_cosine:.4f}",
        "max": "{max_steps:.0f}",
        "mean": "{mean_steps:.3f}",
        "off %": "{off:100*.2f}",
        "same": "{forced_max_steps:.0f}",
        "sat %": "{saturated:100*.2f}",
        "bits": "{peak_bits:.0f}",
    }
    shown = [replace(row, path=_short(row.path), op=row.op.removesuffix(" + ReLU")) for row in rows]
    return record_table(shown, columns)


def _short(path: str) -> str:
    """The beginning of a long path is cut, the layer's own name stays."""
    short = path.removeprefix("encoders.").replace(".encoder_layers.", ".")
    return short if len(short) <= _LONGEST else "…" + short[1 - _LONGEST :]
