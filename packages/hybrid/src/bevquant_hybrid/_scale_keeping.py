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

from bevquant_graph import ALIASES
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


def _functions(names: str) -> set[Any]:
    """Functions of torch and methods of tensors, also under their other names."""
    listed = names.split()
    listed += [alias for alias, name in ALIASES.items() if name in listed]
    methods = {getattr(Tensor, name) for name in listed if hasattr(Tensor, name)}
    return methods | {
        getattr(torch, name) for name in listed if name[0] != "_" and hasattr(torch, name)
    }


# Methods that a traced model keeps wherever their input is, as floats or as integers.
PASSING = (
    "chunk clone contiguous detach expand flatten permute repeat reshape split squeeze transpose "
    "unbind unsqueeze view view_as"
)
_VIEWS = {getattr(Tensor, name).__get__ for name in _SEEN_OTHERWISE} | _functions(
    f"{PASSING} __getitem__ channel_shuffle expand_as flip gather index_select movedim narrow "
    "pixel_shuffle pixel_unshuffle roll select t tile unflatten"
)
_VIEWS |= {Tensor.cpu, Tensor.cuda}
_ORDER = _functions("amax amin max min sort topk")
_PLAIN = _functions("argmax argmin argsort eq ge gt le lt ne")  # without a scale
_DROPOUT = {F.dropout, F.dropout2d, torch.dropout}
_RELU = {F.relu} | _functions("relu relu_")
_ABS = _functions("abs __abs__")
_CLAMP = _functions("clamp")


def _max_pool(
    input: QTensor,
    kernel_size: Any,
    stride: Any = None,
    padding: Any = 0,
    dilation: Any = 1,
    ceil_mode: bool = False,
    return_indices: bool = False,  # True is another function of torch
) -> QTensor:
    """Maximum over windows; the scale stays."""
    values = payload(input)
    if not input.holds_integers:
        window = kernel_size, stride, padding, dilation, ceil_mode
        return input.like(F.max_pool2d(values, *window))
    # A traced model hands over an empty list where there is no stride.
    steps = kernel_size if stride is None or stride == [] else stride
    kernel, strides, sides = ops.pair(kernel_size), ops.pair(steps), ops.pair(padding)
    return input.like(ops.max_pool(values, kernel, strides, sides, ops.pair(dilation), ceil_mode))


def _on_grid_of(x: QTensor, values: Tensor) -> QTensor:
    """Float values rounded to a tensor's grid, if that tensor lies on one."""
    if not x.on_grid:
        return x.like(values)
    info = qinfo(x.dtype)
    return x.like(fake_quantize(values, x.scale, -1, info.min, info.max))


def _interpolate(
    input: QTensor,
    size: Any = None,
    scale_factor: Any = None,
    mode: str = "nearest",
    align_corners: bool | None = None,
    recompute_scale_factor: bool | None = None,
    antialias: bool = False,
) -> QTensor:
    """Resize height and width; the result lies on the grid of the input's scale."""
    if mode not in ("nearest", "bilinear") or antialias:
        raise NotImplementedError(
            f"interpolate(mode={mode!r}, antialias={antialias}): a BPU resizes by 'nearest' or "
            "'bilinear', without antialias"
        )
    if recompute_scale_factor and scale_factor is not None:
        each = scale_factor if isinstance(scale_factor, list | tuple) else (scale_factor,) * 2
        sides = zip(input.shape[2:], each, strict=True)
        with warnings.catch_warnings():  # a traced model takes the shapes it was traced with
            warnings.simplefilter("ignore", TracerWarning)
            size, scale_factor = [int(n * f) for n, f in sides], None
    values, corners = payload(input), bool(align_corners)
    if input.holds_integers:
        factors = scale_factor if isinstance(scale_factor, Sequence) else [scale_factor] * 2
        given = [] if scale_factor is None else [float(f) for f in factors if f is not None]
        sizes = [] if size is None else ops.pair(size)
        return input.like(ops.resize(values, sizes, given, mode, corners, input.rounding))
    # torch refuses `align_corners` for "nearest", whatever its value is.
    align = corners if mode == "bilinear" else None
    return _on_grid_of(input, F.interpolate(values, size, scale_factor, mode, align))


