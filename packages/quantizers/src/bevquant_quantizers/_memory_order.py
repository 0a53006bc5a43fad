"""A tensor's values in the order of memory, where counting them needs no copy."""

from __future__ import annotations

from torch import Tensor


def memory_order(x: Tensor) -> list[int]:
    """Axes from the widest stride to the narrowest: channels_last is dense memory too."""
    return sorted(range(x.dim()), key=lambda axis: -x.stride()[axis])


def as_it_lies(x: Tensor) -> Tensor:
    """The values in memory order, for operations that ignore it: no copy of dense memory."""
    return x.permute(memory_order(x)).reshape(-1)
