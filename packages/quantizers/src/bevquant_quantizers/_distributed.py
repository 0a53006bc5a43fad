"""Calibration in several processes, with the result of one process."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from copy import copy
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup

from bevquant_graph import checked_batches

from ._abs_histogram import AbsHistogram
from ._calibrator_state import calibrator_state, load_calibrator_state, settings_of
from .calib._calibrator import Calibrator
from .calib._histogram_calibrator import HistogramCalibrator, combine
from .calib._max import MaxCalibrator


def merge(calibrators: Sequence[Calibrator]) -> Calibrator:
    """Return a new calibrator with the statistics of all given ones.

    Counts are integers and bins of one width nest, so the order does not matter and nothing is
    rounded: the result equals one calibrator that read all tensors, provided that all started with
    the same bin width. That is set by the largest value of the first tensor; `calibrate` agrees on
    it between processes.

    Args:
        calibrators: One or more of one class and settings; they are not changed.

    Raises:
        ValueError: None given, different settings, or histograms of different widths.
        TypeError: A class of calibrator that cannot be merged.

    Examples:
        >>> import torch
        >>> from bevquant_quantizers import calib
        >>> parts = [calib.MaxCalibrator(8, None, False) for _ in range(2)]
        >>> parts[0].collect(torch.tensor([1.0]))
        >>> parts[1].collect(torch.tensor([-3.0]))
        >>> merge(parts).compute_amax()
        tensor(3.)
    """
    if not calibrators:
        raise ValueError("merge needs at least one calibrator")
    first = calibrators[0]
    settings = settings_of(first)
    for other in calibrators[1:]:
        if settings_of(other) != settings:
            raise ValueError(
                f"{first._who()}: calibrators of {settings} and of {settings_of(other)} cannot be "
                "merged"
            )
    merged = copy(first)
    if isinstance(merged, HistogramCalibrator):
        seen = [c for c in calibrators if isinstance(c, HistogramCalibrator) and c._rows]
        for i, part in enumerate(seen):
            if part._shape != seen[0]._shape:
                raise ValueError(
                    f"{first._who()}: histograms of shape {seen[0]._shape} and {part._shape} "
                    "cannot be merged"
                )
            pairs = zip(merged._rows, part._rows, strict=True)
            merged._rows = [combine(a, b) for a, b in pairs] if i else list(part._rows)
            merged._shape = part._shape
    elif isinstance(merged, MaxCalibrator):
        parts = [c for c in calibrators if isinstance(c, MaxCalibrator)]
        merged._amaxs = [amax for part in parts for amax in part._amaxs]
        merged._calib_amax = _largest([p._calib_amax for p in parts], first._who())
    return merged


def _largest(amaxs: Sequence[Tensor | None], who: str) -> Tensor | None:
    seen = [amax for amax in amaxs if amax is not None]
    if not seen:
        return None
    total = seen[0].clone()
    for amax in seen[1:]:
        if amax.shape != total.shape:
            raise ValueError(
                f"{who}: ranges of shape {tuple(total.shape)} and {tuple(amax.shape)} cannot be "
                "merged"
            )
        total = torch.maximum(total, amax.to(total))
    return total


Widths = tuple[tuple[int, ...], list[float]]
"""Shape of the ranges, and the upper edge of each row's base bins (0: none yet)."""


class PeerError(RuntimeError):
    """Another process failed; its message is part of this message."""


class Peers:
    """The processes that calibrate together."""

    def __init__(self, group: ProcessGroup | None = None) -> None:
        self.group = group
        self.rank = dist.get_rank(group)
        self.world = dist.get_world_size(group)

    def exchange(self, tag: str, payload: Any = None, error: str | None = None) -> list[Any]:
        """Return every process's payload, in the order of ranks."""
        # Every exchange carries a tag and an error: processes that lost step, or one that failed,
        # end all of them with a message instead of a wait for one that never comes.
        replies: list[Any] = [None] * self.world
        dist.all_gather_object(replies, (tag, error, payload), group=self.group)
        failed = [f"process {i}: {reply[1]}" for i, reply in enumerate(replies) if reply[1]]
        if failed:
            raise PeerError("calibration stopped, because another process failed; " + failed[0])
        if len({reply[0] for reply in replies}) > 1:
            raise PeerError(
                f"the processes lost step ({', '.join(reply[0] for reply in replies)}): give each "
                "the same model, batches and arguments"
            )
        return [reply[2] for reply in replies]

    def tell(self, error: Exception) -> None:
        """Let the others, who are at their next exchange or will be, end with this error."""
        with suppress(PeerError):
            self.exchange("failed", error=f"{type(error).__name__}: {error}")


def all_merge(calibrator: Calibrator, group: ProcessGroup | None = None) -> Calibrator:
    """Merge the calibrators of all processes; each process gets the same new calibrator.

    `merge` states which calibrators can be merged. All processes of the group must call this.

    Args:
        calibrator: This process's calibrator; it is not changed.
        group: A process group of torch.distributed; the default group if None.

    Raises:
        ValueError: Calibrators of different settings, or histograms of different widths.
    """
    return _merged(calibrator, Peers(group).exchange("merge", calibrator_state(calibrator)))


