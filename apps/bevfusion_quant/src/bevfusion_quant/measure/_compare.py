"""Float against fake-quant, layer by layer and stage by stage, on the same frames."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Set
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn

from bevfusion.model import Batch
from bevfusion_quant.measure._lockstep import Leader, lead
from bevfusion_quant.measure._stage_maps import StageMaps, stage_probes, whole_output
from bevfusion_quant.measure._sums import PairSums
from bevquant_qnn import QuantMultiheadAttention
from bevquant_quantizers import QuantizerValues, watching_quantizers

if TYPE_CHECKING:
    import bevquant_int8sim
    from bevquant_quantizers.ranks import Record

__all__ = ["Comparison", "LayerComparison", "LayerRow", "compare_layers"]

Pair = Callable[[int, Any, Any], None]
INTEGERS = "integers."  # stands before what the comparison with the integer model gave in a record


@dataclass(frozen=True)
class LayerRow:
    """How far the fake-quant model's output of one layer is from the float model's.

    `sqnr_db` is 10·log10(Σ float² / Σ (quant − float)²), None where the two are equal or the float
    output is all zero; `cosine` the cosine of the two outputs seen as vectors, None where one is
    zero; `saturated` the share of the layer's input values beyond its range; `rows` the mean
    number of active voxels (cells or pixels, for dense maps) in a frame.
    """

    layer: str
    kind: str
    channels: int
    rows: float
    sqnr_db: float | None
    cosine: float | None
    saturated: float | None
    input_amax: float | None


class Comparison(NamedTuple):
    """Rows of the layer table, the stages, and both models' output for the first batch.

    The outputs are None in a process that another one spared the first batch.
    """

    rows: list[LayerRow]
    stages: list[StageMaps]
    wanted: Any
    got: Any


@dataclass(eq=False)
class _Probe:
    """Watches one layer in both models."""

    layer: str
    kind: str
    reader: nn.Module | None  # the quantized module whose input range this is
    sums: PairSums = field(default_factory=PairSums)
    channels: int = 0
    rows: int = 0
    frames: int = 0
    beyond: int = 0
    inputs: int = 0

    def take(self) -> tuple[tuple[float, ...], tuple[int, ...]]:
        """What one frame has added, and forget it."""
        taken = self.sums.as_sums(), (
            self.channels, self.rows, self.frames, self.beyond, self.inputs,
        )  # fmt: skip
        self.clear()
        return taken

    def clear(self) -> None:
        self.sums = PairSums()
        self.channels = self.rows = self.frames = self.beyond = self.inputs = 0

    def add(self, sums: Any, counts: Any) -> None:
        """Add what `take` gave."""
        self.sums.add_sums(sums)
        channels, rows, frames, beyond, inputs = (int(count) for count in counts)
        self.channels = channels
        self.rows += rows
        self.frames += frames
        self.beyond += beyond
        self.inputs += inputs

    def judge(self, wanted: Tensor, got: Tensor, *, channels_last: bool = False) -> None:
        self.sums.add(wanted, got)
        self.channels = got.shape[-1 if channels_last else 1]
        self.rows += got.numel() // self.channels
        self.frames += 1

    def count(self, module: nn.Module, args: Any) -> None:
        amax = self.amax()
        if amax is None:
            return
        for value in args:
            x = whole_output(value)
            self.inputs += x.numel()
            if x.numel():
                low, high = x.aminmax()
                if float(high) > amax or float(low) < -amax:
                    self.beyond += int(torch.count_nonzero(x.abs() > amax))

    def amax(self) -> float | None:
        amax = getattr(getattr(self.reader, "_input_quantizer", None), "_amax", None)
        return float(amax.max()) if isinstance(amax, Tensor) else None

    def row(self) -> LayerRow:
        return LayerRow(
            layer=self.layer,
            kind=self.kind,
            channels=self.channels,
            rows=self.rows / max(self.frames, 1),
            sqnr_db=self.sums.sqnr_db,
            cosine=self.sums.cosine,
            saturated=self.beyond / self.inputs if self.inputs else None,
            input_amax=self.amax(),
        )


def compare_layers(
    float_model: nn.Module,
    quantized_model: nn.Module,
    batches: Iterable[Batch],
    each: Pair | None = None,
) -> Comparison:
    """One row per quantized layer in the order of execution, then one for the model's output.

    The two models run in step, the float one a layer ahead, so that no more than one of its
    activations is kept for the comparison.

    Args:
        float_model: The folded float model.
        quantized_model: The calibrated model made from it; layers correspond by path. Layers that
            the float model does not have (QuantAdd) are compared where their block ends.
        batches: At least one; every batch is run through both models.
        each: Called with the batch's index and both models' output, batch after batch.

    Returns:
        Rows pooled over all batches (sums of squares, not means of decibels). The row `output` is
        the bird's-eye view that the model answers, or the head's heatmap.
    """
    comparison = LayerComparison(float_model, quantized_model)
    with comparison.watching():
        for index, batch in enumerate(batches):
            record, wanted, got = comparison.run(index, batch)
            comparison.add(record)
            if each is not None:
                each(index, wanted, got)
    return comparison.result()


class LayerComparison:
    """`compare_layers` frame by frame: what one frame gave is a record, and records are added up.

    Sums are taken over each frame, and these added in the order of `add`: whoever ran a frame, the
    result has the same bits.

    Args:
        float_model: The folded float model.
        quantized_model: The calibrated model made from it.
        integers: The comparison of both with the integer model, which then goes on beside them and
            reads what their layers return.

    Attributes:
        quantizers: What each quantizer was handed in the first batch; empty in a process that
            another one spared that.
    """

    def __init__(
        self,
        float_model: nn.Module,
        quantized_model: nn.Module,
        integers: bevquant_int8sim.LayerComparison | None = None,
    ) -> None:
        self._models, self._integers = (float_model, quantized_model), integers
        self.quantizers: list[QuantizerValues] = []
        shared = frozenset() if integers is None else integers.layers
        self._hooks = _Hooks(float_model, quantized_model, shared)
        self._whole = _Probe("output", "", None)
        self._rows: dict[int, _Probe] = {}
        self._total = _Probe("output", "", None)
        self._first: tuple[Any, Any] = (None, None)

    @contextmanager
    def watching(self) -> Iterator[None]:
        """For the length of the block the models are hooked, and run without gradients."""
        with ExitStack() as stack, torch.no_grad():
            self._hooks.attach(stack)
            yield

    def run(self, index: int, batch: Batch) -> tuple[dict[str, Any], Any, Any]:
        """Run both models on a batch; a record of arrays, and the two outputs."""
        float_model, quantized_model = self._models
        hooks = self._hooks
        hooks.start(draws=index == 0)

        def quantized() -> Any:
            if index:
                return quantized_model(*batch)
            with watching_quantizers(quantized_model) as self.quantizers:
                return quantized_model(*batch)

        record: dict[str, Any] = {}
        with lead(lambda: float_model(*batch)) as leader:
            hooks.leaders = [leader]
            if self._integers is None:
                got = quantized()
            else:
                with lead(quantized) as follower:
                    hooks.leaders.append(follower)
                    found = self._integers.measure(tuple(batch), hooks.returned())
                    record = {INTEGERS + name: values for name, values in found.items()}
                    got = follower.result()
            wanted = leader.result()
        self._whole.judge(whole_output(wanted), whole_output(got))
        if index == 0:
            self._first = wanted, got
        layers = [hooks.probes[place].take() for place in hooks.order]
        output = self._whole.take()
        record |= {
            "layers.order": np.array(hooks.order, np.int64),
            "layers.sums": np.array([sums for sums, _ in (*layers, output)], np.float64),
            "layers.counts": np.array([counts for _, counts in (*layers, output)], np.int64),
            "stages.sums": np.array([s.frame_sums.as_sums() for s in hooks.stages], np.float64),
            "stages.channels": np.array([s.channels for s in hooks.stages], np.int64),
            "heatmap": np.array(isinstance(wanted, dict)),
        }
        return record, wanted, got

    def add(self, record: Record) -> None:
        """Add a frame's record; frames come in their order."""
        places = [int(place) for place in record["layers.order"]]
        for place in places:
            if place not in self._rows:
                probe = self._hooks.probes[place]
                self._rows[place] = _Probe(probe.layer, probe.kind, probe.reader)
        probes = [*(self._rows[place] for place in places), self._total]
        for probe, sums, counts in zip(
            probes, record["layers.sums"], record["layers.counts"], strict=True
        ):
            probe.add(sums, counts)
        for stage, sums, channels in zip(
            self._hooks.stages, record["stages.sums"], record["stages.channels"], strict=True
        ):
            stage.add_sums(sums, int(channels))
        self._total.kind = "heatmap" if record["heatmap"] else "bird's-eye view"
        if self._integers is not None:
            names = (name for name in record if name.startswith(INTEGERS))
            self._integers.add({name.removeprefix(INTEGERS): record[name] for name in names})

    def result(self) -> Comparison:
        """Rows and stages over the frames added.

        Raises:
            ValueError: None were.
        """
        if not self._total.frames:
            raise ValueError("there are no batches to compare on: give at least one")
        rows = [probe.row() for probe in (*self._rows.values(), self._total)]
        return Comparison(rows, [stage.result() for stage in self._hooks.stages], *self._first)


