"""Quantized sparse convolutions in integers."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

from bevquant_int8sim.model._form import Integers
from bevquant_int8sim.model._layer import (
    Layer,
    integer_bias,
    integer_weight,
    weight_problem,
    weight_scale,
)
from bevquant_int8sim.model._quantizers import calibrated_range
from bevquant_int8sim.model._sites import Geometry
from bevquant_sparse import WeightLayout, permute_weight

__all__ = ["geometry_of", "sparse_activation", "sparse_layer"]


def geometry_of(module: Any) -> Geometry:
    """Settings of an spconv-style module."""
    rank = int(module.ndim)

    def sizes(name: str, default: int) -> tuple[int, ...]:
        value = getattr(module, name, default)
        return (value,) * rank if isinstance(value, int) else tuple(int(v) for v in value)

    return Geometry(
        kernel_size=sizes("kernel_size", 1),
        stride=sizes("stride", 1),
        padding=sizes("padding", 0),
        dilation=sizes("dilation", 1),
        output_padding=sizes("output_padding", 0),
        subm=bool(getattr(module, "subm", False)),
        transposed=bool(getattr(module, "transposed", False)),
        inverse=bool(getattr(module, "inverse", False)),
    )


def sparse_activation(module: Any) -> str:
    """Name of the activation fused into the module, such as ``"None"`` or ``"ReLU"``."""
    kind = getattr(module, "act_type", None)
    name = "None" if kind is None else str(getattr(kind, "name", kind))
    return name.rstrip("_")


def sparse_layer(module: Any, integers: Integers, path: str) -> Layer | str:
    """The layer, or why it has no integer form.

    Raises:
        ValueError: A weight's range or the bias is unusable.
    """
    quantizer = module._weight_quantizer
    problem = weight_problem(quantizer)
    if problem:
        return problem
    if sparse_activation(module) not in ("None", "ReLU"):
        return f"its activation {sparse_activation(module)} has no integer form"
    weight = module.weight_to_quantize().detach()
    axis = module.weight_layout.out_axis % weight.dim()
    amax = calibrated_range(quantizer)
    if amax is None and quantizer.axis is None:
        amax = weight.abs().amax()
    along = [size if i == axis else 1 for i, size in enumerate(weight.shape)]
    if amax is not None and amax.numel() > 1 and list(amax.shape) != along:
        return (
            f"its weight's ranges, shape {tuple(amax.shape)}, do not run along the output channels"
        )
    moved = weight.movedim(axis, 0)
    by_channel = moved.reshape(len(moved), -1)
    bits, narrow = quantizer.num_bits, quantizer._narrow_range
    scale = weight_scale(by_channel, amax, bits, path)
    q = integer_weight(by_channel, scale, bits, narrow).view(moved.shape).movedim(0, axis)
    geometry = geometry_of(module)
    bias, accumulator = integer_bias(module.bias, integers.scale, scale, path)
    return Layer(
        op="sparse_conv",
        weight=permute_weight(
            q, module.weight_layout, WeightLayout.VCK, kernel_size=geometry.kernel_size
        ).contiguous(),
        bias=bias,
        scale=accumulator,
        input=integers,
        relu=sparse_activation(module) == "ReLU",
        settings={**asdict(geometry), "indice_key": _key(module)},
    )


def _key(module: Any) -> str | None:
    key = getattr(module, "indice_key", None)
    return None if key is None else str(key)
