"""spconv's modules through this package's kernels: one call of one, or all modules of a model."""

from __future__ import annotations

import logging
from collections.abc import Callable
from types import EllipsisType
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from torch.nn import functional

from bevquant_sparse._conv import sparse_conv
from bevquant_sparse._layout import WeightLayout
from bevquant_sparse._modules import (
    as_multiplied,
    is_sparse_conv,
    known_layout,
    library_name,
    weight_name,
)
from bevquant_sparse._pool import sparse_avg_pool, sparse_max_pool
from bevquant_sparse._rulebook import Rulebook
from bevquant_sparse._rulebook_cache import describe, rulebook_for
from bevquant_sparse._sparse_tensor import register_tensor_of, traced

logger = logging.getLogger(__name__)

_HALF = (torch.float16, torch.bfloat16)
# What conv_forward reads; other sparse libraries' convolutions lack some of it.
_CONV_ATTRIBUTES = ("in_channels", "kernel_size", "stride", "padding", "subm", "indice_key")


def conv_forward(
    module: Any,
    x: Any,
    *,
    features: Tensor | None = None,
    weight: Tensor | None = None,
    layout: WeightLayout | None = None,
    bias: Tensor | EllipsisType | None = ...,
    add_input: Any = None,
    backend: str = "auto",
) -> Any:
    """Run a SubM, strided, transposed or inverse sparse convolution module on ``x``.

    ``out = act(conv(features, weight) + bias [+ add_input])``, differentiable, the same at any
    thread count. Nothing is mutated: the result is a new tensor with a copied ``indice_dict``
    that holds the rulebook under the module's ``indice_key``.

    Args:
        module: Has ``ndim, in_channels, out_channels, kernel_size, stride, padding, dilation,
            output_padding, subm, transposed, inverse, indice_key, weight, bias`` as spconv's
            ``SparseConvolution``; ``act_type`` and ``act_alpha`` are executed where present.
        x: Has ``features, indices, spatial_shape, batch_size, indice_dict`` as spconv's
            ``SparseConvTensor`` (spconv 1 tensors too).
        features: ``[rows, in_channels]`` to use instead of ``x.features``.
        weight: Used instead of ``module.weight``.
        layout: Layout of ``weight``. ``None``: ``weight`` is shaped and ordered as
            ``module.weight``, spconv 2's own reading of 1×…×1 kernels included.
        bias: Used instead of ``module.bias``; ``None`` for no bias.
        add_input: A tensor like ``x`` added to the result before the activation.
        backend: Passed to ``build_rulebook`` and ``sparse_conv``.

    Returns:
        A tensor like ``x``. float16 and bfloat16 features are computed in float32 and returned
        in their own dtype.

    Raises:
        ValueError: Channels, rulebook or coordinates do not fit; the message names the module.
        TypeError: The features are not floating point, or the module's layout is unknown.

    Example:
        >>> out = conv_forward(module, x)                             # doctest: +SKIP
        >>> out = conv_forward(module, x, weight=quantized_weight)    # doctest: +SKIP
    """
    return _run_conv(
        module,
        x,
        x.features if features is None else features,
        getattr(module, weight_name(module)) if weight is None else weight,
        None if weight is None else layout,
        module.bias if isinstance(bias, EllipsisType) else bias,
        add_input=add_input,
        act_type=getattr(module, "act_type", None),
        act_alpha=getattr(module, "act_alpha", 0.0),
        backend=backend,
    )


def _run_conv(
    module: Any,
    x: Any,
    features: Tensor,
    weight: Tensor,
    layout: WeightLayout | None,
    bias: Tensor | None,
    *,
    add_input: Any,
    act_type: Any,
    act_alpha: float | int,
    backend: str,
) -> Any:
    """``conv_forward`` with every operand said; ``module`` gives the geometry alone."""
    _check_module(module, features)
    _suppose_voxels(x.indices)
    rulebook, indice_dict = rulebook_for(module, x, backend)
    if layout is None:
        weight, layout = as_multiplied(module, weight)
    returned, computed = _dtypes(features, weight)
    try:
        out = sparse_conv(
            _cast(features, computed),
            _cast(weight, computed),
            None if bias is None else _cast(bias, computed),
            rulebook,
            layout=layout,
            backend=backend,
        )
    except ValueError as error:
        raise ValueError(f"{describe(module)}: {error}") from error
    if add_input is not None:
        out = out + _cast(add_input.features, computed)
    _record_voxel_count(module, rulebook)
    out = _activate(module, out, act_type, act_alpha)
    return _with_rulebook(x, _cast(out, returned), rulebook, indice_dict)


