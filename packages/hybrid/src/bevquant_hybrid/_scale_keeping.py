"""Functions that keep the scale of a quantized tensor."""

from __future__ import annotations

import inspect
import sys
import warnings
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.jit._trace import TracerWarning

from bevquant_hybrid import _integer_ops as ops

from ._fake_quant._function import fake_quantize
from ._sampling import grid_sample_integers
from .dtype import qinfo
from .qtensor import RULES, QTensor, Rule, along, as_float, call_on, on_floats, payload

_SEEN_OTHERWISE = ("H", "T", "mH", "mT", "data")  # attributes that are views
_NO_FACTS = (*_SEEN_OTHERWISE, "real", "imag", "__weakref__")
_FACTS = {
    *(
        getattr(Tensor, name).__get__
        for name in dir(Tensor)
        if inspect.isgetsetdescriptor(getattr(Tensor, name)) and name not in _NO_FACTS
    ),
    *(Tensor.size, Tensor.dim, Tensor.numel, Tensor.stride, Tensor.is_contiguous, Tensor.__len__),
    *(Tensor.nelement, Tensor.ndimension, Tensor.data_ptr, Tensor.get_device, torch.numel),
    *(Tensor.register_hook, Tensor.retain_grad, Tensor.is_complex, torch.is_complex),
    *(Tensor.is_floating_point, torch.is_floating_point, Tensor.is_signed, torch.is_signed),
}
_VIEWS = {
    *(getattr(Tensor, name).__get__ for name in _SEEN_OTHERWISE),
    *(Tensor.view, Tensor.reshape, torch.reshape, Tensor.flatten, torch.flatten),
    *(Tensor.contiguous, Tensor.clone, torch.clone, Tensor.detach, torch.detach),
    *(Tensor.squeeze, torch.squeeze, Tensor.unsqueeze, torch.unsqueeze, Tensor.unflatten),
    *(Tensor.expand, Tensor.expand_as, Tensor.repeat, Tensor.tile, torch.tile, Tensor.__getitem__),
    *(Tensor.split, torch.split, Tensor.chunk, torch.chunk, Tensor.unbind, torch.unbind),
    *(Tensor.flip, torch.flip, Tensor.roll, torch.roll, Tensor.narrow, torch.narrow),
    *(Tensor.select, torch.select, Tensor.index_select, torch.index_select),
    *(Tensor.gather, torch.gather, Tensor.cpu, Tensor.cuda),
    *(Tensor.permute, torch.permute, Tensor.transpose, torch.transpose, Tensor.swapaxes),
    *(torch.swapaxes, Tensor.movedim, torch.movedim),
    *(torch.pixel_shuffle, torch.pixel_unshuffle, torch.channel_shuffle),
}
_ORDER = {
    *(torch.max, Tensor.max, torch.min, Tensor.min, torch.amax, Tensor.amax),
    *(torch.amin, Tensor.amin, torch.topk, Tensor.topk, torch.sort, Tensor.sort),
}
# Results without a scale: indices and truth values.
_PLAIN = {
    *(torch.argmax, Tensor.argmax, torch.argmin, Tensor.argmin, torch.argsort, Tensor.argsort),
    *(torch.eq, torch.ne, torch.gt, torch.ge, torch.lt, torch.le),
    *(torch.greater, torch.greater_equal, torch.less, torch.less_equal),
    *(Tensor.eq, Tensor.ne, Tensor.gt, Tensor.ge, Tensor.lt, Tensor.le),
    *(Tensor.greater, Tensor.greater_equal, Tensor.less, Tensor.less_equal),
    *(Tensor.__gt__, Tensor.__ge__, Tensor.__lt__, Tensor.__le__, Tensor.__eq__, Tensor.__ne__),
}
_DROPOUT = {F.dropout, F.dropout2d, torch.dropout}
_RELU = {F.relu, torch.relu, Tensor.relu, torch.relu_, Tensor.relu_}
_ABS = {torch.abs, Tensor.abs, Tensor.__abs__}
_CLAMP = {torch.clamp, Tensor.clamp, torch.clip, Tensor.clip, F.hardtanh, F.relu6}


def max_pooled(
    x: Tensor,
    kernel_size: int | Sequence[int],
    stride: int | Sequence[int] | None = None,
    padding: int | Sequence[int] = 0,
    dilation: int | Sequence[int] = 1,
    ceil_mode: bool = False,
) -> Tensor:
    """Maximum over windows; the scale stays."""
    steps = kernel_size if stride is None or stride == [] else stride
    kernel, strides, sides = ops.pair(kernel_size), ops.pair(steps), ops.pair(padding)
    return ops.max_pool(x, kernel, strides, sides, ops.pair(dilation), ceil_mode)


