"""Roofline estimates of layers on a BPU or its CPU from operations and bytes."""

from __future__ import annotations

import tomllib
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import cache
from importlib import resources
from math import prod
from typing import Any

from bevquant_hybrid.nn.intrinsic import ANCHORS
from bevquant_hybrid.operators import OperatorCall, is_float, is_identity, load_support_table

# The chips' figures, read from their table and checked.

_BASES = ("documented", "measured", "assumed")


@dataclass(frozen=True)
class Figure:
    """One number and its source."""

    value: float
    basis: str  # "documented", "measured" or "assumed"
    source: str  # address of the page
    note: str  # the page's statement, or the assumption

    def __post_init__(self) -> None:
        """Refuse invalid figures."""
        if not self.value > 0:
            raise ValueError(f"figure {self.value}; expected a number above zero")
        if self.basis not in _BASES:
            raise ValueError(f"basis {self.basis!r}; expected one of {_BASES}")


@dataclass(frozen=True)
class ChipFigures:
    """Figures of a chip."""

    chip: str  # its name
    # 10¹² int8 operations per second of all cores; a multiplication and an addition are two
    peak_tops: Figure
    cores: Figure  # BPU cores
    ddr_gigabytes_per_second: Figure  # 10⁹ bytes per second between DDR memory and the BPU
    cpu_cores: Figure | None = None  # CPU cores; None if unknown, as for the attributes below
    cpu_gigahertz: Figure | None = None  # their clock, in 10⁹ cycles per second
    cpu_operations_per_cycle: Figure | None = None  # float32 operations of one core in one cycle


def load_chip_figures(march: str) -> ChipFigures:
    """The figures of the chip of a march: ``bernoulli2``, ``bayes`` or ``bayes-e``.

    Example:
        >>> figures = load_chip_figures("BAYES_E")
        >>> figures.chip, figures.peak_tops.value
        ('RDK X5 (Sunrise 5)', 10.0)
    """
    table = _load()
    key = march.lower().replace("_", "-")
    if key not in table:
        raise ValueError(
            f"march {march!r}; expected one of {', '.join(table)}: there are public figures of "
            "these alone"
        )
    return table[key]


@cache
def _load() -> Mapping[str, ChipFigures]:
    text = (resources.files(__package__) / "figures.toml").read_text(encoding="utf-8")
    return {march: _chip(data) for march, data in tomllib.loads(text).items()}


def _chip(data: Mapping[str, Any]) -> ChipFigures:
    figures = {key: Figure(**value) for key, value in data.items() if key != "chip"}
    return ChipFigures(data["chip"], **figures)


# Per element, by dtype; a constant operand is stored quantized, like a weight.
_BYTES = {"qint8": 1, "qint16": 2, "qint32": 4, "qbool": 1, "float32": 4, "constant": 1}
_LAYERS = {kind.__name__ for kind in ANCHORS}
_FUSED = ("ReLU", "relu", "ReLU6", "relu6(fused)", "BatchNorm2d", "BatchNorm3d", "SyncBatchNorm")
# Of the BPU: what is quantized outside of it, or constant.
_FREE = ("QuantStub", "DeQuantStub", "AnchorGenerator")
_WHAT_IT_IS = (
    "An estimate by roofline, not a measurement: each layer takes the longer of its operations at "
    "the peak rate of the cores and its bytes at the DDR bandwidth, every layer reads and writes "
    "DDR memory, and layers follow one another. Full use of the cores and unpadded feature maps "
    "are optimistic (small maps take several times as long), no reuse of data on the chip is "
    "pessimistic."
)


def count_operations(call: OperatorCall) -> int:
    """Operations of one call.

    Conv: 2·|output|·(C_in/groups)·∏kernel. ConvTranspose: 2·|input|·(C_out/groups)·∏kernel.
    Correlation: 2·|output|·C·K². Linear: 2·|output|·C_in. Matrix product: 2·|output|·K. A fused
    addition or activation is free.

    Example:
        >>> conv = OperatorCall(
        ...     "conv", "torch.nn.Conv2d",
        ...     {"in_channels": 3, "out_channels": 32, "kernel_size": 3, "groups": 1},
        ...     input_shapes=((256, 3, 32, 32),), input_dtypes=("qint8",),
        ...     output_shape=(256, 32, 16, 16),
        ... )
        >>> count_operations(conv)
        113246208
    """
    name = call.operator.rpartition(".")[2]
    if name in ("Conv2d", "Conv3d"):
        return 2 * prod(call.output_shape) * _met_weights(call, "in_channels")
    if name == "ConvTranspose2d":
        return 2 * prod(call.input_shapes[0]) * _met_weights(call, "out_channels")
    if name == "Linear":
        return 2 * prod(call.output_shape) * _int(call, "in_features")
    if name == "Correlation":
        patch = call.input_shapes[0][1] * _int(call, "kernel_size") ** 2
        return 2 * prod(call.output_shape) * patch
    if name == "matmul":
        return 2 * prod(call.output_shape) * call.input_shapes[0][-1]
    if name == "LSTMCell":
        return 2 * call.weight_count * prod(call.input_shapes[0][:-1])
    if name == "MultiheadAttention":
        return _attention(call)
    return 0