def _check_module(module: Any, features: Tensor) -> None:
    if not features.is_floating_point():
        raise TypeError(
            f"{describe(module)}: expected floating-point features, got {features.dtype}; "
            "dequantize or convert them first"
        )
    if features.ndim != 2 or features.shape[1] != module.in_channels:
        raise ValueError(
            f"{describe(module)}: expected features [rows, {module.in_channels}], got "
            f"{tuple(features.shape)}; check the channels of the layer before"
        )
    if getattr(module, "groups", 1) != 1:
        raise ValueError(
            f"{describe(module)}: groups={module.groups}; grouped sparse convolutions do not exist "
            "in spconv and are not supported"
        )


def _suppose_voxels(indices: Tensor) -> None:
    """A graph goes the way of a frame with voxels, where it cannot tell how many there are.

    ``SparseSequential`` asks for it in front of every layer. Frames without any run all the same.
    """
    rows: Any = indices.shape[0]
    if isinstance(rows, torch.SymInt) and not rows.node.has_hint():
        torch._check(rows >= 1)


def _dtypes(features: Tensor, weight: Tensor) -> tuple[torch.dtype, torch.dtype]:
    """The dtype to return and the dtype to compute in."""
    computed = features.dtype
    if weight.dtype is not computed:  # promote_types would be a node of an exported graph
        computed = torch.promote_types(computed, weight.dtype)
    computed = torch.float32 if computed in _HALF else computed
    return (features.dtype if features.dtype in _HALF else computed), computed


def _cast(values: Tensor, dtype: torch.dtype) -> Tensor:
    # No call without need: an exported graph would show it.
    return values if values.dtype is dtype else values.to(dtype)


def _activate(module: Any, out: Tensor, act_type: Any, act_alpha: float | int) -> Tensor:
    """Execute a fused activation (spconv's ``tv.gemm.Activation``)."""
    name = "None_" if act_type is None else str(getattr(act_type, "name", act_type))
    if name in ("None_", "None"):
        return out
    if name == "ReLU":
        return functional.relu(out)
    if name == "Sigmoid":
        return torch.sigmoid(out)
    if name == "LeakyReLU":
        return functional.leaky_relu(out, float(act_alpha))
    raise ValueError(
        f"{describe(module)}: act_type={act_type!r} is unknown; expected None_, ReLU, Sigmoid or "
        "LeakyReLU"
    )


def _record_voxel_count(module: Any, rulebook: Rulebook) -> None:
    """Keep the largest number of outputs seen in spconv's ``record_voxel_count`` buffer."""
    seen = getattr(module, "max_num_voxels_during_training", None)
    if seen is not None and getattr(module, "record_voxel_count", False):
        with torch.no_grad():
            seen.clamp_(min=rulebook.num_out)


def _with_rulebook(
    x: Any, features: Tensor, rulebook: Rulebook, indice_dict: dict[Any, Any]
) -> Any:
    """A new tensor like ``x`` holding ``features`` on the rulebook's outputs."""
    indices, shape = rulebook.out_indices, list(rulebook.out_shape)
    if torch.compiler.is_compiling():
        return traced(x, features, indices, shape, indice_dict)
    if hasattr(x, "replace_feature"):
        out = (x.shadow_copy() if hasattr(x, "shadow_copy") else x).replace_feature(features)
    else:
        # spconv 1: the constructor is the only way to another tensor.
        out = type(x)(features, indices, shape, x.batch_size)
        if hasattr(x, "grid"):
            out.grid = x.grid
    out.indices = indices
    out.spatial_shape = shape
    out.indice_dict = indice_dict
    return out


def use_bevquant_kernels(model: nn.Module) -> list[str]:
    """Make every spconv convolution and pooling in ``model`` run through this package, in place.

    Each gets a subclass of its own class, with the same ``__name__``, whose forward is
    ``conv_forward`` (or the pooling of this package): ``isinstance``, ``repr``, parameters, state
    dict, ``copy.deepcopy`` and pickling stay as they were. That is how a float spconv model runs
    right on a CPU, where spconv's own kernels race and have no backward. A subclass with a forward
    of its own (spconv's QAT modules) keeps it; the convolution it calls is what changes.

    Max pooling takes the maximum over the voxels present; spconv's CPU kernel starts at zero and
    so clips negative maxima. ``SparseGlobalMaxPool``, which spconv has no CPU kernel of, gives
    zeros for a frame without voxels.

    Args:
        model: Changed in place. Modules changed before are passed over. A convolution that cannot
            be changed (a spconv 1 subclass with its own forward) is logged as a warning.

    Returns:
        Dotted paths of the modules changed now (``""`` for the model itself).

    Example:
        >>> use_bevquant_kernels(nn.Sequential(nn.ReLU()))
        []
    """
    changed = []
    for path, module in model.named_modules():
        cls = type(module)
        if issubclass(cls, _Kernels):
            continue
        if is_sparse_conv(module) and all(hasattr(module, name) for name in _CONV_ATTRIBUTES):
            if not hasattr(cls, "_conv_forward") and not _is_stock_forward(cls):
                logger.warning(
                    "%s: %s has a forward of its own and keeps running through it", path, cls
                )
                continue
        elif _pool_class(cls) is None:
            continue
        module.__class__ = _kernel_class(cls)
        register_tensor_of(cls)
        changed.append(path)
    return changed


