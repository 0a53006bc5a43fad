"""Pooling, resizing and sampling: one name each, for all functions and modules."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.nn.modules import pooling

from bevquant_graph import TENSOR_FORMS, layer_class, op_spec
from bevquant_int8sim._pool import int8_avg_pool, int8_max_pool, int8_resize
from bevquant_int8sim._rounding import round_float
from bevquant_int8sim._sample import MODES, PADDINGS

_MODULES: dict[type[nn.Module], tuple[str, str]] = {
    pooling._MaxPoolNd: (
        "max_pool2d", "kernel_size stride padding dilation ceil_mode return_indices",
    ),
    pooling._AvgPoolNd: (
        "avg_pool2d", "kernel_size stride padding ceil_mode count_include_pad divisor_override",
    ),
    pooling._AdaptiveAvgPoolNd: ("adaptive_avg_pool2d", "output_size"),
    nn.Upsample: ("interpolate", "size scale_factor mode align_corners recompute_scale_factor"),
}  # fmt: skip


def _function(name: str, x: Tensor) -> Any:
    """Torch's pooling over as many axes as the tensor has behind its channels."""
    return getattr(functional, f"{name}{x.dim() - 2}d")


def max_pool(
    x: Tensor, kernel_size: Any, stride: Any, padding: Any, dilation: Any, ceil_mode: bool
) -> Tensor:
    """Maximum over windows, of integers or floats ``[batch, channels, *grid]``."""
    if not x.is_floating_point():
        return int8_max_pool(x, kernel_size, stride, padding, dilation, ceil_mode=ceil_mode)
    pool = _function("max_pool", x)
    result: Tensor = pool(x, kernel_size, stride, padding, dilation, ceil_mode)
    return result


def require(met: Any, where: str) -> bool:
    """Refuse a frame with which the forward decides otherwise than in the example."""
    if not met:
        raise ValueError(
            f"{where}: the forward decides by a number that it takes out of this tensor, or by its "
            "number of rows, and the example's decision is another one; simulate again with inputs "
            f"like these, or keep it a tensor ({TENSOR_FORMS})"
        )
    return True


def resize(
    x: Tensor,
    size: Any,
    scale_factor: Any,
    mode: str,
    align_corners: bool,
    rounding: str = "half_even",
) -> Tensor:
    """Nearest or bilinear resizing, of integers or floats."""
    if not x.is_floating_point() and x.dim() == 4:
        return int8_resize(
            x, size, scale_factor=scale_factor, mode=mode, align_corners=align_corners,
            rounding=rounding,
        )  # fmt: skip
    corners = {} if mode == "nearest" else {"align_corners": align_corners}
    values = x if x.is_floating_point() else x.double()
    result = functional.interpolate(values, size, scale_factor, mode, **corners)
    return result if x.is_floating_point() else result.to(x.dtype)


def average_pool(
    x: Tensor,
    multiplier: float,
    *,
    rounding: str = "half_even",
    kernel_size: Any = None,
    output_size: Any = None,
    **windows: Any,
) -> Tensor:
    """Rounded averages of integers times `multiplier` (s_x / s_y), of the type of `x`.

    Without a kernel size it is adaptive, and its windows may overlap.
    """
    if kernel_size is None:
        kernel_size = _even_windows(x, output_size)
        if kernel_size is None:
            values = average(x.double(), output_size=output_size) * multiplier
            info = torch.iinfo(x.dtype)
            return round_float(values, rounding).clamp_(info.min, info.max).to(x.dtype)
    return int8_avg_pool(x, kernel_size, multiplier=multiplier, rounding=rounding, **windows)


def average(
    x: Tensor,
    *,
    kernel_size: Any = None,
    stride: Any = None,
    padding: Any = 0,
    ceil_mode: bool = False,
    count_include_pad: bool = True,
    output_size: Any = None,
) -> Tensor:
    """The same averages of floats."""
    if kernel_size is None:
        result: Tensor = _function("adaptive_avg_pool", x)(x, output_size)
        return result
    pool = _function("avg_pool", x)
    pooled: Tensor = pool(x, kernel_size, stride, padding, ceil_mode, count_include_pad)
    return pooled


