"""``nn.Sequential`` and ``SparseSequential``: containers whose forward is known in advance."""

from __future__ import annotations

from torch import nn


def is_chain(module: nn.Module) -> bool:
    """Whether ``module`` runs its children one after the other, by an unchanged forward.

    Told by the class that defines ``forward``: ``nn.Sequential`` or a class named
    ``SparseSequential`` (spconv 1 and 2, mmcv and mmdet3d). ``SparseSequential`` asks for the
    class of the tensor in its forward, so tracing could not follow it.
    """
    if "forward" in vars(module):
        return False
    owner = next((cls for cls in type(module).__mro__ if "forward" in vars(cls)), None)
    return owner is nn.Sequential or getattr(owner, "__name__", "") == "SparseSequential"


def chain_members(chain: nn.Module) -> list[tuple[str, nn.Module]]:
    """Members in order of execution; one that occurs twice is listed twice."""
    return [(name, m) for name, m in chain._modules.items() if m is not None]


def remove_member(chain: nn.Module, name: str) -> None:
    """Take ``name`` out of a chain; members numbered 0, 1, 2, … are numbered anew.

    Names given as strings stay as they are, and the chain object stays the same.
    """
    members = [(n, m) for n, m in chain._modules.items() if n != name]
    numbered = list(chain._modules) == [str(i) for i in range(len(chain._modules))]
    chain._modules.clear()
    for index, (old, member) in enumerate(members):
        chain._modules[str(index) if numbered else old] = member