class _Kernels:
    """Marks a class made here; its instances are copied and pickled by the class they came from."""

    stock_class: ClassVar[type]

    def __reduce_ex__(self, protocol: Any) -> Any:
        return _new, (type(self).stock_class,), self.__dict__


class _ConvForward(_Kernels):
    """spconv 1: the whole forward."""

    def forward(self, input: Any) -> Any:
        return conv_forward(self, input)


class _ConvInner(_Kernels):
    """spconv 2: the function that every forward, quantization-aware ones included, ends in."""

    def _conv_forward(
        self,
        training: bool,
        input: Any,
        weight: Tensor,
        bias: Tensor | None,
        add_input: Any = None,
        channel_scale: Any = None,
        output_scale: Any = None,
        name: str | None = None,
        sparse_unique_name: str = "",
        act_type: Any = None,
        act_alpha: float | int = 0.0,
        act_beta: float | int = 0.0,
    ) -> Any:
        return _run_conv(
            self,
            input,
            input.features,
            weight,
            None,
            bias,
            add_input=add_input,
            # A residual block fused by spconv activates after the addition, by its own setting.
            act_type=act_type if add_input is None else getattr(self, "act_type", act_type),
            act_alpha=act_alpha if add_input is None else getattr(self, "act_alpha", act_alpha),
            backend="auto",
        )


class _MaxPool(_Kernels):
    def forward(self, input: Any) -> Any:
        return _pool_forward(self, input, sparse_max_pool)


class _AvgPool(_Kernels):
    def forward(self, input: Any) -> Any:
        return _pool_forward(self, input, sparse_avg_pool)


class _GlobalMaxPool(_Kernels):
    def forward(self, input: Any) -> Tensor:
        """Largest features of each frame, [batch_size, channels]; zeros where it has no voxel."""
        features = input.features
        frames = input.indices[:, :1].long().expand_as(features)
        start = features.new_zeros(input.batch_size, features.shape[1])
        return start.scatter_reduce(0, frames, features, "amax", include_self=False)


_POOLS: dict[str, type[_Kernels]] = {
    "spconv.pytorch.pool.SparseMaxPool": _MaxPool,
    "spconv.pytorch.pool.SparseAvgPool": _AvgPool,
    "spconv.pool.SparseMaxPool": _MaxPool,
    "spconv.pytorch.pool.SparseGlobalMaxPool": _GlobalMaxPool,
}
_made: dict[type[Any], type[Any]] = {}


def _kernel_class(cls: type[Any]) -> type[Any]:
    """The class made for ``cls``: one for each, so that types of equal modules stay equal."""
    if cls not in _made:
        conv = _ConvInner if hasattr(cls, "_conv_forward") else _ConvForward
        body = {
            "__module__": cls.__module__,
            "__qualname__": cls.__qualname__,
            "__doc__": cls.__doc__,
            "stock_class": cls,
        }
        _made[cls] = type(cls.__name__, (_pool_class(cls) or conv, cls), body)
    return _made[cls]


def _new(stock_class: type[Any]) -> Any:
    return object.__new__(_kernel_class(stock_class))


def _pool_class(cls: type) -> type[_Kernels] | None:
    names = (library_name(base) for base in cls.__mro__)
    return next((_POOLS[name] for name in names if name in _POOLS), None)


def _is_stock_forward(cls: type) -> bool:
    """Whether ``forward`` comes from a known sparse convolution class itself."""
    owner = next(base for base in cls.__mro__ if "forward" in vars(base))
    return known_layout(owner) is not None


def _pool_forward(module: Any, x: Any, pool: Callable[[Tensor, Rulebook], Tensor]) -> Any:
    """Pool over the voxels present in each window of spconv's ``SparseMaxPool``.

    The rulebook is kept under ``indice_key``, so that an inverse convolution can undo the pooling.
    """
    rulebook, indice_dict = rulebook_for(module, x, "auto")
    return _with_rulebook(x, pool(x.features, rulebook), rulebook, indice_dict)
