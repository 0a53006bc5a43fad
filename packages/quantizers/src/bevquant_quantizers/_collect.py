"""Run batches through the float model while its calibrators watch."""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import torch
from torch import nn

from ._abs_histogram import AbsHistogram
from ._checkpoint import Checkpoint
from ._distributed import Peers, adopt_widths, lacks_width, widths
from ._select import NamedQuantizer, named_quantizers
from .calib._calibrator import Calibrator
from .calib._histogram_calibrator import HistogramCalibrator

NO_BATCH = object()

Forward = Callable[[nn.Module, Any], Any]


class Collection:
    """One run over the batches, alone or with other processes.

    Args:
        model: The model.
        entries: The quantizers that collect.
        calibrators: Theirs.
        forward: Runs the model on a batch.
        peers: The other processes.
    """

    def __init__(
        self,
        model: nn.Module,
        entries: Sequence[NamedQuantizer],
        calibrators: Sequence[Calibrator],
        forward: Forward,
        peers: Peers | None,
    ) -> None:
        self.model = model
        self.entries = entries
        self.calibrators = calibrators
        self.forward = forward
        self.peers = peers
        self.checkpoint: Checkpoint | None = None

    @torch.no_grad()
    def collect(self, batches: Iterable[Any], save_every: int, progress: bool | None) -> int:
        """Show the calibrators this process's batches; return the number of everyone's."""
        for calibrator in self.calibrators:
            calibrator.reset()
        done = self.checkpoint.load() if self.checkpoint else 0
        together = self._join(done)
        rank, world = (self.peers.rank, self.peers.world) if self.peers else (0, 1)
        dealt = Shares(batches, rank, world)
        saved = done
        with (
            _watching(self.model, self.entries),
            progress_bar(progress if rank == 0 else False, dealt.total, done) as advance,
        ):
            for r, batch in dealt.rounds(done):
                self._one_round(r, batch, with_peers=r >= together)
                done = r + 1
                if self.checkpoint and done % save_every == 0:
                    self.checkpoint.save(done)
                    saved = done
                advance()
        if self.checkpoint and saved < done:
            self.checkpoint.save(done)
        return dealt.count

    def _join(self, done: int) -> int:
        """Agree with the peers on widths from before an interruption.

        Returns:
            The first round from which on all processes go together. One that had saved less does
            the rounds before alone: what widths those rounds set, a process ahead of it knows.
        """
        if self.peers is None:
            return 0
        replies = self.peers.exchange("start", (done, [widths(c) for c in self.calibrators]))
        for i, calibrator in enumerate(self.calibrators):
            if isinstance(calibrator, HistogramCalibrator):
                adopt_widths(calibrator, [reply[1][i] for reply in replies], calibrator._rows)
        return max(int(reply[0]) for reply in replies)

    def _one_round(self, r: int, batch: Any, *, with_peers: bool) -> None:
        """Collect one batch, with bins as wide as one process would have made them."""
        waiting: list[tuple[int, HistogramCalibrator, list[AbsHistogram]]] = []
        if self.peers is not None and with_peers:
            waiting = [
                (i, calibrator, list(calibrator._rows))
                for i, calibrator in enumerate(self.calibrators)
                if isinstance(calibrator, HistogramCalibrator) and lacks_width(calibrator)
            ]
        if batch is not NO_BATCH:
            self._run(r, batch)
        if self.peers is None or not waiting:
            return
        replies = self.peers.exchange(f"round {r}", {i: widths(c) for i, c, _ in waiting})
        again = {
            i
            for i, calibrator, before in waiting
            if adopt_widths(calibrator, [reply[i] for reply in replies], before)
        }
        if again:
            with _only(self.entries, again):
                self._run(r, batch)

    def _run(self, r: int, batch: Any) -> None:
        world, rank = (self.peers.world, self.peers.rank) if self.peers else (1, 0)
        number = r * world + rank
        try:
            self.forward(self.model, batch)
        except Exception as error:
            error.add_note(f"while calibrating with batch {number} (counted from 0)")
            raise
        for calibrator in self.calibrators:
            if isinstance(calibrator, HistogramCalibrator):
                # A maximum of this batch's has no number yet: `combine` kept the older one's.
                calibrator._rows = [
                    replace(row, peak=number) if row.max and row.peak < 0 else row
                    for row in calibrator._rows
                ]


@contextmanager
def _watching(model: nn.Module, entries: Sequence[NamedQuantizer]) -> Iterator[None]:
    """Make the model float and in eval mode, the calibrators watch; then put everything back."""
    training = [(module, module.training) for module in model.modules()]
    every = [entry.quantizer for entry in named_quantizers(model)]
    saved = [(q, q._if_quant, q._if_clip, q._if_calib) for q in every]
    names = [(entry.quantizer, entry.quantizer.name) for entry in entries]
    try:
        model.eval()
        for quantizer in every:
            quantizer._if_quant = quantizer._if_clip = quantizer._if_calib = False
        for entry in entries:
            entry.quantizer._if_calib = True
            entry.quantizer.name = entry.name
        yield
    finally:
        for quantizer, name in names:
            quantizer.name = name
        for quantizer, if_quant, if_clip, if_calib in saved:
            quantizer._if_quant, quantizer._if_clip = if_quant, if_clip
            quantizer._if_calib = if_calib
        for module, flag in training:
            module.training = flag


@contextmanager
def _only(entries: Sequence[NamedQuantizer], chosen: set[int]) -> Iterator[None]:
    """Let only some of the quantizers collect."""
    try:
        for i, entry in enumerate(entries):
            entry.quantizer._if_calib = i in chosen
        yield
    finally:
        for entry in entries:
            entry.quantizer._if_calib = True


@contextmanager
def progress_bar(
    show: bool | None, total: int | None, initial: int = 0
) -> Iterator[Callable[[], object]]:
    """Yield a function to call after each batch.

    Args:
        show: None shows the bar where tqdm is installed and stderr is a terminal.
        total: Number of batches, None where unknown.
        initial: Batches done before.

    Raises:
        ValueError: `show` is True and tqdm is not installed.
    """
    installed = importlib.util.find_spec("tqdm") is not None
    if show and not installed:
        raise ValueError(
            "progress=True needs tqdm: pip install 'bevquant-quantizers[progress]', or leave "
            "progress at None"
        )
    if show is False or not installed or (show is None and not sys.stderr.isatty()):
        yield lambda: None
        return
    from tqdm import tqdm

    with tqdm(total=total, initial=initial, desc="calibrate", unit="batch") as bar:
        yield bar.update


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