def _attention(call: OperatorCall) -> int:
    """Four projections of L·N tokens, then Q·Kᵀ and the weighted sum over S keys."""
    tokens = prod(call.input_shapes[0][:-1])
    width = call.input_shapes[0][-1]
    keys = call.input_shapes[min(1, len(call.input_shapes) - 1)][0]
    return 2 * tokens * (call.weight_count + 2 * keys * width)


def _int(call: OperatorCall, name: str) -> int:
    value = call.attributes[name]
    if not isinstance(value, int):
        raise ValueError(f"{call.path}: {name}={value!r}; expected an integer")
    return value


def _met_weights(call: OperatorCall, side: str) -> int:
    """Weights that one element of the other side meets: channels per group · ∏kernel."""
    kernel = call.attributes["kernel_size"]
    sizes = kernel if isinstance(kernel, tuple) else (kernel,) * (len(call.output_shape) - 2)
    area = prod(int(size) for size in sizes if size is not None)
    return _int(call, side) // _int(call, "groups") * area


@dataclass(frozen=True)
class Traffic:
    """Bytes of one call."""

    loaded: int  # inputs and weights
    stored: int  # its output
    fused_into: str = ""  # path of the layer that it is fused into; "" if it is a layer


def count_traffic(calls: Sequence[OperatorCall]) -> list[Traffic]:
    """Bytes of each call, where every layer reads inputs and weights once and writes its output.

    Weights are int8, biases int32. An activation, batch norm or addition that is the only consumer
    of a convolution or linear layer is fused into it: it moves only the other operand of the
    addition. Operators documented for the CPU move nothing here.
    """
    readers = Counter(path for call in calls for path in set(call.inputs))
    layers: dict[str, str] = {}
    traffic = []
    for call in calls:
        name = call.operator.rpartition(".")[2]
        row = load_support_table().find(call.operator)
        if name in _FREE or _only_seen_otherwise(call) or (row is not None and row.on_cpu):
            traffic.append(Traffic(0, 0))
            continue
        layer_input = _layer_input(call, name, layers, readers)
        if name in _LAYERS:
            layers[call.path] = call.path
        elif layer_input is not None:
            layers[call.path] = layers[call.inputs[layer_input]]
        loaded = sum(
            prod(shape) * _BYTES[dtype]
            for i, (shape, dtype) in enumerate(
                zip(call.input_shapes, call.input_dtypes, strict=True)
            )
            if i != layer_input
        )
        loaded += call.weight_count + 4 * call.bias_count
        stored = prod(call.output_shape) * _BYTES[call.output_dtype]
        if layer_input is not None:
            fused = name in _FUSED  # its scale and shift are folded into the layer's own
            traffic.append(Traffic(0 if fused else loaded, 0, layers[call.path]))
        else:
            traffic.append(Traffic(loaded, stored))
    return traffic


def _only_seen_otherwise(call: OperatorCall) -> bool:
    """Whether the result is the input's bytes."""
    return call.operator.endswith(".reshape") or is_identity(call.operator)


def _layer_input(
    call: OperatorCall, name: str, layers: dict[str, str], readers: Counter[str]
) -> int | None:
    """Index of the input from the layer that ``call`` is fused into; None if there is none."""
    if name not in _FUSED and name != "add":
        return None
    for i, source in enumerate(call.inputs):
        # A second reader needs the layer's own result, which is then stored.
        if source in layers and readers[source] == 1:
            return i
    return None


