"""A roofline estimate of a model on a BPU: no compiler and no chip is asked.

The vendor has published one report to hold it against: MobileNetV2 on 256 images of 32 × 32, one
core of BAYES. The operations of all 52 layers agree. The time does not: the estimate is 6.7 ms,
the report 44.7 ms, because the chip pads feature maps in memory, and those are of 1 × 1 to 16 × 16.
Use it to compare layers and plans, not to promise frame rates.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

from bevquant_hybrid.operators import OperatorCall, is_float, load_support_table

from ._figures import ChipFigures, load_chip_figures
from ._operations import count_operations
from ._traffic import count_traffic

__all__ = ["LayerEstimate", "estimate_layers", "estimate_performance"]

_WHAT_IT_IS = (
    "An estimate by roofline, not a measurement: each layer takes the longer of its operations at "
    "the peak rate of the cores and its bytes at the DDR bandwidth, every layer reads and writes "
    "DDR memory, and layers follow one another. Full use of the cores and unpadded feature maps "
    "are optimistic (small maps take several times as long), no reuse of data on the chip is "
    "pessimistic."
)


@dataclass(frozen=True)
class LayerEstimate:
    """What one layer costs.

    Attributes:
        path: The module or node.
        operator: What it computes.
        operations: Of which a multiplication and its addition are two.
        loaded_bytes: From DDR memory: inputs and weights.
        stored_bytes: To DDR memory.
        compute_seconds: At the peak rate.
        memory_seconds: At the DDR bandwidth.
        fused_into: The layer that computes it on the way out, or ``""``.
    """

    path: str
    operator: str
    operations: int
    loaded_bytes: int
    stored_bytes: int
    compute_seconds: float
    memory_seconds: float
    fused_into: str

    @property
    def seconds(self) -> float:
        """The longer of computing and moving."""
        return max(self.compute_seconds, self.memory_seconds)

    @property
    def intensity(self) -> float:
        """Operations per byte; 0 where nothing moves."""
        moved = self.loaded_bytes + self.stored_bytes
        return self.operations / moved if moved else 0.0

    @property
    def bound(self) -> str:
        """``"compute"``, ``"memory"``, or ``""`` for what costs nothing."""
        if not self.seconds:
            return ""
        return "compute" if self.compute_seconds > self.memory_seconds else "memory"


def estimate_layers(
    calls: Sequence[OperatorCall],
    march: str,
    *,
    cores: int = 1,
    figures: ChipFigures | None = None,
) -> list[LayerEstimate]:
    """Estimate each call on ``cores`` cores of the chip of ``march``.

    Args:
        calls: Operators of a quantized model, in order. What the documents give to the CPU, as
            detection post-processing, costs the BPU nothing.
        march: ``"bernoulli2"``, ``"bayes"`` or ``"bayes-e"``.
        cores: How many BPU cores share the work, evenly.
        figures: Of another chip.

    Raises:
        ValueError: If a call other than a stub computes in float, or the chip has fewer cores.
    """
    figures = figures or load_chip_figures(march)
    if not 1 <= cores <= figures.cores.value:
        raise ValueError(f"cores={cores}; {figures.chip} has {figures.cores.value:.0f}")
    for call in calls:
        if is_float(call):
            raise ValueError(
                f"{call.path} ({call.operator}) reads float32, so it does not run on the BPU; "
                "estimate a quantized model, or the BPU part of a hybrid one"
            )
    rate = figures.peak_tops.value * 1e12 * cores / figures.cores.value
    bandwidth = figures.ddr_gigabytes_per_second.value * 1e9
    layers = []
    for call, traffic in zip(calls, count_traffic(calls), strict=True):
        operations = count_operations(call)
        moved = traffic.loaded + traffic.stored
        layers.append(
            LayerEstimate(
                *(call.path, call.operator, operations, traffic.loaded, traffic.stored),
                compute_seconds=operations / rate,
                memory_seconds=moved / bandwidth,
                fused_into=traffic.fused_into,
            )
        )
    return layers


def estimate_performance(
    calls: Sequence[OperatorCall],
    march: str,
    *,
    name: str = "model",
    cores: int = 1,
    layer_details: bool = False,
    figures: ChipFigures | None = None,
) -> dict[str, Any]:
    """The report of ``perf_model``, estimated.

    The keys are those of the documented report; besides, ``"estimate"`` says how the figures came
    about and ``"figures"`` gives the chip's figures with their sources.

    Args:
        calls: Operators of a quantized model, in order.
        march: ``"bernoulli2"``, ``"bayes"`` or ``"bayes-e"``.
        name: The model's name.
        cores: How many BPU cores share the work.
        layer_details: Whether to list the layers.
        figures: Of another chip.

    Returns:
        ``{"summary": {…}}``.

    Raises:
        ValueError: If there is nothing to estimate, or a call runs in float.
    """
    if not calls:
        raise ValueError("no operator calls: nothing to estimate")
    figures = figures or load_chip_figures(march)
    layers = estimate_layers(calls, march, cores=cores, figures=figures)
    frames = max(1, _inputs(calls)[0][0]) if _inputs(calls)[0] else 1
    seconds = sum(layer.seconds for layer in layers)
    operations = sum(layer.operations for layer in layers)
    loaded = sum(layer.loaded_bytes for layer in layers)
    stored = sum(layer.stored_bytes for layer in layers)
    moved = loaded + stored
    runs = 1 / seconds if seconds else 0.0
    summary: dict[str, Any] = {
        "BPU OPs per frame (effective)": operations // frames,
        "BPU OPs per run (effective)": operations,
        "BPU core number": cores,
        "BPU march": load_support_table().march(march).title,
        "DDR bytes per frame": moved / frames,
        "DDR bytes per run": moved,
        "DDR bytes per second": round(moved * runs),
        "DDR megabytes per frame": round(moved / frames / 2**20, 3),
        "DDR megabytes per run": round(moved / 2**20, 3),
        "DDR megabytes per second": round(moved * runs / 2**20, 1),
        "FPS": round(frames * runs, 2),
        "estimate": _WHAT_IT_IS,
        "figures": asdict(figures),
        "frame per run": frames,
        "frame per second": round(frames * runs, 2),
        "input features": [
            ["input name", "input size"],
            *([f"arg{i}", _size(shape)] for i, shape in enumerate(_inputs(calls))),
        ],
        "latency (ms)": round(seconds * 1e3, 3),
        "latency (us)": round(seconds * 1e6, 1),
        "loaded bytes per frame": loaded // frames,
        "loaded bytes per run": loaded,
        "model name": name,
        "run per second": round(runs, 2),
        "stored bytes per frame": stored // frames,
        "stored bytes per run": stored,
    }
    if layer_details:
        summary["layer details"] = [
            ["layer", "ops", "computing cost (no DDR)", "load/store cost"],
            *(_row(layer, seconds) for layer in layers),
        ]
    return {"summary": summary}


def _row(layer: LayerEstimate, total: float) -> list[str]:
    costs = (layer.compute_seconds, layer.memory_seconds)
    return [
        layer.path,
        f"{layer.operations:,}",
        *(
            f"{cost * 1e6:.1f} us ({100 * cost / total if total else 0:.1f}% of model)"
            for cost in costs
        ),
    ]


def _inputs(calls: Sequence[OperatorCall]) -> list[tuple[int, ...]]:
    """Shapes of what comes from outside, as far as calls tell them apart."""
    shapes = [
        shape
        for call in calls
        for shape, dtype, source in zip(
            call.input_shapes, call.input_dtypes, call.inputs or ("",) * 9, strict=False
        )
        if source == "" and dtype != "constant"
    ]
    return list(dict.fromkeys(shapes)) or [calls[0].output_shape]


def _size(shape: tuple[int, ...]) -> str:
    """Sizes in the order of the chip's memory: channels last."""
    if len(shape) == 4:
        shape = (shape[0], *shape[2:], shape[1])
    return "x".join(map(str, shape))
