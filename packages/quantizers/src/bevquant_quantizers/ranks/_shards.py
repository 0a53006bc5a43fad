"""Finished results of a run on disk, frame by frame, returned in order of frames."""

from __future__ import annotations

import hashlib
import json
import logging
import shutil
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from bevquant_quantizers._progress import progress_bar
from bevquant_quantizers.documents import DocumentError, pack_arrays, read_arrays, write_whole

from ._ranks import Ranks, current_ranks

if TYPE_CHECKING:
    from torch import Tensor

Record = Mapping[str, "np.ndarray[Any, Any]"]
"""Named arrays of numbers, booleans or text."""


def pack(record: Record) -> bytes:
    """The arrays as one .npz.

    Raises:
        ValueError: An array of Python objects.

    Example:
        >>> unpack(pack({"sums": np.array([0.1, 2.0])}))["sums"].tolist()
        [0.1, 2.0]
    """
    return pack_arrays(record)


def unpack(data: bytes) -> Record:
    """The arrays that `pack` wrote, bit for bit.

    Raises:
        ValueError: These are not such bytes.
    """
    return read_arrays(data, what="record")


LOG = logging.getLogger(__name__)
# Frames of a rank between two exchanges: what waits for its turn is no more than that.
_ROUND = 16


class Shards:
    """A folder beside the run with the results of finished frames, until the run is written.

    Its name has a digest of all settings that decide these results, so results of other settings
    are never mixed in. A single process stores nothing.

    Args:
        runs: Folder of all runs.
        name: The run.
        settings: Settings that decide the results; values that JSON holds.
        ranks: The processes. Default: those of the launcher.
    """

    def __init__(
        self, runs: Path, name: str, settings: Mapping[str, Any], ranks: Ranks | None = None
    ) -> None:
        self.ranks = current_ranks() if ranks is None else ranks
        self.folder: Path | None = None
        if self.ranks.alone:
            return
        text = json.dumps(settings, sort_keys=True, default=str)
        digest = hashlib.sha256(text.encode()).hexdigest()
        self.ranks.agree("the settings of the run", f"{name} {digest}")
        self.folder = runs / f".{name}.{digest[:12]}.shards"
        self.ranks.goes_on(
            f"run the same command again; it continues with the finished results in {self.folder}"
        )
        self.folder.mkdir(parents=True, exist_ok=True)
        if self.ranks.first:
            finished = len(list(self.folder.glob("*.npz")))
            if finished:
                LOG.info("going on from %d finished records in %s", finished, self.folder)
            write_whole(self.folder / "settings.json", text + "\n")
            for other in runs.glob(f".{name}.*.shards"):
                if other != self.folder:
                    LOG.warning("%s holds finished frames of other settings: delete it", other)

    def file(self, name: str) -> Path | None:
        """A file of that name in the folder, for a step that keeps its own; None alone."""
        return None if self.folder is None else self.folder / name

    def load(self, step: str, index: int) -> Record | None:
        """The result of a frame, if it was finished before."""
        path = self._path(step, index)
        if path is None or not path.exists():
            return None
        try:
            return read_arrays(path, what="record")
        except ValueError as error:
            raise DocumentError(
                f"{path}: {error}: delete it, and the frame is run again"
            ) from error

    def save(self, step: str, index: int, record: Record) -> None:
        """Store the result of a frame, whole or not at all."""
        path = self._path(step, index)
        if path is not None:
            write_whole(path, pack(record))

    def remove(self) -> None:
        """The run is written: nothing of this is needed any more. The first rank calls it."""
        if self.folder is not None and self.ranks.first:
            shutil.rmtree(self.folder, ignore_errors=True)

    def _path(self, step: str, index: int) -> Path | None:
        return None if self.folder is None else self.folder / f"{step}-{index:06d}.npz"


def in_order(
    step: str,
    count: int,
    work: Callable[[int], Record],
    shards: Shards | None = None,
    *,
    anew: int = 0,
) -> Iterator[tuple[int, Record]]:
    """Results of `count` frames in order of frames, run by any rank.

    A single process runs a frame when it is requested. Several processes run `mine(count)`, store
    finished results and exchange them every few frames.

    Args:
        step: Name of the records on disk.
        count: Number of frames.
        work: Returns the record of one frame.
        shards: Storage of finished results; None for none.
        anew: Number of frames, from the first, that run although stored.

    Yields:
        Index and record.
    """
    ranks = current_ranks() if shards is None else shards.ranks

    def done(index: int) -> Record:
        ranks.check()
        kept = None if shards is None or index < anew else shards.load(step, index)
        if kept is None:
            kept = work(index)
            if shards is not None:
                shards.save(step, index, kept)
        return kept

    with progress_bar(None if ranks.first else False, count, desc=step, unit="frame") as tick:
        for index, record in _records(count, done, ranks):
            tick()
            yield index, record


def _records(
    count: int, done: Callable[[int], Record], ranks: Ranks
) -> Iterator[tuple[int, Record]]:
    if ranks.alone:
        for index in range(count):
            yield index, done(index)
        return
    width = _ROUND * ranks.world
    for start in range(0, count, width):
        size = min(width, count - start)
        own = {start + i: pack(done(start + i)) for i in ranks.mine(size)}
        for index, data in ranks.gather(own).items():
            yield index, unpack(data)


def tensors_in_order(
    count: int,
    work: Callable[[int], tuple[Tensor, ...]],
    ranks: Ranks | None = None,
    *,
    by_gpu: bool = False,
) -> Iterator[tuple[Tensor, ...]]:
    """Results of `count` items from the first to the last, run by any rank; not stored.

    Every rank runs one item, then all exchange their results: no more gradients are in memory than
    there are ranks. Tensors travel unchanged, so sums in this order have the bits of one process.

    Args:
        count: Number of items.
        work: Returns the tensors of one item, the same number for each.
        ranks: The processes. Default: those of the launcher.
        by_gpu: Send from GPU to GPU, if each process has one.

    Example:
        >>> import torch
        >>> [float(x) for (x,) in tensors_in_order(3, lambda i: (torch.tensor(2.0 * i),))]
        [0.0, 2.0, 4.0]
    """
    ranks = current_ranks() if ranks is None else ranks
    if ranks.alone:
        yield from map(work, range(count))
        return
    for start in range(0, count, ranks.world):
        size = min(ranks.world, count - start)
        own: dict[int, Tensor] = {}
        for i in ranks.mine(size):
            found = work(start + i)
            own = {len(found) * i + place: tensor for place, tensor in enumerate(found)}
        tensors = list(ranks.gather(own, by_gpu=by_gpu).values())
        each = len(tensors) // size
        yield from (tuple(tensors[each * i : each * (i + 1)]) for i in range(size))