@dataclass(frozen=True)
class LayerEstimate:
    """The cost of one layer."""

    path: str  # the module or node
    operator: str  # the operator
    operations: int  # number of operations; a multiplication and its addition are two
    loaded_bytes: int  # from DDR memory: inputs and weights
    stored_bytes: int  # to DDR memory
    compute_seconds: float  # at the peak rate
    memory_seconds: float  # at the DDR bandwidth
    fused_into: str  # the layer that it is fused into, or ""

    @property
    def seconds(self) -> float:
        """The larger of compute and memory time."""
        return max(self.compute_seconds, self.memory_seconds)

    @property
    def intensity(self) -> float:
        """Operations per byte; 0 where nothing moves."""
        moved = self.loaded_bytes + self.stored_bytes
        return self.operations / moved if moved else 0.0

    @property
    def bound(self) -> str:
        """``"compute"``, ``"memory"``, or ``""`` without cost."""
        if not self.seconds:
            return ""
        return "compute" if self.compute_seconds > self.memory_seconds else "memory"


def estimate_layers(
    calls: Sequence[OperatorCall], march: str, *, cores: int = 1, figures: ChipFigures | None = None
) -> list[LayerEstimate]:
    """Estimate each call on ``cores`` cores of the chip of ``march``.

    Args:
        calls: Operators of a quantized model, in order. Operators documented for the CPU, such as
            detection post-processing, cost the BPU nothing.
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
    # The published peak is that of all cores together.
    rate = figures.peak_tops.value * 1e12 * cores / figures.cores.value
    return _timed(calls, count_traffic(calls), rate, figures)


def _timed(
    calls: Sequence[OperatorCall], traffic: Sequence[Traffic], rate: float, figures: ChipFigures
) -> list[LayerEstimate]:
    """The layers at `rate` operations per second and the bandwidth of the chip."""
    bandwidth = figures.ddr_gigabytes_per_second.value * 1e9
    counts = [count_operations(call) for call in calls]
    return [
        LayerEstimate(
            *(call.path, call.operator, operations, moved.loaded, moved.stored),
            compute_seconds=operations / rate,
            memory_seconds=(moved.loaded + moved.stored) / bandwidth,
            fused_into=moved.fused_into,
        )
        for call, operations, moved in zip(calls, counts, traffic, strict=True)
    ]


def estimate_cpu_layers(
    calls: Sequence[OperatorCall], march: str, *, figures: ChipFigures | None = None
) -> list[LayerEstimate]:
    """Estimate each call on all CPU cores of the chip of ``march``, in float32.

    A call takes the longer of its operations at cores · clock · operations per cycle and its bytes
    at the DDR bandwidth: inputs, weights and output of four bytes each. A quantize or dequantize
    stub moves integers of their width on one side and floats on the other; a stub without
    conversion is free. Peak rates are optimistic: expect several times as much.

    Args:
        calls: Operators on the CPU, and stubs.
        march: ``"bernoulli2"``, ``"bayes"`` or ``"bayes-e"``.
        figures: Of another chip.

    Raises:
        ValueError: If the figures have no CPU.

    Example:
        >>> conv = OperatorCall(
        ...     "conv", "torch.nn.Conv2d",
        ...     {"in_channels": 64, "out_channels": 64, "kernel_size": 3, "groups": 1},
        ...     input_shapes=((1, 64, 32, 32),), input_dtypes=("float32",),
        ...     output_shape=(1, 64, 32, 32), output_dtype="float32",
        ... )
        >>> [layer] = estimate_cpu_layers([conv], "bayes-e")
        >>> f"{layer.seconds * 1e3:.3f} ms"
        '0.655 ms'
    """
    figures = figures or load_chip_figures(march)
    rate = 1e9  # operations per second of all cores
    for name in ("cpu_cores", "cpu_gigahertz", "cpu_operations_per_cycle"):
        figure = getattr(figures, name)
        if figure is None:
            raise ValueError(f"figures of {figures.chip}: {name} is missing; give one")
        rate *= figure.value
    return _timed(calls, [_cpu_traffic(call) for call in calls], rate, figures)


def _cpu_traffic(call: OperatorCall) -> Traffic:
    """Bytes of floats, and of a stub's integers."""
    name = call.operator.rpartition(".")[2]
    if name.endswith("Stub"):
        loaded = sum(
            prod(shape) * _BYTES[dtype]
            for shape, dtype in zip(call.input_shapes, call.input_dtypes, strict=True)
            if dtype != call.output_dtype
        )
        return Traffic(loaded, prod(call.output_shape) * _BYTES[call.output_dtype] if loaded else 0)
    if _only_seen_otherwise(call):
        return Traffic(0, 0)
    values = sum(prod(shape) for shape in call.input_shapes) + call.weight_count + call.bias_count
    return Traffic(4 * values, 4 * prod(call.output_shape))


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

    The keys are those of the documented report; in addition, ``"estimate"`` explains the method and
    ``"figures"`` lists the chip's figures with their sources.

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
    """Shapes of a module's outside inputs, where calls differ in them."""
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
