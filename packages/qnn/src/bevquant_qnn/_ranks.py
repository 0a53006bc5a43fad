"""Results of several processes of torch.distributed, in the order that one process would have."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import cache, partial
from typing import Any, Protocol

import torch.distributed as dist


class Kept(Protocol):
    """Stores the measurements of each batch, so that an interrupted run can continue."""

    def load(self, step: str, index: int) -> list[Any] | None:
        """Result that `save` stored for a batch; None without one."""

    def save(self, step: str, index: int, results: list[Any]) -> None:
        """Store the score's result for each variant of one batch."""


def rank_and_world(distributed: bool | None) -> tuple[int, int]:
    """Return this process's rank and how many there are; 0 and 1 where they do not share work."""
    ready = dist.is_available() and dist.is_initialized()
    if distributed and not ready:
        raise ValueError(
            "distributed=True, but torch.distributed is not initialised; call "
            "torch.distributed.init_process_group first, or start with torchrun"
        )
    # None shares where torch.distributed is initialised, True insists on it.
    return (
        (dist.get_rank(), dist.get_world_size()) if ready and distributed is not False else (0, 1)
    )


def deal_out(
    items: Iterable[Any],
    work: Callable[[Any], Any],
    distributed: bool | None,
    first: Callable[[Any], None] | None = None,
    *,
    step: str = "",
    kept: Kept | None = None,
) -> list[Any]:
    """Results of `work` for all items, in their order; processes share the items.

    Items are the same in every process; of a sequence, each reads only its own. `first` is called
    in every process with the first item, before `work`. `step` names the results in `kept`.
    """
    rank, world = rank_and_world(distributed)
    own: list[Any] = []
    error: Exception | None = None
    try:
        for i, item in _made_late(items):
            if i == 0 and first is not None:
                first(item())
            if i % world != rank:
                continue
            results = None if kept is None else kept.load(step, i)
            if results is None:
                results = work(item())
                if kept is not None:
                    kept.save(step, i, results)
            own.append(results)
    except Exception as problem:
        if world == 1:
            raise
        # The other processes wait for this one, which reports it there.
        error = problem
    return gather_dealt(own, world, error) if world > 1 else own


def _made_late(items: Iterable[Any]) -> Iterator[tuple[int, Callable[[], Any]]]:
    """Number of each item, and a function that returns the item, computed at most once."""
    if isinstance(items, Sequence):
        for i in range(len(items)):
            yield i, cache(partial(items.__getitem__, i))
    else:
        for i, item in enumerate(items):
            yield i, partial(lambda made: made, item)


def gather_dealt(own: Sequence[Any], world: int, error: Exception | None = None) -> list[Any]:
    """Put together items that were dealt out: item i was made by rank i modulo `world`."""
    replies: list[Any] = [None] * world
    text = None if error is None else f"{type(error).__name__}: {error}"
    dist.all_gather_object(replies, (text, list(own)))
    if error is not None:
        raise error
    failed = [f"process {rank}: {reply[0]}" for rank, reply in enumerate(replies) if reply[0]]
    if failed:
        raise RuntimeError(f"stopped, because another process failed; {failed[0]}")
    parts = [reply[1] for reply in replies]
    total = sum(len(part) for part in parts)
    return [parts[i % world][i // world] for i in range(total)]
