"""The neighbour table that every kernel reads, and what is derived from it, kept beside it."""

from __future__ import annotations

from collections.abc import Callable, MutableMapping
from dataclasses import dataclass
from functools import partial
from threading import Lock
from typing import Any, TypeVar

import torch
from torch import Tensor
from torch.utils.weak import WeakIdKeyDictionary

_T = TypeVar("_T")
# By the table's identity, for as long as the table lives: layers that share a rulebook share what
# is derived from it, also in an exported graph, whose operators hand on the tensor alone.
_derived: MutableMapping[Tensor, dict[object, Any]] = WeakIdKeyDictionary()
_lock = Lock()


@dataclass(frozen=True)
class Table:
    """Input rows by output row and kernel offset."""

    # Int32 ``[num_out, kernel_volume]``, −1 where there is none.
    neighbours: Tensor
    num_in: int
    # Whether inputs and outputs are the same rows and the kernel is centred: the table is its own
    # inverse, mirrored.
    subm: bool

    @property
    def num_out(self) -> int:
        """Number of output rows."""
        return self.neighbours.shape[0]

    @property
    def kernel_volume(self) -> int:
        """Number of kernel offsets."""
        return self.neighbours.shape[1]

    @property
    def inverse(self) -> Tensor:
        """int32 ``[num_in, kernel_volume]``: the output row each input reaches, −1 where none."""
        return self.derive(("inverse", self.num_in), partial(_inverse, self))

    @property
    def pairs(self) -> tuple[Tensor, Tensor, list[int]]:
        """All pairs grouped by kernel offset: ``(in_rows, out_rows, bounds)``."""
        return self.derive("pairs", partial(_pairs, self.neighbours))

    def derive(self, name: object, make: Callable[[], _T]) -> _T:
        """What ``make`` returns, made once for this table; it must not hold the table itself."""
        with _lock:
            kept = _derived.setdefault(self.neighbours, {})
        if name not in kept:
            kept[name] = make()
        found: _T = kept[name]
        return found


def _inverse(table: Table) -> Tensor:
    if table.subm:
        # Row i sees j under offset k exactly where j sees i under the mirrored offset.
        return table.neighbours.flip(1)
    volume = table.kernel_volume
    flat = table.neighbours.reshape(-1)
    places = (flat >= 0).nonzero().view(-1)
    out_rows = torch.div(places, volume, rounding_mode="floor")
    in_rows = flat.index_select(0, places).long()
    inverse = flat.new_full((table.num_in * volume,), -1)
    inverse.scatter_(0, in_rows * volume + places - out_rows * volume, out_rows.to(torch.int32))
    return inverse.view(table.num_in, volume)


def _pairs(neighbours: Tensor) -> tuple[Tensor, Tensor, list[int]]:
    by_offset = neighbours.t().contiguous()
    flat = by_offset.view(-1)
    places = (flat >= 0).nonzero().view(-1)
    in_rows = flat.index_select(0, places).long()
    out_rows = places % max(neighbours.shape[0], 1)
    return in_rows, out_rows, [0, *(by_offset >= 0).sum(1).cumsum(0).tolist()]
