"""Modules whose forward is known in advance, told by the names of their classes.

``nn.Sequential`` and ``SparseSequential`` run their children one after the other; sparse modules
take and return sparse tensors. Nothing of spconv is imported.
"""

from __future__ import annotations

from torch import nn

_SPARSE = frozenset({"SparseModule", "SparseBatchNorm", "SparseSyncBatchNorm", "SparseReLU"})


def has_base(module: nn.Module, names: frozenset[str]) -> bool:
    """Whether any class in the module's MRO has one of ``names``."""
    return any(cls.__name__ in names for cls in type(module).__mro__)


def is_sparse_module(module: nn.Module) -> bool:
    """Whether the module takes and returns sparse tensors (spconv's ``SparseModule`` family)."""
    return has_base(module, _SPARSE) or is_sparse_chain(module)


def is_chain(module: nn.Module) -> bool:
    """Whether ``module`` runs its children one after the other, by an unchanged forward.

    Told by the class that defines ``forward``: ``nn.Sequential`` or a class named
    ``SparseSequential`` (spconv 1 and 2, mmcv and mmdet3d).
    """
    if "forward" in vars(module):
        return False
    owner = next((cls for cls in type(module).__mro__ if "forward" in vars(cls)), None)
    return owner is nn.Sequential or getattr(owner, "__name__", "") == "SparseSequential"


def is_sparse_chain(module: nn.Module) -> bool:
    """Whether ``module`` is a chain of the ``SparseSequential`` kind."""
    return has_base(module, frozenset({"SparseSequential"})) and is_chain(module)


def remove_member(chain: nn.Module, name: str) -> None:
    """Take ``name`` out of a chain; members numbered 0, 1, 2, … are numbered anew.

    Names given as strings stay as they are, and the chain object stays the same.
    """
    members = [(n, m) for n, m in chain._modules.items() if n != name]
    numbered = list(chain._modules) == [str(i) for i in range(len(chain._modules))]
    chain._modules.clear()
    for index, (old, member) in enumerate(members):
        chain._modules[str(index) if numbered else old] = member
