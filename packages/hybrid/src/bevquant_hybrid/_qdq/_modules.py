"""Calls of a forward as steps: layers, other modules and functions."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from bevquant_graph import layer_class
from bevquant_hybrid.nn import _functions as functions
from bevquant_hybrid.nn import qat
from bevquant_hybrid.nn._functions import Div, LayerNorm
from bevquant_hybrid.nn.intrinsic import Fused
from bevquant_hybrid.nn.qat import float_form
from bevquant_hybrid.nn.qat._base import largest
from bevquant_hybrid.nn.qat.batchnorm import channel_affine
from bevquant_hybrid.qtensor import QTensor
from bevquant_int8sim.program import (
    Add,
    AvgPool,
    Constant,
    Conv,
    ConvTranspose,
    Dequantize,
    FloatCall,
    Form,
    Integers,
    LayoutCall,
    Linear,
    MaxPool,
    NumberCall,
    Ref,
    Relu,
    Resize,
    Step,
    Stored,
    Weighted,
    grid_call,
    module_call,
)

SUM = ":sum"  # behind the name of a fused addition: what the layer gives before


@dataclass(frozen=True)
class Call:
    """A call while a model is read."""

    name: str  # of the value that it makes
    path: str  # module that is called; of a function, the one whose forward calls it
    args: tuple[Any, ...]  # positional arguments; values are `Ref`s
    kwargs: Mapping[str, Any]  # named ones
    given: tuple[Any, ...]  # positional arguments as they are in the example
    result: Any  # what it makes there
    on_cpu: bool  # whether it runs on the CPU although a BPU could run it
    reason: str  # reason of float computation, if any

    @property
    def form(self) -> Form:
        """How its result is held."""
        return form_of(self.result, self.path)

    def step(
        self, kind: type[Step], args: tuple[Any, ...], *, output: str = "", **settings: Any
    ) -> Step:
        """A step of this call; `output` where it does not make the call's own value."""
        given = issubclass(kind, Dequantize | Constant | NumberCall)
        bare = not given and not any(isinstance(part, QTensor) for part in tree_leaves(self.result))
        if issubclass(kind, Stored) and not given:
            settings.setdefault("form", self.form)
        settings |= {"reason": self.reason if bare else "", "on_cpu": self.on_cpu}
        return kind(self.path, args, (output or self.name,), **settings)

    def function(
        self, what: str, args: tuple[Any, ...], *, output: str = "", **kwargs: Any
    ) -> Step:
        """A step that an exporter knows by the name of a function."""
        return self.step(FloatCall, args, output=output, name=what, kwargs=kwargs)


def form_of(value: Any, path: str) -> Form:
    """Integers of eight bits, or floats."""
    if isinstance(value, list | tuple):
        forms = {form_of(part, path) for part in value if isinstance(part, Tensor)}
        return forms.pop() if len(forms) == 1 else "float"
    if not isinstance(value, QTensor):
        return "float"
    if value.dtype == "qint16":
        raise ValueError(
            f"export_qdq_onnx: {path or 'the model'}: its result is quantized to 16 bits, which "
            "QuantizeLinear makes from operator set 21 on; files are of set 11 or 13. Give it a "
            "qint8 qconfig, or run it on the CPU (hybrid_dict)"
        )
    if value.dtype == "qint8" and value.has_one_scale:
        return Integers(float(value.scale.detach().reshape(-1)[0]), 8, -128, 127)
    return "float"


def held(value: Any) -> Any:
    """A value as it is held: integers where it has eight bits, else floats."""
    if isinstance(value, list | tuple):
        return tuple(held(part) for part in value)
    if not isinstance(value, QTensor):
        return value
    return value.int_repr() if form_of(value, "") != "float" else value.dequantize()


def has_tensor(value: Any) -> bool:
    """Whether a value is a tensor, or a container that holds one."""
    return any(isinstance(part, Tensor) for part in tree_leaves(value))


_KINDS: tuple[tuple[type[nn.Module], type[Weighted]], ...] = (
    (nn.ConvTranspose2d, ConvTranspose),
    (nn.Linear, Linear),
    (nn.Module, Conv),
)
_GRID_KINDS: dict[str, type[Step]] = {k.op: k for k in (MaxPool, AvgPool, Resize)}