def _grid_sample(
    input: Tensor,
    grid: Tensor,
    mode: str = "bilinear",
    padding_mode: str = "zeros",
    align_corners: bool | None = None,
) -> Tensor:
    """Sample by a grid; the result lies on the grid of the input's scale."""
    settings = mode, padding_mode, bool(align_corners)
    if not isinstance(input, QTensor):  # quantized is the grid alone
        return F.grid_sample(input, as_float(grid), *settings)
    if mode not in ("nearest", "bilinear") or padding_mode not in ("zeros", "border"):
        raise NotImplementedError(
            f"grid_sample(mode={mode!r}, padding_mode={padding_mode!r}): a BPU samples by "
            "'nearest' or 'bilinear' and pads by 'zeros' or 'border'"
        )
    places = as_float(grid)
    if input.holds_integers:
        return input.like(grid_sample_integers(payload(input), places, *settings, input.rounding))
    return _on_grid_of(input, F.grid_sample(payload(input), places, *settings))


def clamped(x: QTensor, low: float | None, high: float | None) -> QTensor:
    """Clamp to the steps nearest to the bounds."""
    if any(isinstance(bound, Tensor) for bound in (low, high)):
        raise NotImplementedError("clamp of a QTensor takes numbers as its bounds")
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


def _pad(
    input: QTensor, pad: Sequence[int], mode: str = "constant", value: float | None = None
) -> QTensor:
    """Pad; a constant is rounded to the nearest step."""
    if mode not in ("constant", "replicate"):
        raise NotImplementedError(f"pad(mode={mode!r}): a BPU pads by 'constant' or 'replicate'")
    values = payload(input)
    if mode == "replicate":
        # torch pads doubles by replication, and no integers; 16 bits fit exactly.
        widened = values.double() if input.holds_integers else values
        return input.like(F.pad(widened, list(pad), mode).to(values.dtype))
    number = float(value or 0.0)
    # Clamping zeros at both ends gives the step that is nearest to the number.
    filler = clamped(input.like(torch.zeros_like(values)), number, number) if number else None
    constant = float(payload(filler).reshape(-1)[0]) if filler is not None else 0.0
    return input.like(F.pad(values, list(pad), value=constant))


def _as_called(compute: Callable[..., Tensor]) -> Rule:
    """The rule that calls a function with the arguments of torch's, which have the same names."""
    signature = inspect.signature(compute)

    def rule(func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        try:
            given = signature.bind(*args, **kwargs)
        except TypeError as error:
            raise NotImplementedError(f"{func.__name__} of a QTensor: {error}") from error
        return compute(*given.args, **given.kwargs)

    return rule


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
        # No quantized tensor holds int64.
        return result if result.dtype == torch.int64 else wrap(result)
    items = [_wrapped(item, wrap) for item in result]
    return type(result)(items)


def _dropout(func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    source = _first(args, kwargs)
    # Converted models only infer.
    if source.holds_integers:
        return source
    return source.like(call_on(func, args, kwargs, payload))


def _relu(input: QTensor, inplace: bool = False) -> QTensor:
    return input.like(payload(input).clamp(min=0))


def _abs(input: QTensor) -> QTensor:
    top, values = qinfo(input.dtype).max, payload(input)
    if input.holds_integers:  # |−128| is one step too many
        return input.like(values.clamp(min=-top).abs())
    if not input.on_grid:
        return input.like(values.abs())
    limit = top * along(input.scale, input.dim(), input.q_per_channel_axis())
    return input.like(torch.minimum(values.abs(), limit))


def _double(func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    # torch.jit.trace compares the traced model's plain integers with the model's result.
    if sys._getframe(2).f_globals.get("__name__") != "torch.jit._trace":
        raise NotImplementedError(
            "double of a QTensor may mean its integers or its values; say int_repr() or "
            "dequantize() first"
        )
    return call_on(func, args, kwargs, payload)


RULES |= {
    **dict.fromkeys(_FACTS, _facts),
    **dict.fromkeys(_VIEWS, _view),
    **dict.fromkeys(_ORDER, _order),
    **dict.fromkeys(_PLAIN, on_floats),
    **dict.fromkeys(_DROPOUT, _dropout),
    **dict.fromkeys(_RELU, _as_called(_relu)),
    **dict.fromkeys(_ABS, _as_called(_abs)),
    **dict.fromkeys(_CLAMP, _as_called(lambda input, min=None, max=None: clamped(input, min, max))),
    F.hardtanh: _as_called(
        lambda input, min_val=-1.0, max_val=1.0, inplace=False: clamped(input, min_val, max_val)
    ),
    F.relu6: _as_called(lambda input, inplace=False: clamped(input, 0.0, 6.0)),
    **dict.fromkeys((F.max_pool2d, torch.max_pool2d), _as_called(_max_pool)),
    Tensor.double: _double,
    F.interpolate: _as_called(_interpolate),
    F.grid_sample: _as_called(_grid_sample),
    F.pad: _as_called(_pad),
}
