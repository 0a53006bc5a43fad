"""Recognise spconv-style objects by class name, without importing spconv."""

from __future__ import annotations

import sys

from torch import nn

_PLAIN_TENSOR_WRAPPERS = frozenset({"SparseBatchNorm", "SparseSyncBatchNorm", "SparseReLU"})


class UnknownSparseTensor:
    """Stands for the sparse tensor class of a library that is not loaded."""


def sparse_tensor_class() -> type:
    """The loaded library's ``SparseConvTensor``, or a stand-in that equals no class."""
    for name in ("spconv.pytorch.core", "spconv.core", "spconv"):
        found = getattr(sys.modules.get(name), "SparseConvTensor", None)
        if isinstance(found, type):
            return found
    return UnknownSparseTensor


def has_base(module: nn.Module, names: frozenset[str]) -> bool:
    """Whether any class in the module's MRO has one of ``names``."""
    return any(cls.__name__ in names for cls in type(module).__mro__)


def is_sparse_module(module: nn.Module) -> bool:
    """Whether the module takes and returns sparse tensors (spconv's ``SparseModule`` family)."""
    return has_base(module, frozenset({"SparseModule"}) | _PLAIN_TENSOR_WRAPPERS)


def is_sparse_sequential(module: nn.Module) -> bool:
    """Whether the module is a ``SparseSequential``-like chain."""
    return has_base(module, frozenset({"SparseSequential"}))
