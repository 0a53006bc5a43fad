"""Run one operator alone on what an operator of another model was given."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from torch import Tensor

from bevquant_hybrid._fake_quant._function import fake_quantize
from bevquant_hybrid.dtype import qinfo
from bevquant_hybrid.qtensor import QTensor, along, as_float
from bevquant_hybrid.utils.quant_profiler._calls import Call, tensors_in

__all__ = ["replay"]


def replay(call: Call, inputs: tuple[Tensor, ...]) -> Any:
    """Call an operator again with other values in the form that it was given.

    Where it was given a quantized tensor it gets one: with the scale of the new value if that is
    quantized, else rounded to the scale that it was given before.

    Args:
        call: Of the operator, with its arguments.
        inputs: New values, as many as it was given and of the same shapes.

    Returns:
        The result; None where number or shapes do not fit.
    """
    given = list(tensors_in((call.args, call.kwargs)))
    if [tuple(t.shape) for t in given] != [tuple(t.shape) for t in inputs]:
        return None
    formed = (_in_form_of(old, new) for old, new in zip(given, inputs, strict=True))
    args, kwargs = _refilled((call.args, call.kwargs), formed)
    module: Any = call.operator
    return (getattr(module, call.method) if call.method else module)(*args, **kwargs)


def _refilled(value: Any, tensors: Iterator[Tensor]) -> Any:
    """A structure with other tensors, in the order of `tensors_in`."""
    if isinstance(value, Tensor):
        return next(tensors)
    if isinstance(value, dict):
        return {name: _refilled(item, tensors) for name, item in value.items()}
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        return type(value)(*(_refilled(item, tensors) for item in value))
    if isinstance(value, tuple | list):
        return type(value)(_refilled(item, tensors) for item in value)
    return value


def _in_form_of(old: Tensor, new: Tensor) -> Tensor:
    if isinstance(new, QTensor) and isinstance(old, QTensor) and new.on_grid:
        data = new.int_repr() if old.holds_integers else new.dequantize()
        return _with_settings(old, data.to(old.device), new)
    values = as_float(new).to(old.device)
    if not isinstance(old, QTensor):
        return values.clone()  # an operator may write into it
    if old.holds_integers:
        scale = along(old.scale, values.dim(), old.q_per_channel_axis())
        info = qinfo(old.dtype)
        steps = (values / scale).round().clamp(info.min, info.max)
        return old.like(steps.to(old.dtype.storage))
    if not old.on_grid:
        return old.like(values.clone())
    info = qinfo(old.dtype)
    axis = old.q_per_channel_axis()
    return old.like(fake_quantize(values, old.scale, axis, info.min, info.max))


def _with_settings(old: QTensor, data: Tensor, new: QTensor) -> QTensor:
    """Data with the scale of one tensor and the settings of another."""
    return QTensor(
        data,
        new.scale.to(data.device),
        new.dtype,
        new.q_per_channel_axis(),
        rounding=old.rounding,
        lenient=old.lenient,
        on_grid=new.on_grid,
    )
