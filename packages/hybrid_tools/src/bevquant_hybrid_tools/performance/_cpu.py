"""What calls cost on the CPU cores beside the BPU: the same roofline, in float32."""

from __future__ import annotations

from collections.abc import Sequence
from math import prod

from bevquant_hybrid.operators import OperatorCall

from ._estimate import BYTES, LayerEstimate, count_operations
from ._figures import ChipFigures, load_chip_figures

_FREE = ("Identity", "Dropout", "Dropout2d", "reshape")  # the same bytes, seen otherwise


def estimate_cpu_layers(
    calls: Sequence[OperatorCall], march: str, *, figures: ChipFigures | None = None
) -> list[LayerEstimate]:
    """Estimate each call on all CPU cores of the chip of ``march``, in float32.

    A call takes the longer of its operations at cores · clock · operations per cycle and its bytes
    at the DDR bandwidth: inputs, weights and output of four bytes each. A quantize or dequantize
    stub moves integers of their own width on one side and floats on the other; one that changes
    nothing is free. Peak rates are optimistic: expect several times as much.

    Args:
        calls: Operators that the CPU runs, and stubs.
        march: ``"bernoulli2"``, ``"bayes"`` or ``"bayes-e"``.
        figures: Of another chip.

    Raises:
        ValueError: If the figures say nothing of a CPU.

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
    rate = _rate(figures)
    bandwidth = figures.ddr_gigabytes_per_second.value * 1e9
    layers = []
    for call in calls:
        operations = count_operations(call)
        loaded, stored = _moved(call)
        layers.append(
            LayerEstimate(
                *(call.path, call.operator, operations, loaded, stored),
                compute_seconds=operations / rate,
                memory_seconds=(loaded + stored) / bandwidth,
                fused_into="",
            )
        )
    return layers


def _rate(figures: ChipFigures) -> float:
    """Operations per second of all cores."""
    rate = 1e9
    for name in ("cpu_cores", "cpu_gigahertz", "cpu_operations_per_cycle"):
        figure = getattr(figures, name)
        if figure is None:
            raise ValueError(f"figures of {figures.chip}: {name} is missing; give one")
        rate *= figure.value
    return rate


def _moved(call: OperatorCall) -> tuple[int, int]:
    """Bytes loaded and stored."""
    name = call.operator.rpartition(".")[2]
    if name.endswith("Stub"):
        loaded = sum(
            prod(shape) * BYTES[dtype]
            for shape, dtype in zip(call.input_shapes, call.input_dtypes, strict=True)
            if dtype != call.output_dtype
        )
        return loaded, prod(call.output_shape) * BYTES[call.output_dtype] if loaded else 0
    if name in _FREE:
        return 0, 0
    values = sum(prod(shape) for shape in call.input_shapes) + call.weight_count + call.bias_count
    return 4 * values, 4 * prod(call.output_shape)