_RESIZING = (functions.Interpolate, nn.Upsample)
_RESIZE_SETTINGS = ("size", "scale_factor", "mode", "align_corners", "recompute_scale_factor")
_PADDINGS: dict[type[nn.Module], str] = {
    nn.ZeroPad2d: "constant",
    nn.ConstantPad2d: "constant",
    nn.ReplicationPad2d: "replicate",
    nn.ReflectionPad2d: "reflect",
}
_SAME = {"contiguous", "clone", "detach", "cpu", "cuda", "dropout", "dropout2d"}
_GRIDS: dict[str, str] = {
    "max_pool2d": "kernel_size stride padding dilation ceil_mode return_indices",
    "interpolate": "size scale_factor mode align_corners recompute_scale_factor antialias",
}


def weighted(call: Call, layer: Any) -> list[Step]:
    """A layer, and the addition that is fused into it."""
    weight, scale, bias = layer.fixed_weight()
    integers = _integers(call, weight)
    kind = next(kind for cls, kind in _KINDS if isinstance(layer, cls))
    if kind is not Linear:
        expect_batch(call, integers.dim())
    channels = integers.shape[layer.channel_axis]
    # The weight of a transposed convolution is [in, out / groups, …].
    if layer.channel_axis:
        channels *= layer.groups
    settings = {
        "weight": integers,
        "weight_scale": scale.detach().reshape(-1).expand(channels),
        "bias": bias,
        **_settings(layer, kind),
    }
    x, *other = call.args
    behind = limits(call, layer.activation) if layer.activation else {}
    if not other:
        return [call.step(kind, (x,), **settings, **behind)]
    # A fused addition is a step of its own, behind sums of 32 bits.
    made = f"{call.name}{SUM}"
    first = call.step(kind, (x,), output=made, form="int32", **settings)
    return [first, call.step(Add, (Ref(made), *other), **behind)]


def batch_norm(call: Call, norm: Any) -> list[Step]:
    """A batch norm alone: a convolution of each channel with one number."""
    factor, offset = channel_affine(norm)
    shape = (-1, *[1] * (len(call.result.shape) - 1))
    quantized = norm.weight_fake_quant(factor.detach().reshape(-1, 1, 1, 1))
    integers = _integers(call, quantized).reshape(shape)
    count, rank = integers.shape[0], integers.dim() - 2
    ones = (1,) * rank
    scale = quantized.scale.detach().reshape(-1).expand(count)
    return [
        call.step(
            Conv, call.args[:1], weight=integers, weight_scale=scale, bias=offset.detach(),
            stride=ones, padding=((0, 0),) * rank, dilation=ones, groups=count,
        )
    ]  # fmt: skip


def limits(call: Call, activation: str) -> dict[str, Any]:
    """Fields of a ReLU or ReLU6 fused into a layer."""
    if activation == "relu":
        return {"relu": True}
    if isinstance(call.form, Integers):
        # Rounded first and clamped then: the same, as the nearest step to 6 is where 6 goes.
        top = torch.tensor(6.0) / torch.tensor(call.form.scale, dtype=torch.float32)
        return {"relu": True, "ceiling": min(call.form.high, int(top.round()))}
    return {"relu": True, "ceiling": 6.0}


def expect_batch(call: Call, rank: int) -> None:
    """Refuse pictures without a batch, which operators of ONNX do not take."""
    found = call.given[0]
    if isinstance(found, Tensor) and found.dim() != rank:
        raise ValueError(
            f"export_qdq_onnx: {call.path}: its input has shape {tuple(found.shape)}; expected "
            f"{rank} axes. Give the model a batch, [1, C, H, W]"
        )


def _integers(call: Call, weight: QTensor) -> Tensor:
    if weight.dtype != "qint8":
        raise ValueError(
            f"export_qdq_onnx: {call.path}: its weight is {weight.dtype}; expected qint8. Give it "
            "a qconfig with weight_dtype='qint8'"
        )
    return weight.int_repr()


def _settings(layer: Any, kind: type[Weighted]) -> dict[str, Any]:
    if kind is Linear:
        return {}
    shared = {
        "stride": tuple(layer.stride),
        "dilation": tuple(layer.dilation),
        "groups": layer.groups,
    }
    if kind is ConvTranspose:
        padding = {"padding": tuple(layer.padding), "output_padding": tuple(layer.output_padding)}
        return {**shared, **padding}
    # Of the last axis first, before and behind it.
    sides = layer._reversed_padding_repeated_twice
    return {**shared, "padding": tuple(zip(sides[::2], sides[1::2], strict=True))[::-1]}


