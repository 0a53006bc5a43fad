"""Modules without a quantized weight, as steps: float ones, and those whose result has a scale."""

from __future__ import annotations

import math
from typing import Any

from torch import nn

from bevquant_graph import layer_class
from bevquant_hybrid._qdq._call import Call
from bevquant_hybrid._qdq._layers import expect_batch, limits
from bevquant_hybrid.nn import _functions as functions
from bevquant_hybrid.nn import qat
from bevquant_hybrid.nn._arithmetic import Div
from bevquant_hybrid.nn._layer_norm import LayerNorm
from bevquant_hybrid.nn.intrinsic import Fused
from bevquant_hybrid.nn.qat import float_form
from bevquant_hybrid.nn.qat.several_inputs import _top
from bevquant_int8sim.program import Integers, Ref, Step, grid_call, module_call

__all__ = ["clamped", "grid", "module_steps"]

_RESIZING = (functions.Interpolate, nn.Upsample)
_RESIZE_SETTINGS = ("size", "scale_factor", "mode", "align_corners", "recompute_scale_factor")
_PADDINGS: dict[type[nn.Module], str] = {
    nn.ZeroPad2d: "constant",
    nn.ConstantPad2d: "constant",
    nn.ReplicationPad2d: "replicate",
    nn.ReflectionPad2d: "reflect",
}


def module_steps(call: Call, module: nn.Module) -> list[Step] | Ref:
    """Steps of a module, or the value that it hands on as it is."""
    if layer_class(module, nn.Identity, nn.Dropout, nn.Dropout2d):
        return call.args[0]  # type: ignore[no-any-return]
    if isinstance(module, Fused):
        return _fused(call, module)
    if isinstance(module, qat.Div):
        args, top = call.args, float(_top(module))
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
            steps.append(call.step("add", "add", (x, *other), output=output))
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
        tensors = {n: getattr(module, n) for n in ("weight", "bias")}
        axes = module.axes if isinstance(module, LayerNorm) else _last(module)
        return [
            call.step(
                "float", what, (x,), output=output,
                kwargs={"dim": axes, "eps": float(module.eps)}, attributes={"what": "layer_norm"},
                tensors={n: t for n, t in tensors.items() if t is not None},
            )
        ]  # fmt: skip
    if layer_class(module, nn.Softmax) and module.dim is not None and len(args) == 1:
        return [call.function("softmax", args, output=output, dim=module.dim)]
    if layer_class(module, nn.GLU):
        return [call.function("glu", args, output=output, dim=module.dim)]
    if layer_class(module, nn.Flatten, nn.Unflatten, nn.PixelShuffle):
        return [call.step("move", what, (x,), module=module)]
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
    return [call.step("float", what, args, output=output, module=module)]


def _last(module: nn.LayerNorm) -> list[int]:
    return [-1 - i for i in range(len(module.normalized_shape))]


def grid(call: Call, what: str, x: Any, kwargs: dict[str, Any]) -> list[Step]:
    """Pooling or resizing, by the name of torch's function."""
    if what == "interpolate" and kwargs.pop("recompute_scale_factor", None):
        kwargs |= {"size": tuple(call.result.shape[2:]), "scale_factor": None}
    found = grid_call(what, (None,), kwargs)
    if found is None:
        return [call.step("float", what, (x,), kwargs=kwargs)]
    return _grid_step(call, x, *found)


def _grid_step(call: Call, x: Any, op: str, given: dict[str, Any]) -> list[Step]:
    expect_batch(call, 4)
    return [call.step(op, op, (x,), kwargs=given)]


def clamped(
    call: Call, x: Any, low: float | None, high: float | None, output: str = ""
) -> list[Step]:
    """A clamp; of integers to the steps nearest to its bounds, ties up."""
    if low == 0 and (high is None or (high == 6 and not isinstance(call.form, Integers))):
        behind = limits(call, "relu" if high is None else "relu6")
        return [call.step("relu", "relu", (x,), output=output, attributes=behind)]
    bounds = {"min": on_grid(call, low), "max": on_grid(call, high)}
    return [call.function("clamp", (x,), output=output, **bounds)]


def on_grid(call: Call, value: float | None) -> Any:
    """The value of the step that is nearest; a value as it is where the result has no steps."""
    form = call.form
    if value is None or not isinstance(form, Integers):
        return value
    return min(max(math.floor(value / form.scale + 0.5), form.low), form.high) * form.scale