def _on_grid_of(x: QTensor, values: Tensor) -> QTensor:
    """Float values rounded to a tensor's grid, if that tensor lies on one."""
    if not x.on_grid:
        return x.like(values)
    info = qinfo(x.dtype)
    return x.like(fake_quantize(values, x.scale, -1, info.min, info.max))


def resized(
    x: QTensor,
    size: int | Sequence[int] | None,
    scale_factor: float | Sequence[float] | None,
    mode: str,
    align_corners: bool,
) -> QTensor:
    """Resize height and width; the result lies on the grid of the input's scale."""
    if mode not in ("nearest", "bilinear"):
        raise NotImplementedError(
            f"interpolate(mode={mode!r}): a BPU resizes by 'nearest' or 'bilinear'"
        )
    values = payload(x)
    if x.holds_integers:
        factors = scale_factor if isinstance(scale_factor, Sequence) else [scale_factor] * 2
        given = [] if scale_factor is None else [float(f) for f in factors if f is not None]
        sizes = [] if size is None else ops.pair(size)
        return x.like(ops.resize(values, sizes, given, mode, align_corners, x.rounding))
    values = F.interpolate(
        values, size, scale_factor, mode, align_corners if mode == "bilinear" else None
    )
    return _on_grid_of(x, values)


def sampled(x: QTensor, grid: Tensor, mode: str, padding_mode: str, align_corners: bool) -> QTensor:
    """Sample by a grid; the result lies on the grid of the input's scale."""
    if mode not in ("nearest", "bilinear") or padding_mode not in ("zeros", "border"):
        raise NotImplementedError(
            f"grid_sample(mode={mode!r}, padding_mode={padding_mode!r}): a BPU samples by "
            "'nearest' or 'bilinear' and pads by 'zeros' or 'border'"
        )
    places = as_float(grid)
    if x.holds_integers:
        settings = mode, padding_mode, align_corners, x.rounding
        return x.like(grid_sample_integers(payload(x), places, *settings))
    values = F.grid_sample(payload(x), places, mode, padding_mode, align_corners)
    return _on_grid_of(x, values)


def clamped(x: QTensor, low: float | None, high: float | None) -> QTensor:
    """Clamp to the steps nearest to the bounds."""
    if not x.on_grid:
        return x.like(payload(x).clamp(low, high))
    scale = along(x.scale, x.dim(), x.q_per_channel_axis()).double()
    info = qinfo(x.dtype)
    values = payload(x)
    for bound, cut in ((low, torch.maximum), (high, torch.minimum)):
        if bound is None:
            continue
        steps = torch.floor(bound / scale + 0.5).clamp(info.min, info.max)
        limit = steps if x.holds_integers else steps * scale
        values = cut(values, limit.to(values.dtype).to(values.device))
    return x.like(values)


def padded(x: QTensor, sides: Sequence[int], mode: str, value: float) -> QTensor:
    """Pad; a constant is rounded to the nearest step."""
    if mode not in ("constant", "replicate"):
        raise NotImplementedError(f"pad(mode={mode!r}): a BPU pads by 'constant' or 'replicate'")
    if mode == "replicate":
        values = payload(x)
        widened = values.double() if x.holds_integers else values
        return x.like(F.pad(widened, list(sides), mode).to(values.dtype))
    filler = clamped(x.like(torch.zeros_like(payload(x))), value, value) if value else None
    constant = float(payload(filler).reshape(-1)[0]) if filler is not None else 0.0
    return x.like(F.pad(payload(x), list(sides), value=constant))


def rule_of(func: Callable[..., Any]) -> Rule | None:
    """Return the rule of a function for quantized tensors, or None."""
    return RULES.get(func)


def gives_plain(func: Callable[..., Any]) -> bool:
    """Whether a function returns indices, truth values or properties, without a scale."""
    return func in _PLAIN or func in _FACTS


def _first(args: tuple[Any, ...], kwargs: dict[str, Any]) -> QTensor:
    """The quantized tensor whose scale the result has."""
    for value in (*args, *kwargs.values()):
        if isinstance(value, QTensor):
            return value
    raise NotImplementedError("a list of quantized tensors takes FloatFunctional().cat")


