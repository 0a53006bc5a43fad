"""Kinds of sparse convolution modules and layouts of their weights, by class."""

from __future__ import annotations

import math
import re
import sys
from typing import Any

from torch import Tensor, nn

from bevquant_sparse._layout import WeightLayout, permute_weight

# Where spconv 1 or 2 was copied into another package (``mmdet3d.ops.spconv.conv``), and where mmcv
# has spconv 1 under names of its own.
_COPIED = re.compile(
    r"^(?:.+\.spconv\.(?=(?:pytorch|conv|modules|pool|tables)\.)|mmcv\.ops\.sparse_)"
)
# Names as `library_name` has them, so that no sparse library has to be imported.
_SPCONV1 = "spconv.conv.SparseConvolution"
_SPCONV2 = "spconv.pytorch.conv.SparseConvolution"
_SPARSE = {
    _SPCONV2: WeightLayout.KRSC,
    _SPCONV1: WeightLayout.RSCK,
    "torchsparse.nn.modules.conv.Conv3d": WeightLayout.VCK,
    "MinkowskiEngine.MinkowskiConvolution.MinkowskiConvolutionBase": WeightLayout.VCK,
}
_DENSE = (nn.Conv1d, nn.Conv2d, nn.Conv3d)
_registered: dict[type | str, WeightLayout] = {}


def _qualified_name(cls: type) -> str:
    return f"{cls.__module__}.{cls.__qualname__}"


def library_name(cls: type) -> str:
    """Qualified name of a class; spconv's own where it was copied into another package.

    Args:
        cls: Any class. Nothing is imported.

    Example:
        >>> Pool = type("SparseMaxPool", (), {"__module__": "plugin.ops.spconv.pool"})
        >>> library_name(Pool), library_name(dict)
        ('spconv.pool.SparseMaxPool', 'builtins.dict')
    """
    return _COPIED.sub("spconv.", _qualified_name(cls))


def register_layout(cls_or_qualified_name: type | str, layout: WeightLayout) -> None:
    """Make a sparse convolution class known, with the layout of its ``weight``.

    Subclasses inherit the registration. A registration goes before what is built in, and a
    later one replaces an earlier one.

    Args:
        cls_or_qualified_name: The class, or ``"package.module.Class"`` for one that need not be
            imported.
        layout: Layout of its ``weight``.

    Raises:
        TypeError: The first argument is neither a class nor a string, or ``layout`` is not a
            ``WeightLayout``.

    Example:
        >>> register_layout("my_fork.spconv.conv.SparseConvolution", WeightLayout.RSCK)
    """
    if not isinstance(cls_or_qualified_name, type | str):
        raise TypeError(
            "register_layout: expected a class or its qualified name, got "
            f"{type(cls_or_qualified_name).__name__}; pass type(module) for an instance"
        )
    if not isinstance(layout, WeightLayout):
        raise TypeError(f"register_layout: expected a WeightLayout, got {layout!r}")
    _registered[cls_or_qualified_name] = layout


def known_layout(cls: type) -> WeightLayout | None:
    """Layout of the sparse convolution class ``cls``, its bases left aside."""
    for key in (cls, _qualified_name(cls)):
        if key in _registered:
            return _registered[key]
    return _SPARSE.get(library_name(cls))


def _known_base(cls: type) -> type | None:
    """The nearest class along the MRO of ``cls`` that is a sparse convolution's."""
    return next((base for base in cls.__mro__ if known_layout(base) is not None), None)


def is_sparse_conv(module: object) -> bool:
    """Whether ``module`` is a sparse convolution: its class, or a base, is known or registered.

    Example:
        >>> from torch import nn
        >>> is_sparse_conv(nn.Conv3d(1, 1, 3))
        False
    """
    return _known_base(type(module)) is not None


def is_spconv1(module: object) -> bool:
    """Whether ``module`` is a convolution of spconv 1, or of mmcv, which has a copy of it."""
    base = _known_base(type(module))
    return base is not None and library_name(base) == _SPCONV1


def layout_of(module: object) -> WeightLayout:
    """Layout of ``module.weight``, from the module's class and never from the weight's shape.

    Classes are recognised by qualified name along the MRO, so subclasses inherit and no sparse
    library is imported. A ``weight_layout`` attribute holding a ``WeightLayout`` goes first:
    that is how a module that took over another's weight says what it holds.

    Raises:
        TypeError: The class is unknown, or its layout is none of ``WeightLayout``.

    Example:
        >>> from torch import nn
        >>> layout_of(nn.Conv2d(1, 1, 3)).name
        'KCRS'
    """
    declared = getattr(module, "weight_layout", None)
    if isinstance(declared, WeightLayout):
        return declared
    base = _known_base(type(module))
    layout = None if base is None else known_layout(base)
    if base is not None and layout is not None:
        if library_name(base) == _SPCONV2:
            _require_krsc(module)
        return layout
    if isinstance(module, _DENSE):
        return WeightLayout.KCRS
    name = _qualified_name(type(module))
    if isinstance(module, nn.ConvTranspose1d | nn.ConvTranspose2d | nn.ConvTranspose3d):
        raise TypeError(
            f"{name} keeps its weight as [in, out/groups, kernel], which is none of the layouts "
            "of WeightLayout"
        )
    raise TypeError(
        f"the weight layout of {name} is unknown; say it with "
        f"register_layout({name!r}, WeightLayout.…)"
    )