def module_steps(call: Call, module: nn.Module) -> list[Step] | Ref:
    """Steps of a module, or its unchanged input."""
    if layer_class(module, nn.Identity, nn.Dropout, nn.Dropout2d):
        handed_on: Ref = call.args[0]
        return handed_on
    if isinstance(module, Fused):
        return _fused(call, module)
    if isinstance(module, qat.Div):
        args, top = call.args, float(largest(module))
        return [call.function("guarded_div", args, top=top)]
    if isinstance(module, qat.SegmentLUT):
        return _one(call, module.function, call.args)
    return _one(call, float_form(module), call.args)


def _fused(call: Call, module: Fused) -> list[Step]:
    """Layer, batch norm, addition and activation of a float model, one behind the other."""
    x, *other = call.args
    roles = [r for r in ("conv", "bn", "add", "relu") if (other if r == "add" else module.part(r))]
    steps: list[Step] = []
    for role in roles:
        output = "" if role == roles[-1] else f"{call.name}:{role}"
        part = module.part(role)
        if part is None:
            steps.append(call.step(Add, (x, *other), output=output))
        else:
            steps += _one(call, part, (x,), output)
        x = Ref(output)
    return steps


def _one(call: Call, module: Any, args: tuple[Any, ...], output: str = "") -> list[Step]:
    what, x = type(module).__name__, args[0] if args else None
    if layer_class(module, functions.ElementwiseFunction):
        name = type(module).function.__name__
        return [call.function(name, args, output=output)]
    if layer_class(module, functions.Pow):
        power = args[1] if len(args) > 1 else module.exponent
        return [call.function("pow", (x, power), output=output)]
    if isinstance(module, Div):
        return [call.function("div", args, output=output)]
    if layer_class(module, nn.ReLU, nn.ReLU6):
        return clamped(call, x, 0.0, 6.0 if layer_class(module, nn.ReLU6) else None, output)
    if layer_class(module, nn.Hardtanh):
        return clamped(call, x, module.min_val, module.max_val, output)
    if layer_class(module, nn.LayerNorm) and len(args) == 1:
        settings = {
            "dim": module.axes if isinstance(module, LayerNorm) else functions.last_axes(module),
            "eps": float(module.eps),
            "weight": module.weight,
            "bias": module.bias,
        }
        return [call.function("layer_norm", (x,), output=output, **settings)]
    if layer_class(module, nn.Softmax) and module.dim is not None and len(args) == 1:
        return [call.function("softmax", args, output=output, dim=module.dim)]
    if layer_class(module, nn.GLU):
        return [call.function("glu", args, output=output, dim=module.dim)]
    if layer_class(module, nn.Flatten, nn.Unflatten, nn.PixelShuffle):
        return [call.step(LayoutCall, (x,), name=what, module=module)]
    if layer_class(module, nn.PixelUnshuffle):
        return [call.function("pixel_unshuffle", (x, module.downscale_factor))]
    if layer_class(module, nn.ChannelShuffle):
        return [call.function("channel_shuffle", (x, module.groups))]
    kind = layer_class(module)
    if kind in _PADDINGS:
        mode = _PADDINGS[kind]
        value = float(getattr(module, "value", 0.0))
        return [call.function("pad", (x, module.padding, mode, on_grid(call, value)))]
    if layer_class(module, *_RESIZING):
        settings = {name: getattr(module, name, None) for name in _RESIZE_SETTINGS}
        return grid(call, "interpolate", x, settings)
    found = module_call(module) if len(args) == 1 else None
    if found is not None:
        return _grid_step(call, x, *found)
    return [call.step(FloatCall, args, output=output, name=what, module=module)]


def grid(call: Call, what: str, x: Any, kwargs: dict[str, Any]) -> list[Step]:
    """Pooling or resizing, by the name of torch's function."""
    if what == "interpolate" and kwargs.pop("recompute_scale_factor", None):
        # The factors of the size that results are what torch would compute again.
        kwargs |= {"size": tuple(call.result.shape[2:]), "scale_factor": None}
    found = grid_call(what, (None,), kwargs)
    if found is None:
        return [call.function(what, (x,), **kwargs)]
    return _grid_step(call, x, *found)


def _grid_step(call: Call, x: Any, op: str, given: dict[str, Any]) -> list[Step]:
    expect_batch(call, 4)
    scale: Any = {"scale": 1.0} if op == "avg_pool" else {}
    return [call.step(_GRID_KINDS[op], (x,), kwargs=given, **scale)]