def _facts(func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    return call_on(func, args, kwargs, payload)


def _view(func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    source = _first(args, kwargs)
    values = call_on(func, args, kwargs, payload)
    if source.has_one_scale:
        return _wrapped(values, source.like)
    # A 32-bit output has per-channel scales, which must be permuted too.
    scales = call_on(func, args, kwargs, QTensor.scale_of_each)
    if isinstance(values, Tensor):
        return source.rescaled(values, scales)
    return type(values)(map(source.rescaled, values, scales))


def _order(func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    source = _first(args, kwargs)
    if not source.has_one_scale:
        raise NotImplementedError(
            f"{func.__name__} cannot order a high-precision output, whose channels have scales of "
            "their own; put a DeQuantStub before it, or give the layer before it an activation "
            "qconfig"
        )
    return _wrapped(call_on(func, args, kwargs, payload), source.like)


def _wrapped(result: Any, wrap: Callable[[Tensor], QTensor]) -> Any:
    """Attach the scale to values; int64 indices stay plain."""
    if isinstance(result, Tensor):
        return result if result.dtype == torch.int64 else wrap(result)
    items = [_wrapped(item, wrap) for item in result]
    return type(result)(items)


def _dropout(func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    source = _first(args, kwargs)
    if source.holds_integers:
        return source
    return source.like(call_on(func, args, kwargs, payload))


def _relu(func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    source = _first(args, kwargs)
    return source.like(payload(source).clamp(min=0))


def _abs(func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    source = _first(args, kwargs)
    top = qinfo(source.dtype).max
    if source.holds_integers:  # |−128| is one step too many
        return source.like(payload(source).clamp(min=-top).abs())
    if not source.on_grid:
        return source.like(payload(source).abs())
    limit = top * along(source.scale, source.dim(), source.q_per_channel_axis())
    return source.like(torch.minimum(payload(source).abs(), limit))


def _clamp(func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    source = _first(args, kwargs)
    if func is F.relu6:
        low, high = 0.0, 6.0
    elif func is F.hardtanh:
        low, high = _arguments(args, kwargs, ("min_val", -1.0), ("max_val", 1.0))
    else:
        low, high = _arguments(args, kwargs, ("min", None), ("max", None))
    if any(isinstance(bound, Tensor) for bound in (low, high)):
        raise NotImplementedError(f"{func.__name__} of a QTensor takes numbers as its bounds")
    return clamped(source, low, high)


def _max_pool(func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    source = _first(args, kwargs)
    if not source.holds_integers:
        return source.like(call_on(func, args, kwargs, payload))
    defaults = (("stride", None), ("padding", 0), ("dilation", 1), ("ceil_mode", False))
    kernel, *rest = _arguments(args, kwargs, ("kernel_size", None), *defaults)
    return source.like(max_pooled(payload(source), kernel, *rest))


def _interpolate(func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    source = _first(args, kwargs)
    names = ("size", "scale_factor", "mode", "align_corners", "recompute_scale_factor")
    defaults = (None, None, "nearest", None, None)
    arguments = _arguments(args, kwargs, *zip(names, defaults, strict=True))
    size, factor, mode, align, recompute = arguments
    if recompute and factor is not None:
        factors = factor if isinstance(factor, list | tuple) else (factor, factor)
        sides = zip(source.shape[2:], factors, strict=True)
        with warnings.catch_warnings():  # a traced model takes the shapes it was traced with
            warnings.simplefilter("ignore", TracerWarning)
            size, factor = [int(n * f) for n, f in sides], None
    return resized(source, size, factor, mode, bool(align))


def _grid_sample(func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    source = args[0] if args else kwargs.pop("input")
    if not isinstance(source, QTensor):  # quantized is the grid alone
        return on_floats(func, (source, *args[1:]), kwargs)
    names = (("grid", None), ("mode", "bilinear"), ("padding_mode", "zeros"))
    grid, mode, padding, align = _arguments(
        (source, *args[1:]), kwargs, *names, ("align_corners", None)
    )
    return sampled(source, grid, mode, padding, bool(align))


def _double(func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    # torch.jit.trace compares the traced model's plain integers with the model's result.
    if sys._getframe(2).f_globals.get("__name__") != "torch.jit._trace":
        raise NotImplementedError(
            "double of a QTensor may mean its integers or its values; say int_repr() or "
            "dequantize() first"
        )
    return call_on(func, args, kwargs, payload)


def _pad(func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    source = _first(args, kwargs)
    pad, mode, value = _arguments(
        args, kwargs, ("pad", None), ("mode", "constant"), ("value", None)
    )
    return padded(source, pad, mode, float(value or 0.0))


def _arguments(
    args: tuple[Any, ...], kwargs: dict[str, Any], *names: tuple[str, Any]
) -> tuple[Any, ...]:
    """Arguments after the first, by position or name."""
    given = dict(zip((name for name, _ in names), args[1:], strict=False)) | kwargs
    return tuple(given.get(name, default) for name, default in names)


RULES |= {
    **dict.fromkeys(_FACTS, _facts),
    **dict.fromkeys(_VIEWS, _view),
    **dict.fromkeys(_ORDER, _order),
    **dict.fromkeys(_PLAIN, on_floats),
    **dict.fromkeys(_DROPOUT, _dropout),
    **dict.fromkeys(_RELU, _relu),
    **dict.fromkeys(_ABS, _abs),
    **dict.fromkeys(_CLAMP, _clamp),
    **dict.fromkeys((F.max_pool2d, torch.max_pool2d), _max_pool),
    Tensor.double: _double,
    F.interpolate: _interpolate,
    F.grid_sample: _grid_sample,
    F.pad: _pad,
}
