"""Calibrate a whole model: run batches, search ranges, load them, report."""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from bevquant_graph import Forward, alone, on_batch, running, state_kept, without_autocast

from ._abs_histogram import AbsHistogram
from ._calibrator_state import Checkpoint
from ._channels import InputChannels
from ._distributed import (
    NO_BATCH,
    PeerError,
    Peers,
    Shares,
    adopt_widths,
    default_peers,
    lacks_width,
    merge_all,
    search_all,
    widths,
)
from ._float_ranges import Ranges, joined_ranges, recording, set_float_ranges
from ._progress import progress_bar
from ._ranges import set_range
from ._report import CalibrationReport, describe
from ._select import NamedQuantizer, named_quantizers
from ._steps import SMALLEST_AMAX
from .calib._calibrator import Calibrator
from .calib._histogram_calibrator import HistogramCalibrator
from .calib._search import METHODS

_ADVICE = "Give batches of the sizes and types that the float model takes"


def calibrate(
    model: nn.Module,
    batches: Iterable[Any],
    forward: Forward | None = None,
    method: str = "mse",
    *,
    percentile: float = 99.99,
    stride: int = 1,
    start_bin: int = 128,
    progress: bool | None = None,
    resume: str | os.PathLike[str] | None = None,
    save_every: int = 1,
    distributed: bool | None = None,
) -> CalibrationReport:
    """Find the range of every enabled quantizer that has a calibrator, and load it.

    The model runs as the float model, in evaluation mode without gradients, while the calibrators
    collect; a caller's `torch.autocast` does not apply. Ranges are loaded only after all of them
    are found.

    - A quantizer with several paths is one quantizer. A MaxCalibrator (weights) uses the largest
      value with every method. A learned range starts at the range found.
    - A quantizer that saw no values keeps its range. So does one that saw only zeros, or it gets
      the range 1. A range too small for a scale is raised to 2⁻²³. The report has these cases.
    - Modules with a method ``settle_ranges()`` may then widen their ranges: layers of bevquant_qnn
      do where a bias would exceed int32.
    - Model and batches are not changed: quantizer states, training flags, buffers and attributes
      that forwards write are restored, on an exception and Ctrl-C too. A model with memory keeps it
      from batch to batch within the run. Forwards get containers and tensors of their own. Ranges
      are ordinary tensors, also under ``torch.inference_mode()``. A second thread that calibrates
      the same model waits.
    - The channels of a layer's input may have several units, such as metres and intensities of
      points. Where their ranges differ by more than 16 times, float operations or the model's
      inputs make the tensor, and only layers with weights read it, each channel gets its own range,
      folded into the weights (`TensorQuantizer.channel_factors`), if that at least halves the
      layer's noise. Other channels that one range erases are findings of the report.
    - The largest values that modules read and return are recorded over all frames (`float_ranges`).
      They decide which parts of a file may have half precision.
    - Under torch.distributed each process is given the same batches and runs those whose index is
      its rank modulo the number of processes. Bins are agreed on, integer counts are added, and
      each process searches a share of the ranges. Ranges and report have the bits of a single
      process, as far as the model's results do.

    Args:
        model: The model with quantizers.
        batches: Arguments of `forward`, one by one. They are not kept, so memory is bounded.
        forward: Called as ``forward(model, batch)``. By default the signature of the model's
            forward
            decides: ``(image, label)`` gives the image, a dict its parameters, or itself.
        method: ``"mse"``, ``"entropy"``, ``"percentile"`` or ``"max"``, for histograms.
        percentile: Share of values that the percentile method keeps, 0…100.
        stride: Step between candidates of mse and entropy, in bins.
        start_bin: Their first candidate.
        progress: Show a tqdm bar; None shows it where tqdm is installed and this is a terminal.
        resume: File for the statistics, written after every `save_every` batches. Where it exists,
            the run continues from it, with the result of an uninterrupted run; give the same
            batches in the same order. It is kept at the end: delete it to calibrate anew.
        save_every: Batches between saves.
        distributed: None uses torch.distributed where it is initialised; False does not; True
            requires it.

    Returns:
        The report: a table when printed.

    Raises:
        ValueError: No enabled quantizer with a calibrator, an unknown method, NaN or infinite
            values (naming the quantizer), or a file in `resume` that does not fit.
        PeerError: Another process failed.

    Examples:
        >>> import torch
        >>> from bevquant_quantizers import QuantDescriptor, TensorQuantizer
        >>> model = torch.nn.Sequential(
        ...     TensorQuantizer(QuantDescriptor(calib_method="histogram")), torch.nn.ReLU()
        ... )
        >>> batches = [torch.tensor([0.5, -2.0]), torch.tensor([1.0])]
        >>> report = calibrate(model, batches, method="max")
        >>> report["0"].amax, report["0"].values
        ((2.0,), 3)
    """
    if method not in METHODS:
        raise ValueError(f"unknown method {method!r}: use one of {', '.join(METHODS)}")
    if save_every < 1 or stride < 1 or start_bin < 0 or not 0 <= percentile <= 100:
        raise ValueError(
            "need save_every >= 1, stride >= 1, start_bin >= 0 and 0 <= percentile <= 100, got "
            f"{save_every}, {stride}, {start_bin} and {percentile}"
        )
    options = {"stride": stride, "start_bin": start_bin, "percentile": percentile}
    with alone(model):
        return _calibrated(
            model, batches, forward, method, options, progress, resume, save_every, distributed
        )