def clamped(
    call: Call, x: Any, low: float | None, high: float | None, output: str = ""
) -> list[Step]:
    """A clamp; of integers to the steps nearest to its bounds, ties up."""
    # Of integers, 6 goes to the nearest step like any other bound.
    if low == 0 and (high is None or (high == 6 and not isinstance(call.form, Integers))):
        behind: Any = limits(call, "relu" if high is None else "relu6")
        return [call.step(Relu, (x,), output=output, **behind)]
    bounds = {"min": on_grid(call, low), "max": on_grid(call, high)}
    return [call.function("clamp", (x,), output=output, **bounds)]


def on_grid(call: Call, value: float | None) -> Any:
    """The value of the step that is nearest; a value as it is where the result has no steps."""
    form = call.form
    if value is None or not isinstance(form, Integers):
        return value
    return min(max(math.floor(value / form.scale + 0.5), form.low), form.high) * form.scale


def arithmetic_steps(call: Call, method: str) -> list[Step]:
    """A method of a FloatFunctional."""
    args = call.args
    if method in ("add", "add_relu"):
        behind: Any = {"relu": True} if method == "add_relu" else {}
        return [call.step(Add, args, **behind)]
    if method in ("add_scalar", "mul_scalar"):
        return [call.function(method.partition("_")[0], args)]
    if method == "matmul":
        names = ("x", "y", "x_trans", "y_trans")
        given = {**dict(zip(names, args, strict=False)), **call.kwargs}
        turned = {name: given.get(name, False) for name in names[2:]}
        return [call.function("matmul", (given["x"], given["y"]), **turned)]
    return [call.function(method, args, **call.kwargs)]


def function_steps(call: Call, function: Callable[..., Any] | str) -> list[Step] | Ref:
    """Steps of a function or named method, or its unchanged input."""
    what = function if isinstance(function, str) else function.__name__
    args, kwargs = call.args, dict(call.kwargs)
    if not args and "input" in kwargs:
        args = (kwargs.pop("input"),)
    x: Ref = args[0]
    if what in _SAME:
        return x
    if what in ("relu", "relu_"):
        return clamped(call, x, 0.0, None)
    if what == "relu6":
        return clamped(call, x, 0.0, 6.0)
    if what in ("hardtanh", "clamp", "clamp_", "clip"):
        return _clamp(call, what, args, kwargs)
    if what == "abs" and isinstance(call.form, Integers):
        made = f"{call.name}:abs"
        top = call.form.high * call.form.scale  # |−128| is one step too many
        return [
            call.function("abs", (x,), output=made),
            call.function("clamp", (Ref(made),), min=None, max=top),
        ]
    if what == "pad":
        given = _named("pad mode value", args, kwargs)
        mode, value = given.get("mode", "constant"), on_grid(call, given.get("value") or 0.0)
        return [call.function("pad", (x, given["pad"], mode, value))]
    if what in _GRIDS:
        return grid(call, what, x, _named(_GRIDS[what], args, kwargs))
    known: Any = getattr(Tensor, what, None) if isinstance(function, str) else function
    return [call.step(FloatCall, args, name=what, kwargs=kwargs, function=known)]


def changes_its_input(what: str, kwargs: Mapping[str, Any]) -> bool:
    """Whether a function writes into the tensor that it is given."""
    in_place = what.endswith("_") and not what.endswith("__")
    operators = ("iadd", "isub", "imul", "itruediv")
    return in_place or what in operators or bool(kwargs.get("inplace"))


def _clamp(call: Call, what: str, args: Any, kwargs: Mapping[str, Any]) -> list[Step]:
    names = "min_val max_val" if what == "hardtanh" else "min max"
    given = _named(names, args, kwargs)
    low, high = (given.get(n, d) for n, d in zip(names.split(), (-1.0, 1.0), strict=True))
    if what != "hardtanh":
        low, high = given.get("min"), given.get("max")
    if any(isinstance(bound, Ref) for bound in (low, high)):
        return [call.function(what, args, **kwargs)]
    return clamped(call, args[0], low, high)


def _named(names: str, args: Any, kwargs: Mapping[str, Any]) -> dict[str, Any]:
    """Arguments behind the first one, by name."""
    return {**dict(zip(names.split(), args[1:], strict=False)), **kwargs}