def merge_all(calibrators: Sequence[Calibrator], peers: Peers, batches: int) -> None:
    """Merge each calibrator with its peers', in place."""
    states = [calibrator_state(calibrator) for calibrator in calibrators]
    replies = peers.exchange("done", (batches, states))
    if len({reply[0] for reply in replies}) > 1:
        raise ValueError(
            f"the processes saw {[reply[0] for reply in replies]} batches: give all of them "
            "the same batches; each takes its share"
        )
    for i, calibrator in enumerate(calibrators):
        merged = _merged(calibrator, [reply[1][i] for reply in replies])
        load_calibrator_state(calibrator, *calibrator_state(merged))


def search_all(
    calibrators: Sequence[Calibrator], peers: Peers | None, method: str, options: dict[str, Any]
) -> list[Tensor | None]:
    """Find every calibrator's range, in turns with the peers."""
    # Only histograms are distributed: the result of a MaxCalibrator needs no search.
    histograms = [i for i, c in enumerate(calibrators) if isinstance(c, HistogramCalibrator)]
    others = {i for turn, i in enumerate(histograms) if peers and turn % peers.world != peers.rank}
    found = [
        None if i in others else calibrator.compute_amax(method, **options)
        for i, calibrator in enumerate(calibrators)
    ]
    if peers is None:
        return found
    # On the CPU: another process's device is not this one's.
    own = {i: _on(found[i], "cpu") for i in {*histograms} - others}
    for searched in peers.exchange("searched", own):
        for i in others & searched.keys():
            found[i] = _on(searched[i], calibrators[i]._device)
    return found


def _on(amax: Tensor | None, device: torch.device | str) -> Tensor | None:
    return None if amax is None else amax.to(device)


def _merged(calibrator: Calibrator, states: Sequence[tuple[Any, Any]]) -> Calibrator:
    parts = []
    for meta, arrays in states:
        part = copy(calibrator)
        part.reset()
        load_calibrator_state(part, meta, arrays)
        parts.append(part)
    return merge(parts)


def lacks_width(calibrator: Calibrator) -> bool:
    """Say whether a histogram has yet to meet a value that sets its bins' width."""
    return isinstance(calibrator, HistogramCalibrator) and (
        not calibrator._rows or any(not row.upper for row in calibrator._rows)
    )


def widths(calibrator: Calibrator) -> Widths | None:
    """Return the widths of a histogram's bins, None where there is none."""
    if not isinstance(calibrator, HistogramCalibrator) or not calibrator._rows:
        return None
    return calibrator._shape, [row.upper for row in calibrator._rows]


def adopt_widths(
    calibrator: HistogramCalibrator, proposals: Sequence[Widths | None], before: list[AbsHistogram]
) -> bool:
    """Take the widths of the first process that has any, row by row.

    Returns whether `before`, the histograms before the current batch, were restored: that batch
    must be collected again.
    """
    given = [proposal for proposal in proposals if proposal is not None]
    if not given:
        return False
    shape = given[0][0]
    if any(other[0] != shape for other in given):
        raise ValueError(
            f"{calibrator._who()}: the processes saw ranges of shapes {[g[0] for g in given]}"
        )
    # In one process the first nonzero value sets the width, and the first batch of a round is that
    # of the first process.
    agreed = [next((u for u in row if u), 0.0) for row in zip(*(g[1] for g in given), strict=True)]
    empty = [_empty(calibrator._num_bins) for _ in agreed]
    again = any(
        row.upper not in (0.0, upper) for row, upper in zip(calibrator._rows, agreed, strict=False)
    )
    rows = (before if again else calibrator._rows) or empty
    calibrator._rows = [
        row if row.upper else replace(row, upper=upper)
        for row, upper in zip(rows, agreed, strict=True)
    ]
    calibrator._shape = shape
    return again


def _empty(bins: int) -> AbsHistogram:
    return AbsHistogram(torch.zeros(bins, dtype=torch.int64), bins, 0.0, 0, 0.0, 0, 0, 0, 0)


def default_peers(distributed: bool | None) -> Peers | None:
    """Return the processes to calibrate with: those of torch.distributed, if there are several."""
    ready = dist.is_available() and dist.is_initialized()
    if distributed and not ready:
        raise ValueError(
            "distributed=True needs torch.distributed: start with torchrun and call "
            "torch.distributed.init_process_group('gloo') first"
        )
    if distributed is False or not ready or dist.get_world_size() < 2:
        return None
    return Peers()


NO_BATCH = object()


class Shares:
    """Batches in rounds of `world`, of which this process takes the one of its rank."""

    def __init__(self, batches: Iterable[Any], rank: int = 0, world: int = 1) -> None:
        self.batches, self.rank, self.world = checked_batches(batches), rank, world
        # Of batches, all processes' and those before the start included; known at the end.
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
        """Yield each round from `start` on with this process's batch, or NO_BATCH."""
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
            # Indexed, so that no process touches another's batches.
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