def _calibrated(
    model: nn.Module,
    batches: Iterable[Any],
    forward: Forward | None,
    method: str,
    options: dict[str, Any],
    progress: bool | None,
    resume: str | os.PathLike[str] | None,
    save_every: int,
    distributed: bool | None,
) -> CalibrationReport:
    """`calibrate`, while no other thread calibrates the model."""
    entries, calibrators = _collectors(model)
    channels = InputChannels(model, entries)
    own = len(entries)
    entries, calibrators = [*entries, *channels.entries], [*calibrators, *channels.calibrators]
    peers = default_peers(distributed)
    run = _Collection(model, entries, calibrators, forward, peers)
    try:
        if resume is not None:
            rank, world = (peers.rank, peers.world) if peers else (0, 1)
            run.checkpoint = Checkpoint(resume, model, entries, calibrators, rank, world)
        with channels.watching():
            count = run.collect(batches, save_every, progress)
        if peers is not None:
            merge_all(calibrators, peers, count)
            run.floats = joined_ranges(iter(peers.exchange("floats", run.floats)))
        found = search_all(calibrators, peers, method, options)
        found, seen = found[:own], found[own:]
        entries, calibrators = entries[:own], calibrators[:own]
        channels.settle(found, seen, calibrators, {"method": method, **options})
    except PeerError:
        raise
    except Exception as error:
        if peers is not None:
            peers.tell(error)
        raise

    set_float_ranges(model, run.floats)
    loaded: list[Tensor | None] = []
    for entry, amax in zip(entries, found, strict=True):
        taken = None
        if amax is not None and (bool(amax.any()) or entry.quantizer.amax is None):
            taken = _with_scale(amax)
            set_range(entry.quantizer, taken)
        loaded.append(taken)
    for module in model.modules():
        settle = getattr(module, "settle_ranges", None)
        if callable(settle):
            settle()
    reports = []
    for entry, calibrator, amax, given in zip(entries, calibrators, found, loaded, strict=True):
        now, findings = entry.quantizer.amax, channels.findings(entry.quantizer)
        by_channel = channels.shown(entry.quantizer)
        if by_channel is not None:
            calibrator, now = by_channel
            amax = given = now
        reports.append(describe(entry.names, calibrator, amax, given, now, method, findings))
    warnings = () if count else ("there were no batches: no range was calibrated",)
    return CalibrationReport(tuple(reports), count, warnings)


def _with_scale(amax: Tensor) -> Tensor:
    """A range that fake quantization does not count as zero (at most 2⁻²⁴)."""
    # Of ranges per channel zeros stay zeros.
    if amax.numel() != 1:
        return amax
    # Zeros are zeros on any grid, such as the first queries of a DETR; what a branch scaled by 1e-6
    # adds (LayerScale) is kept on the finest one.
    return torch.ones_like(amax) if not bool(amax.any()) else amax.clamp(min=2 * SMALLEST_AMAX)


def _collectors(model: nn.Module) -> tuple[list[NamedQuantizer], list[Calibrator]]:
    """Return the quantizers that are to collect, and their calibrators."""
    entries, calibrators = [], []
    for entry in named_quantizers(model):
        calibrator = entry.quantizer._calibrator
        if calibrator is not None and not entry.quantizer._disabled:
            entries.append(entry)
            calibrators.append(calibrator)
    if not entries:
        raise ValueError(
            "the model has no enabled quantizer with a calibrator: quantize it first, or enable "
            "its quantizers (adopt_quantizers takes over those of pytorch-quantization). If it is "
            "quantized, no layer was: print the result of quantize_model, which names the reasons "
            "(weights computed in a forward become plain ones by fuse_model)"
        )
    return entries, calibrators


class _Collection:
    """One run over the batches, alone or with other processes."""

    def __init__(
        self,
        model: nn.Module,
        entries: Sequence[NamedQuantizer],
        calibrators: Sequence[Calibrator],
        forward: Forward | None,
        peers: Peers | None,
    ) -> None:
        self.model = model
        self.entries = entries
        self.calibrators = calibrators
        # A model that remembers the frame before (a tracker) goes on from batch to batch.
        self.forward = on_batch(forward, keeps_state=False)
        self.peers = peers
        self.checkpoint: Checkpoint | None = None
        self.floats: Ranges = {}

    @torch.no_grad()
    def collect(self, batches: Iterable[Any], save_every: int, progress: bool | None) -> int:
        """Show the calibrators this process's batches; return the number of everyone's."""
        for calibrator in self.calibrators:
            calibrator.reset()
        done = self.checkpoint.load() if self.checkpoint else 0
        self.floats = self.checkpoint.floats if self.checkpoint else {}
        together = self._join(done)
        rank, world = (self.peers.rank, self.peers.world) if self.peers else (0, 1)
        dealt = Shares(batches, rank, world)
        saved = done
        with (
            state_kept(self.model),
            _watching(self.model, self.entries),
            recording(self.model, self.floats),
            progress_bar(
                progress if rank == 0 else False, dealt.total, done, desc="calibrate"
            ) as advance,
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

        Returns the first round from which on all processes go together.
        """
        if self.peers is None:
            return 0
        replies = self.peers.exchange("start", (done, [widths(c) for c in self.calibrators]))
        for i, calibrator in enumerate(self.calibrators):
            if isinstance(calibrator, HistogramCalibrator):
                adopt_widths(calibrator, [reply[1][i] for reply in replies], calibrator._rows)
        # One that had saved less does the rounds before alone: what widths those set, a process
        # ahead of it knows.
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
        # Errors of other kinds name the quantizer.
        with running(self.model, "calibrate", _ADVICE, "this batch", RuntimeError):
            try:
                with without_autocast():  # in here: a loader runs as its user's code
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
