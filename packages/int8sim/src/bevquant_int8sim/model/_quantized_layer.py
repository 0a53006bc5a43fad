"""A quantized layer in integers, and which module becomes which: dense ones, then sparse ones."""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor, fx, nn

from bevquant_graph import layer_class, own_code, zero_padding
from bevquant_int8sim._quantize import quantize, quantize_bias
from bevquant_int8sim.model._coords import Geometry
from bevquant_int8sim.model._float8 import BlockLayer, Float8Input, Float8Layer
from bevquant_int8sim.model._form import ACCUMULATORS, Integers
from bevquant_int8sim.model._quantizers import (
    SMALLEST_AMAX,
    SimulateError,
    calibrated_range,
    float8_of,
    float8_scale,
    integers_of,
    is_active,
    unsupported,
)
from bevquant_int8sim.model._weighted_steps import Conv, ConvTranspose, Linear, SparseConv, Weighted
from bevquant_qnn import QuantSparseConvolution
from bevquant_quantizers import (
    AffineQuantizer,
    TensorQuantizer,
    fake_quantize,
    format_of,
    quantize_blocks,
)
from bevquant_sparse import WeightLayout, permute_weight

_OPS: dict[type[Any], str] = {
    nn.Linear: "linear",
    nn.ConvTranspose2d: "conv_transpose",
    nn.Conv1d: "conv",
    nn.Conv2d: "conv",
    nn.Conv3d: "conv",
}

_STEPS: dict[str, type[Any]] = {cls.op: cls for cls in (Conv, ConvTranspose, Linear, SparseConv)}


@dataclass(frozen=True, eq=False)
class Layer:
    """A convolution or linear layer."""

    # Its step, which keeps its accumulators; of no path, arguments and outputs yet.
    step: Weighted
    # float64 ``[out_channels]``: value of one unit of each accumulator, s_x · s_w.
    scale: Tensor
    input: Integers


def _weight_problem(quantizer: TensorQuantizer, read: Integers | Float8Input) -> str:
    """Why a weight's quantizer has no integers or FP8 for the kernels; empty where it has."""
    if not is_active(quantizer):
        return "its weight quantizer is off"
    if isinstance(read, Float8Input):
        own, form = float8_of(quantizer), read.form
        if own is not None and (own == form or not (own.block or form.block)):
            return ""
        return f"its input is {form.name} and its weight is not: give both num_bits={form.num_bits}"
    form = format_of(quantizer.num_bits, quantizer._unsigned)
    if form.dtype is not None or form.bits > 8 or quantizer._unsigned:
        return "its weight has no signed integers of 8 bits or fewer"
    return ""


def _weight_scale(weight: Tensor, amax: Tensor | None, high: float, path: str) -> Tensor:
    """Scale per output channel, float64: amax / `high`; 0 for a channel of zeros.

    Without a range, `amax` is max |w| of each. `high` is 2^(bits−1) − 1 of integers, 448 of FP8
    E4M3.
    """
    largest = weight.abs().amax(1) if weight.shape[1] else weight.new_zeros(weight.shape[0])
    if not bool(largest.isfinite().all()):
        channel = int((~largest.isfinite()).nonzero()[0])
        raise SimulateError(
            f"{path}: a weight of channel {channel} is NaN or infinite; train or load "
            "the model again"
        )
    ranges = (largest if amax is None else amax).double().reshape(-1).expand(len(weight))
    dead = ranges <= SMALLEST_AMAX
    lost = dead & (largest.double() > SMALLEST_AMAX)
    if bool(lost.any()):
        channel = int(lost.nonzero()[0])
        raise SimulateError(
            f"{path}: the weight's range of channel {channel} is zero or too small, its "
            f"largest weight is {float(largest[channel]):g}; calibrate the weight quantizer again"
        )
    scale: Tensor = ranges.masked_fill(dead, 0.0) / high
    return scale


def _integer_weight(weight: Tensor, scale: Tensor, bits: int, narrow: bool) -> Tensor:
    """The integers that fake quantization rounds to, clamped to `bits`; zeros where s is 0."""
    dead = scale == 0
    amax = (scale * (2 ** (bits - 1) - 1)).float()[:, None]
    # Whether a weight lies on a tie is fake quantization's word, which multiplies by (2^(bits−1) −
    # 1)/amax in float32: of −amax/2 at four bits float64 would make another integer.
    weight = fake_quantize(weight, amax, bits, narrow_range=narrow)
    q = quantize(weight, scale.masked_fill(dead, 1.0), bits=bits, narrow_range=narrow)
    return torch.where(dead[:, None], torch.zeros_like(q), q)


