"""Which quantized module becomes which integer layer: dense ones first, then sparse ones."""

from __future__ import annotations

import math
from dataclasses import asdict
from typing import Any

from torch import Tensor, nn

from bevquant_graph import layer_class, own_code, zero_padding
from bevquant_int8sim.model._form import Integers
from bevquant_int8sim.model._layer import (
    Layer,
    integer_bias,
    integer_weight,
    weight_problem,
    weight_scale,
)
from bevquant_int8sim.model._quantizers import calibrated_range, integers_of, is_active, unsupported
from bevquant_int8sim.model._sites import Geometry
from bevquant_qnn import QuantSparseConvolution
from bevquant_sparse import WeightLayout, permute_weight

_OPS: dict[type[Any], str] = {
    nn.Linear: "linear",
    nn.ConvTranspose2d: "conv_transpose",
    nn.Conv1d: "conv",
    nn.Conv2d: "conv",
    nn.Conv3d: "conv",
}


def dense_layer(module: Any, integers: Integers, path: str) -> Layer | str:
    """The layer, or why it has no integer form.

    Raises:
        ValueError: A weight's range or the bias is unusable.
    """
    cls = layer_class(module, *_OPS)
    if cls is None:
        own = own_code(module, next((c for c in _OPS if isinstance(module, c)), None))
        return own or f"{type(module).__name__} has no integer kernel"
    op = _OPS[cls]
    if getattr(module, "padding_mode", "zeros") != "zeros":
        return f"padding_mode={module.padding_mode!r} has no integer kernel"
    made = _integers(
        module, _by_channel(module, module.weight.detach(), op), _range_shapes(module, op),
        integers, path,
    )  # fmt: skip
    if isinstance(made, str):
        return made
    q, bias, accumulator = made
    return Layer(
        op=op,
        weight=_as_stored(module, q, op).contiguous(),
        bias=bias,
        scale=accumulator,
        input=integers,
        relu=False,
        settings=_settings(module, op),
    )


def _integers(
    module: Any, by_channel: Tensor, shapes: list[tuple[int, ...]], integers: Integers, path: str
) -> tuple[Tensor, Tensor | None, Tensor] | str:
    """Weight in integers, bias, scale of the accumulators; or why there are none.

    The weight is ``[out_channels, the rest]``; ranges of these shapes number the output channels.
    """
    quantizer = module._weight_quantizer
    problem = weight_problem(quantizer)
    if problem:
        return problem
    amax = calibrated_range(quantizer)
    if amax is not None and amax.numel() > 1 and tuple(amax.shape) not in shapes:
        return (
            f"its weight's ranges, shape {tuple(amax.shape)}, do not run along the output channels"
        )
    if amax is None and quantizer.axis is None:
        amax = by_channel.abs().amax()
    scale = weight_scale(by_channel, amax, quantizer.num_bits, path)
    q = integer_weight(by_channel, scale, quantizer.num_bits, quantizer._narrow_range)
    return q, *integer_bias(module.bias, integers.scale, scale, path)


def _range_shapes(module: Any, op: str) -> list[tuple[int, ...]]:
    """Shapes of ranges that number the output channels."""
    ones = (1,) * (module.weight.dim() - 2)
    if op != "conv_transpose":
        return [(module.weight.shape[0], 1, *ones)]
    groups, per_group = module.groups, module.weight.shape[1]
    grouped = (groups, 1, per_group, *ones)
    return [grouped] if groups > 1 else [(1, per_group, *ones), grouped]


def _by_channel(module: Any, weight: Tensor, op: str) -> Tensor:
    """The weight as ``[out_channels, the rest]``."""
    if op != "conv_transpose":
        return weight.reshape(weight.shape[0], -1)
    groups, per_group = module.groups, weight.shape[1]
    split = weight.reshape(groups, -1, per_group, math.prod(weight.shape[2:]))
    return split.movedim(2, 1).reshape(groups * per_group, -1)


def _as_stored(module: Any, by_channel: Tensor, op: str) -> Tensor:
    """Undo `_by_channel`."""
    shape = module.weight.shape
    if op != "conv_transpose":
        return by_channel.reshape(shape)
    groups, per_group = module.groups, shape[1]
    split = by_channel.reshape(groups, per_group, shape[0] // groups, -1)
    return split.movedim(1, 2).reshape(shape)


def _settings(module: Any, op: str) -> dict[str, Any]:
    if op == "linear":
        return {"channel_axis": -1}
    settings: dict[str, Any] = {
        "channel_axis": 1,
        "stride": tuple(module.stride),
        "dilation": tuple(module.dilation),
        "groups": module.groups,
    }
    if op == "conv_transpose":
        settings |= {
            "padding": tuple(module.padding),
            "output_padding": tuple(module.output_padding),
        }
        return settings
    return settings | {"padding": zero_padding(module)}


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
    problem = weight_problem(module._weight_quantizer)
    if problem:
        return problem
    if sparse_activation(module) not in ("None", "ReLU"):
        return f"its activation {sparse_activation(module)} has no integer form"
    weight = module.weight_to_quantize().detach()
    axis = module.weight_layout.out_axis % weight.dim()
    along = tuple(size if i == axis else 1 for i, size in enumerate(weight.shape))
    moved = weight.movedim(axis, 0)
    made = _integers(module, moved.reshape(len(moved), -1), [along], integers, path)
    if isinstance(made, str):
        return made
    q, bias, accumulator = made
    q = q.view(moved.shape).movedim(0, axis)
    geometry, key = geometry_of(module), getattr(module, "indice_key", None)
    return Layer(
        op="sparse_conv",
        weight=permute_weight(
            q, module.weight_layout, WeightLayout.VCK, kernel_size=geometry.kernel_size
        ).contiguous(),
        bias=bias,
        scale=accumulator,
        input=integers,
        relu=sparse_activation(module) == "ReLU",
        settings={**asdict(geometry), "indice_key": None if key is None else str(key)},
    )


def quantized_layer(module: nn.Module, path: str) -> Layer | str:
    """The integer layer of a quantized module, or the reason why it stays float.

    Raises:
        ValueError: A range or a bias is unusable; the layer is named.
    """
    quantizer: Any = module._modules["_input_quantizer"]
    if not is_active(quantizer):
        return "its input quantizer is off"
    reason = unsupported(quantizer)
    if reason:
        return reason
    integers = integers_of(quantizer, path)
    if isinstance(module, QuantSparseConvolution):
        own = own_code(module, QuantSparseConvolution)
        return own or sparse_layer(module, integers, path)
    return dense_layer(module, integers, path)