def _require_krsc(module: object) -> None:
    """Old spconv 2 builds kept native-algorithm weights otherwise; their constants tell."""
    constants = sys.modules.get("spconv.constants")
    if getattr(constants, "ALL_WEIGHT_IS_KRSC", True):
        return
    if getattr(getattr(module, "algo", None), "name", "") == "Native":
        raise TypeError(
            f"{_qualified_name(type(module))}: this spconv build (ALL_WEIGHT_IS_KRSC=False) keeps "
            "the weights of its native algorithm as [kernel, out, in], which is none of the "
            "layouts of WeightLayout; use spconv 2.2 or later, or another algo"
        )


def weight_name(module: object) -> str:
    """Name of the weight attribute: ``kernel`` in torchsparse and MinkowskiEngine."""
    for name in ("weight", "kernel"):
        if hasattr(module, name):
            return name
    raise TypeError(f"module: expected a convolution, got {type(module).__name__}, without weight")


def _reads_as_matrix(module: object) -> bool:
    """Whether spconv 2 multiplies by ``weight.view(in, out)``: a 1×…×1 kernel, stride 1 or SubM."""
    # A module that took over such a weight declares it.
    declared = getattr(module, "reads_as_matrix", None)
    if isinstance(declared, bool):
        return declared
    # The weight's shape says ``[out, 1, …, 1, in]`` all the same: its memory is read the other way.
    base = _known_base(type(module))
    return (
        base is not None
        and library_name(base) == _SPCONV2
        and bool(getattr(module, "conv1x1", False))
    )


def _kernel_size(module: Any, weight: Tensor, own: WeightLayout) -> tuple[int, ...]:
    size = getattr(module, "kernel_size", None)
    if size is None:
        return own.kernel_size(weight)
    if isinstance(size, int):
        return (size,) * int(getattr(module, "ndim", getattr(module, "dimension", 3)))
    return tuple(int(k) for k in size)


def as_multiplied(module: Any, weight: Tensor) -> tuple[Tensor, WeightLayout]:
    """``weight``, shaped and ordered as ``module``'s own, as it is multiplied, and its layout."""
    own = layout_of(module)
    if own is WeightLayout.VCK and weight.ndim == 2:
        if math.prod(_kernel_size(module, weight, own)) == 1:
            weight = weight.unsqueeze(0)
    elif _reads_as_matrix(module):
        in_channels, out_channels = own.channels(weight)
        ones = (1,) * len(_kernel_size(module, weight, own))
        return weight.reshape(*ones, in_channels, out_channels), WeightLayout.RSCK
    return weight, own


def get_weight(module: Any, layout: WeightLayout) -> Tensor:
    """``module.weight`` in ``layout``, as the module multiplies by it.

    Differentiable back to the module's parameter. spconv 2 multiplies 1×…×1 kernels by
    ``weight.view(in, out)``, not by the transpose that its shape suggests; this function does too.

    Raises:
        TypeError: The module's layout is unknown.

    Example:
        >>> from torch import nn
        >>> conv = nn.Conv2d(4, 8, 3)
        >>> tuple(get_weight(conv, WeightLayout.KRSC).shape)
        (8, 3, 3, 4)
    """
    value = getattr(module, weight_name(module))
    kernel_size = _kernel_size(module, value, layout_of(module))
    weight, own = as_multiplied(module, value)
    return permute_weight(weight, own, layout, kernel_size=kernel_size)


def set_weight(module: Any, weight: Tensor, layout: WeightLayout) -> None:
    """Write ``weight``, given in ``layout``, as a new parameter: the inverse of ``get_weight``.

    The parameter has the old one's shape, dtype, device and ``requires_grad``; ``weight`` is
    copied.

    Raises:
        TypeError: The module's layout is unknown.
        ValueError: ``weight`` does not fit the module's parameter.

    Example:
        >>> import torch
        >>> conv = torch.nn.Conv2d(4, 8, 3)
        >>> set_weight(conv, torch.zeros(3, 3, 4, 8), WeightLayout.RSCK)
        >>> tuple(conv.weight.shape)
        (8, 4, 3, 3)
    """
    name = weight_name(module)
    old: Tensor = getattr(module, name)
    expected = get_weight(module, layout).shape
    if weight.shape != expected:
        raise ValueError(
            f"{_qualified_name(type(module))}.{name}: expected a weight of shape "
            f"{tuple(expected)} in layout {layout.name}, got {tuple(weight.shape)}"
        )
    own = layout_of(module)
    kernel_size = _kernel_size(module, old, own)
    # Through [in, out] memory order where the module reads its memory so.
    target = WeightLayout.RSCK if _reads_as_matrix(module) else own
    value = permute_weight(weight.detach(), layout, target, kernel_size=kernel_size)
    value = value.reshape(old.shape).to(dtype=old.dtype, device=old.device, copy=True)
    setattr(module, name, nn.Parameter(value, requires_grad=old.requires_grad))
