"""Let the spconv modules of a model, convolutions and pooling, run through these kernels."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any, ClassVar

from torch import Tensor, nn
from torch.nn.utils import parametrize

from bevquant_sparse._modules import is_sparse_conv, known_layout, library_name
from bevquant_sparse._pool import sparse_avg_pool, sparse_max_pool
from bevquant_sparse._rulebook import Rulebook
from bevquant_sparse._rulebook_cache import rulebook_for
from bevquant_sparse._shared_keys import shared_keys
from bevquant_sparse._sparse_tensor import register_tensor_of
from bevquant_sparse._spconv import conv_forward, record_voxel_count, run_conv, with_rulebook

logger = logging.getLogger(__name__)

# What conv_forward reads; other sparse libraries' convolutions lack some of it.
_CONV_ATTRIBUTES = ("in_channels", "kernel_size", "stride", "padding", "subm", "indice_key")


def use_bevquant_kernels(model: nn.Module) -> list[str]:
    """Make every spconv convolution and pooling in ``model`` run through this package, in place.

    Each gets a subclass of its own class, with the same ``__name__``, whose forward is
    ``conv_forward`` (or the pooling of this package): ``isinstance``, ``repr``, parameters, state
    dict, ``copy.deepcopy`` and pickling stay as they were. That is how a float spconv model runs
    right on a CPU, where spconv's own kernels race and have no backward. A subclass with a forward
    of its own (spconv's QAT modules) keeps it; the convolution it calls is what changes.

    Max pooling takes the maximum over the voxels present; spconv's CPU kernel starts at zero and
    so clips negative maxima. Global pooling, of which spconv has no CPU kernel, gives zeros for a
    frame without voxels.

    Args:
        model: Changed in place. Modules changed before are passed over. A convolution that cannot
            be changed (a spconv 1 subclass with its own forward) is logged as a warning, and so
            are SubM convolutions of spconv 1 that share an ``indice_key`` but not a kernel size.

    Returns:
        Dotted paths of the modules changed now (``""`` for the model itself).

    Example:
        >>> use_bevquant_kernels(nn.Sequential(nn.ReLU()))
        []
    """
    if not isinstance(model, nn.Module):
        raise TypeError(
            f"use_bevquant_kernels: model: expected a torch module, got {type(model).__name__}"
        )
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
        if parametrize.is_parametrized(module):
            # torch finds the class to go back to as the first base: the one with these kernels.
            stock = parametrize.type_before_parametrizations(module)
            own = {k: v for k, v in vars(cls).items() if k not in ("__dict__", "__weakref__")}
            module.__class__ = type(cls.__name__, (_kernel_class(stock),), own)
        else:
            module.__class__ = _kernel_class(cls)
        register_tensor_of(cls)
        changed.append(path)
    for key, paths in shared_keys(model).items():
        logger.warning(
            "indice_key=%r is shared by kernels of different sizes; as in spconv 1, all run along "
            "the rulebook of the first one that runs: %s", key, ", ".join(paths),
        )  # fmt: skip
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


class ConvInner(_Kernels):
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
        return run_conv(
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


class MaxPool(_Kernels):
    def forward(self, input: Any) -> Any:
        return _pool_forward(self, input, sparse_max_pool)


class AvgPool(_Kernels):
    def forward(self, input: Any) -> Any:
        return _pool_forward(self, input, sparse_avg_pool)


class GlobalMaxPool(_Kernels):
    def forward(self, input: Any) -> Tensor:
        """Largest features of each frame, [batch_size, channels]; zeros where it has no voxel."""
        features: Tensor = input.features
        frames = input.indices[:, :1].long().expand_as(features)
        start = features.new_zeros(input.batch_size, features.shape[1])
        return start.scatter_reduce(0, frames, features, "amax", include_self=False)


class GlobalAvgPool(_Kernels):
    def forward(self, input: Any) -> Tensor:
        """Mean features of each frame, [batch_size, channels]; zeros where it has no voxel."""
        features: Tensor = input.features
        frames = input.indices[:, 0].long()
        sums = features.new_zeros(input.batch_size, features.shape[1])
        counts = features.new_zeros(input.batch_size, 1)
        counts = counts.index_add(0, frames, features.new_ones(features.shape[0], 1))
        return sums.index_add(0, frames, features) / counts.clamp(min=1)


_POOLS: dict[str, type[_Kernels]] = {
    "spconv.pytorch.pool.SparseMaxPool": MaxPool,
    "spconv.pytorch.pool.SparseAvgPool": AvgPool,
    "spconv.pool.SparseMaxPool": MaxPool,
    "spconv.pytorch.pool.SparseGlobalMaxPool": GlobalMaxPool,
    "spconv.pytorch.pool.SparseGlobalAvgPool": GlobalAvgPool,
}
_made: dict[type[Any], type[Any]] = {}


def _kernel_class(cls: type[Any]) -> type[Any]:
    """The class made for ``cls``: one for each, so that types of equal modules stay equal."""
    if cls not in _made:
        conv = ConvInner if hasattr(cls, "_conv_forward") else _ConvForward
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
    """Pool over the voxels present in each window of spconv's ``SparseMaxPool``."""
    # Kept under ``indice_key``, so that an inverse convolution can undo the pooling.
    rulebook, indice_dict = rulebook_for(module, x, "auto")
    record_voxel_count(module, rulebook)
    return with_rulebook(x, pool(x.features, rulebook), rulebook, indice_dict)
