"""Functions, methods of tensors and arithmetic, as steps."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from torch import Tensor

from bevquant_hybrid._qdq._call import Call
from bevquant_hybrid._qdq._modules import clamped, grid, on_grid
from bevquant_int8sim.program import Integers, Ref, Step

__all__ = ["arithmetic_steps", "changes_its_input", "function_steps"]

_SAME = {"contiguous", "clone", "detach", "cpu", "cuda", "dropout", "dropout2d"}
_GRIDS: dict[str, str] = {
    "max_pool2d": "kernel_size stride padding dilation ceil_mode return_indices",
    "interpolate": "size scale_factor mode align_corners recompute_scale_factor antialias",
}


def arithmetic_steps(call: Call, method: str) -> list[Step]:
    """A method of a FloatFunctional."""
    args = call.args
    if method in ("add", "add_relu"):
        behind = {"relu": True} if method == "add_relu" else {}
        return [call.step("add", "add", args, attributes=behind)]
    if method in ("add_scalar", "mul_scalar"):
        return [call.function(method.partition("_")[0], args)]
    if method == "matmul":
        names = ("x", "y", "x_trans", "y_trans")
        given = {**dict(zip(names, args, strict=False)), **call.kwargs}
        turned = {name: given.get(name, False) for name in names[2:]}
        return [call.function("matmul", (given["x"], given["y"]), **turned)]
    return [call.function(method, args, **call.kwargs)]


def function_steps(call: Call, function: Callable[..., Any] | str) -> list[Step] | Ref:
    """A function, or a method by its name; or the value that it hands on as it is."""
    what = function if isinstance(function, str) else function.__name__
    args, kwargs = call.args, dict(call.kwargs)
    if not args and "input" in kwargs:
        args = (kwargs.pop("input"),)
    x = args[0]
    if what in _SAME:
        return x  # type: ignore[no-any-return]
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
    return [call.step("float", what, args, kwargs=kwargs, function=known)]


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
        return [call.step("float", what, args, kwargs=kwargs)]
    return clamped(call, args[0], low, high)


def _named(names: str, args: Any, kwargs: Mapping[str, Any]) -> dict[str, Any]:
    """Arguments behind the first one, by name."""
    return {**dict(zip(names.split(), args[1:], strict=False)), **kwargs}