def _integer_bias(
    module: Any, input_scale: float, scale: Tensor, path: str
) -> tuple[Tensor | None, Tensor]:
    """``(int32 bias, scale of the accumulator)``, both per channel."""
    bias = module.bias
    live = scale[scale > 0]
    finest = float(live.min()) if live.numel() else 2.0**-20
    # A channel whose weights are all zero has a bias and no scale: it gets the finest one of the
    # layer that still holds its bias.
    filled = scale.masked_fill(scale == 0, finest)
    if bias is not None:
        needed = bias.detach().abs().double() / input_scale / 2.0**30
        filled = torch.where(scale == 0, torch.maximum(filled, needed), filled)
    total = filled * input_scale
    # A file's int32 bias as it is: float32 keeps only 24 of its bits.
    stored = module._buffers.get("integer_bias")
    if bias is None or stored is not None:
        return stored, total
    return quantize_bias(bias.detach(), input_scale, filled, name=path), total


def _float8_weight(weight: Tensor, scale: Tensor, quantizer: TensorQuantizer) -> Tensor:
    """The FP8 numbers that fake quantization rounds to, ``[out_channels, the rest]``."""
    form = format_of(quantizer.num_bits)
    amax = (scale * form.high).float()[:, None]
    # As for `_integer_weight`, a tie is fake quantization's word.
    rounded = fake_quantize(weight.float(), amax, form.num_bits)
    step = scale.masked_fill(scale == 0, 1.0).float()[:, None]
    return (rounded / step).to(form.dtype)


def dense_layer(
    module: Any, integers: Integers | Float8Input, path: str, node: fx.Node
) -> Layer | Float8Layer | str:
    """The layer of this call, or why it has no form in integers or FP8."""
    cls = layer_class(module, *_OPS)
    if cls is None:
        own = own_code(module, next((c for c in _OPS if isinstance(module, c)), None))
        return own or f"{type(module).__name__} has no integer kernel"
    op = _OPS[cls]
    weight = module.weight_to_quantize().detach().reshape(module.weight.shape)
    if isinstance(integers, Float8Input) and integers.form.block:
        problem = _weight_problem(module._weight_quantizer, integers)
        if problem or (op != "linear" and (op != "conv" or math.prod(weight.shape[2:]) > 1)):
            return problem or f"{integers.form.name} is for linear layers and convolutions of 1×1"
        form, quantizer = integers.form.name, module._weight_quantizer
        blocks = quantize_blocks(weight, form, quantizer._block_amax(weight), axis=1)
        bias = None if module.bias is None else module.bias.detach().float()
        return BlockLayer(op, blocks, bias, integers.scale, form, _settings(module, op, node))
    made = _integers(
        module, _by_channel(module, weight, op), _range_shapes(module, op), integers, path
    )
    if isinstance(made, str):
        return made
    q, bias, scale = made
    stored = _as_stored(module, q, op).contiguous()
    return _layer(op, stored, bias, scale, integers, _settings(module, op, node))


def _layer(
    op: str,
    weight: Tensor,
    bias: Tensor | None,
    scale: Tensor,
    read: Integers | Float8Input,
    settings: dict[str, Any],
) -> Layer | Float8Layer:
    """The layer of an input's form."""
    if isinstance(read, Integers):
        step = _STEPS[op]("", (), ("",), form=ACCUMULATORS, weight=weight, bias=bias, **settings)
        return Layer(step, scale, read)
    if op == "sparse_conv":
        settings = {**asdict(settings["geometry"]), "indice_key": settings["indice_key"]}
    return Float8Layer(op, weight, scale, bias, read.scale, read.form.name, settings)


def _integers(
    module: Any,
    by_channel: Tensor,
    shapes: list[tuple[int, ...]],
    integers: Integers | Float8Input,
    path: str,
) -> tuple[Tensor, Tensor | None, Tensor] | str:
    """Weight in integers, bias, scale of the accumulators; or why there are none.

    Of FP8 the weight's numbers, the bias in float32 and the weight's own scale in float32.

    The weight is ``[out_channels, the rest]``; ranges of these shapes number the output channels.
    """
    quantizer = module._weight_quantizer
    problem = _weight_problem(quantizer, integers)
    if problem:
        return problem
    affine = isinstance(quantizer, AffineQuantizer)
    amax: Any = quantizer.step if affine else calibrated_range(quantizer)
    if amax is not None and amax.numel() > 1 and tuple(amax.shape) not in shapes:
        return (
            f"its weight's ranges, shape {tuple(amax.shape)}, do not run along the output channels"
        )
    if amax is None and quantizer.axis is None:
        amax = by_channel.abs().amax()
    if isinstance(integers, Float8Input):
        high = format_of(quantizer.num_bits).high
        scale = _weight_scale(by_channel, amax.double() * high if affine else amax, high, path)
        bias = None if module.bias is None else module.bias.detach().float()
        numbers = _float8_weight(by_channel, scale, quantizer)
        return numbers, bias, scale.masked_fill(scale == 0, 1.0).float()
    if affine:
        scale = amax.double().reshape(-1).expand(len(by_channel))
        q = quantize(by_channel, scale, bits=quantizer.num_bits, name=path)
        q = q.clamp(int(quantizer.low.max()), int(quantizer.high.min()))
        return q, *_integer_bias(module, integers.scale, scale, path)
    scale = _weight_scale(by_channel, amax, 2 ** (quantizer.num_bits - 1) - 1, path)
    q = _integer_weight(by_channel, scale, quantizer.num_bits, quantizer._narrow_range)
    return q, *_integer_bias(module, integers.scale, scale, path)


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