def _even_windows(x: Tensor, output_size: Any) -> tuple[int, ...] | None:
    """The one size of all windows, where they do not overlap."""
    sizes = x.shape[2:]
    wanted: Sequence[Any] = (
        output_size if isinstance(output_size, list | tuple) else [output_size] * len(sizes)
    )
    outs = [n if out is None else int(out) for n, out in zip(sizes, wanted, strict=True)]
    if any(n % out for n, out in zip(sizes, outs, strict=True)):
        return None
    return tuple(n // out for n, out in zip(sizes, outs, strict=True))


def grid_call(what: str, args: Any, kwargs: Mapping[str, Any]) -> tuple[str, dict[str, Any]] | None:
    """``("max_pool" | "avg_pool" | "resize", settings)`` of a call on ``args[0]``.

    ``None`` where it is something else, or has settings that have no integer form.
    """
    kind = op_spec(what).kind
    if kind == "max_pool" and what.endswith("d"):  # not with indices
        names = "kernel_size stride padding dilation ceil_mode return_indices"
        given = _bound(names, args, kwargs, (None, 0, 1, False, False))
        return ("max_pool", given) if given.pop("return_indices", False) is False else None
    if kind == "avg_pool" and what.startswith("avg"):
        names = "kernel_size stride padding ceil_mode count_include_pad divisor_override"
        given = _bound(names, args, kwargs, (None, 0, False, True, None))
        return ("avg_pool", given) if given.pop("divisor_override", None) is None else None
    if kind == "avg_pool":
        return "avg_pool", _bound("output_size", args, kwargs, ())
    if what == "interpolate":
        names = "size scale_factor mode align_corners recompute_scale_factor antialias"
        given = _bound(names, args, kwargs, (None, None, "nearest", None, None, False))
        special = given.pop("recompute_scale_factor"), given.pop("antialias")
        given["align_corners"] = bool(given["align_corners"])
        plain = not any(special) and given["mode"] in ("nearest", "bilinear")
        return ("resize", given) if plain else None
    return None


def sample_call(name: str, places: Sequence[Any]) -> tuple[str, dict[str, Any]]:
    """``("grid_sample" | "deformable_attention", settings)`` of a sampling operator.

    ``""`` where its settings have no integer form. `places` are arguments behind the sampled
    tensor.
    """
    if name.endswith("deformable_attention"):
        return "deformable_attention", {}
    mode, padding, corners = places[1:4]
    if mode >= len(MODES):
        return "", {}
    settings = {"mode": MODES[mode], "padding_mode": PADDINGS[padding], "align_corners": corners}
    return "grid_sample", settings


def module_call(module: nn.Module) -> tuple[str, dict[str, Any]] | None:
    """The same for a pooling or resizing module of torch."""
    kind = layer_class(module, *_MODULES)
    if kind is None or module._modules:  # one that quantizes its input first
        return None
    what, names = _MODULES[kind]
    given = {n: getattr(module, n) for n in names.split() if hasattr(module, n)}
    return grid_call(what, (None,), given)


def _bound(
    names: str, args: Any, kwargs: Mapping[str, Any], defaults: tuple[Any, ...]
) -> dict[str, Any]:
    order = names.split()
    start = len(order) - len(defaults)
    values = dict(zip(order[start:], defaults, strict=True))
    values.update(zip(order, args[1:], strict=False))
    values.update({k: v for k, v in kwargs.items() if k in order})
    if values.get("stride") in ([], ()):  # what operators call the size of the kernel
        values["stride"] = None
    # Torch takes a list of one integer for every axis.
    for name in values.keys() & {"kernel_size", "stride", "padding", "dilation"}:
        if isinstance(values[name], list | tuple) and len(values[name]) == 1:
            values[name] = values[name][0]
    return values