_CHANNELS_LAST = (nn.Linear, QuantMultiheadAttention)


class _Hooks:
    """Hooks on both models: the float one hands its values out, the quantized one judges.

    What the layers of `shared` return, both hand out.
    """

    leaders: list[Leader[Any]]

    def __init__(
        self, float_model: nn.Module, quantized_model: nn.Module, shared: Set[str] = frozenset()
    ) -> None:
        self.models = float_model, quantized_model
        self.probes = _probes(float_model, quantized_model)
        self.stages = stage_probes(quantized_model)
        self.order: list[int] = []
        self._shared = shared
        self._calls: Counter[tuple[int, str]] = Counter()

    def start(self, *, draws: bool) -> None:
        """Forget the frame before."""
        self.order = []
        self._calls.clear()
        for probe in self.probes:
            probe.clear()
        for stage in self.stages:
            stage.frame_sums, stage.draws = PairSums(), draws

    def attach(self, stack: ExitStack) -> None:
        float_model, quantized_model = self.models
        for path in {probe.layer for probe in self.probes} | {s.path for s in self.stages}:
            reference = float_model.get_submodule(path)
            stack.callback(reference.register_forward_hook(self._hand_out(path)).remove)
            judged = quantized_model.get_submodule(path)
            stack.callback(judged.register_forward_hook(self._judge(path)).remove)
        for probe in self.probes:
            if probe.reader is not None:
                stack.callback(probe.reader.register_forward_pre_hook(probe.count).remove)
        for side, model in enumerate(self.models):
            known = dict(model.named_modules())
            for path in self._shared & known.keys():
                stack.callback(known[path].register_forward_hook(self._share(side, path)).remove)

    def returned(self) -> tuple[Callable[[str, int], Tensor | None], ...]:
        """For each model: path and number of a call → what the layer returned in this frame.

        The quantized model goes first: what it judges, the float one stands right behind.
        """
        follower = self.leaders[1]

        def taken(side: int, path: str, number: int) -> Tensor | None:
            follower.reach((path, number))
            run = self.leaders[side]
            return run.take((path, number)) if run.reach((path, number)) else None

        return partial(taken, 0), partial(taken, 1)

    def _share(self, side: int, path: str) -> Callable[..., None]:
        def hook(module: nn.Module, args: Any, output: Any) -> None:
            number = self._calls[side, path]
            self._calls[side, path] += 1
            self.leaders[side].hand_out((path, number), whole_output(output))

        return hook

    def _hand_out(self, path: str) -> Callable[..., None]:
        def hook(module: nn.Module, args: Any, output: Any) -> None:
            self.leaders[0].hand_out(path, whole_output(output))

        return hook

    def _judge(self, path: str) -> Callable[..., None]:
        probes = [(i, probe) for i, probe in enumerate(self.probes) if probe.layer == path]
        stages = [stage for stage in self.stages if stage.path == path]

        def hook(module: nn.Module, args: Any, output: Any) -> None:
            wanted, got = self.leaders[0].take(path), whole_output(output)
            for place, probe in probes:
                if place not in self.order:
                    self.order.append(place)
                probe.judge(wanted, got, channels_last=isinstance(module, _CHANNELS_LAST))
            for stage in stages:
                stage.judge(wanted, got)

        return hook


def _probes(float_model: nn.Module, quantized_model: nn.Module) -> list[_Probe]:
    """Layers with an input quantizer; an addition stands for the block whose last step it is."""
    known = dict(float_model.named_modules())
    quantized_layers = dict(quantized_model.named_modules())
    probes: dict[str, _Probe] = {}
    for path, module in quantized_model.named_modules(remove_duplicate=False):
        owner, _, name = path.rpartition(".")
        if name.startswith("residual_quantizer"):
            # Other layers may hold the same quantizer, so what it counts is not this block's.
            layer, reader = owner, None
        elif getattr(module, "_input_quantizer", None) is not None:
            # What quantization added (QuantAdd, QuantConcat) exists in the quantized model alone,
            # and torch's attention reads the weight of its projections without calling them: these
            # are compared where their block ends.
            within = isinstance(quantized_layers[owner], QuantMultiheadAttention)
            layer, reader = owner if within or path not in known else path, module
        else:
            continue
        if layer in known and layer in quantized_layers and layer not in probes:
            probes[layer] = _Probe(layer, type(quantized_layers[layer]).__name__, reader)
    return list(probes.values())