def _settings(module: Any, op: str, node: fx.Node) -> dict[str, Any]:
    if op == "linear":
        return {}
    called = _called(module, node)
    settings = {"stride": called.stride, "dilation": called.dilation, "groups": called.groups}
    if op != "conv_transpose":
        return settings | {"padding": zero_padding(called)}
    return settings | {"padding": called.padding, "output_padding": called.output_padding}


def _called(module: Any, node: fx.Node) -> Any:
    """Settings of this call: a forward may set the layer's stride anew for each (HITNet)."""
    arguments = node.target._schema.arguments  # type: ignore[union-attr]
    given = dict(zip((a.name for a in arguments), node.args, strict=False)) | node.kwargs
    known: dict[str, Any] = {"kernel_size": module.kernel_size}
    for argument in arguments[3:]:
        value: Any = given.get(argument.name, argument.default_value)
        if argument.name != "groups" and not isinstance(value, str):
            numbers = tuple(value) if isinstance(value, list | tuple) else (value,)
            if any(isinstance(number, fx.Node) for number in numbers):
                numbers = tuple(getattr(module, argument.name))
            value = numbers * (len(module.kernel_size) if len(numbers) == 1 else 1)
        known[argument.name] = value
    return SimpleNamespace(**known)


def geometry_of(module: Any) -> Geometry:
    """Settings of an spconv-style module."""
    rank = int(module.ndim)

    def sizes(name: str) -> tuple[int, ...]:
        value = getattr(module, name, 0 if "padding" in name else 1)
        return (value,) * rank if isinstance(value, int) else tuple(int(v) for v in value)

    names = ("kernel_size", "stride", "padding", "dilation", "output_padding")
    settings: dict[str, Any] = {name: sizes(name) for name in names}
    for name in ("subm", "transposed", "inverse"):
        settings[name] = bool(getattr(module, name, False))
    return Geometry(**settings)


def sparse_layer(
    module: Any, integers: Integers | Float8Input, path: str
) -> Layer | Float8Layer | str:
    """The layer, or why it has no form in integers or FP8."""
    problem = _weight_problem(module._weight_quantizer, integers)
    if problem:
        return problem
    kind = getattr(module, "act_type", None)  # fused into the module; the graph shows a ReLU
    activation = str(getattr(kind, "name", kind)).rstrip("_")
    if activation not in ("None", "ReLU"):
        return f"its activation {activation} has no integer form"
    weight = module.weight_to_quantize().detach()
    axis = module.weight_layout.out_axis % weight.dim()
    along = tuple(size if i == axis else 1 for i, size in enumerate(weight.shape))
    moved = weight.movedim(axis, 0)
    made = _integers(module, moved.reshape(len(moved), -1), [along], integers, path)
    if isinstance(made, str):
        return made
    q, bias, scale = made
    q = q.view(moved.shape).movedim(0, axis)
    geometry, key = geometry_of(module), getattr(module, "indice_key", None)
    weight = permute_weight(
        q, module.weight_layout, WeightLayout.VCK, kernel_size=geometry.kernel_size
    )
    settings = {"geometry": geometry, "indice_key": None if key is None else str(key)}
    return _layer("sparse_conv", weight.contiguous(), bias, scale, integers, settings)


def quantized_layer(module: nn.Module, path: str, node: fx.Node) -> Layer | Float8Layer | str:
    """The integer or FP8 layer of a call of a quantized module, or why it stays float."""
    quantizer: Any = module._modules["_input_quantizer"]
    if not is_active(quantizer):
        return "its input quantizer is off"
    reason = unsupported(quantizer)
    if reason:
        return reason
    form = float8_of(quantizer)
    integers: Integers | Float8Input
    if form is None:
        integers = integers_of(quantizer, path)
    else:
        integers = Float8Input(float8_scale(quantizer, form, path), form)
    if isinstance(module, QuantSparseConvolution):
        own = own_code(module, QuantSparseConvolution)
        return own or sparse_layer(module, integers, path)
    return dense_layer(module, integers, path, node)
