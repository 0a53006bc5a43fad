"""Deal batches out to the processes that calibrate."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Any

__all__ = ["NO_BATCH", "Shares"]

NO_BATCH = object()


class Shares:
    """Batches in rounds of `world`, of which this process takes the one of its rank.

    A list or tuple is indexed, so that no process touches another's batches; anything else is
    iterated.

    Args:
        batches: The same in every process.
        rank: This process.
        world: How many there are.
    """

    def __init__(self, batches: Iterable[Any], rank: int = 0, world: int = 1) -> None:
        self.batches, self.rank, self.world = batches, rank, world
        self.count = 0

    @property
    def total(self) -> int | None:
        """Number of rounds, None where only iterating tells."""
        batches: Any = self.batches
        try:
            return -(-len(batches) // self.world)
        except TypeError:
            return None

    def rounds(self, start: int = 0) -> Iterator[tuple[int, Any]]:
        """Yield each round from `start` on with this process's batch, NO_BATCH where it has none.

        At the end `count` is the number of batches, the other processes' and those before `start`
        included.

        Raises:
            ValueError: Fewer rounds than `start`.
        """
        r = 0
        for r, batch in enumerate(self._mine(start), 1):
            if r > start:
                yield r - 1, batch
        if r < start:
            raise ValueError(
                f"the saved collection has seen {start} rounds of batches, now there are {r}: give "
                "the same batches, or delete the file to begin anew"
            )

    def _mine(self, start: int) -> Iterator[Any]:
        world, batches = self.world, self.batches
        if isinstance(batches, Sequence):
            self.count = len(batches)
            for i in range(self.rank, -(-len(batches) // world) * world, world):
                # Batches that are not needed are not loaded.
                wanted = i < len(batches) and i // world >= start
                yield batches[i] if wanted else NO_BATCH
            return
        mine: Any = NO_BATCH
        for i, batch in enumerate(batches):
            self.count = i + 1
            if i % world == self.rank:
                mine = batch
            if i % world == world - 1:
                yield mine
                mine = NO_BATCH
        if self.count % world:
            yield mine
