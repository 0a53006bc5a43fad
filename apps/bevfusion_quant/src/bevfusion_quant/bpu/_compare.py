"""Float, fake-quantized and integer model on the same frames."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor

from bev_data.metrics import AccuracyTally
from bevfusion.evaluation import ModelTallies
from bevfusion.model import Batch, BEVFusionConfig
from bevfusion_quant.bpu._quantize import Forms
from bevfusion_quant.bpu._units import Note, SplitModel
from bevfusion_quant.frames import FrameBatches
from bevfusion_quant.measure import STAGE_TITLES, Judgement, StageMaps, StageProbe, whole_output
from bevfusion_quant.results import BpuComparison, BpuLayer, BpuStage
from bevquant_hybrid.qtensor import QTensor, as_float
from bevquant_hybrid_tools.by_layer import NodeLabel
from bevquant_qnn import LayerRow, Leader, PairSums, lead

_HALF_RANGE = 127.5  # steps from 0 to the end of int8's range, as scales are made


@dataclass(eq=False)
class NodeProbe:
    """Sums over one node's results."""

    label: NodeLabel
    sources: tuple[str, ...]
    fake: PairSums = field(default_factory=PairSums)
    integer: PairSums = field(default_factory=PairSums)
    shape: tuple[int, ...] = ()
    frames: int = 0
    max_steps: int = 0
    sum_steps: int = 0
    differ: int = 0
    numel: int = 0
    beyond: int = 0
    amax: float | None = None

    @property
    def is_operator(self) -> bool:
        """Whether it computes, instead of quantizing what comes in."""
        return not self.label.operator.endswith("Stub")

    def judge(self, wanted: Tensor, fake: QTensor, got: QTensor) -> None:
        """One frame's results."""
        self.fake.add(wanted, fake.dequantize())
        self.integer.add(wanted, got.dequantize())
        apart = (got.int_repr().int() - fake.int_repr().int()).abs_()
        self.max_steps = max(self.max_steps, int(apart.max()))
        self.sum_steps += int(apart.sum())
        self.differ += int(torch.count_nonzero(apart))
        self.shape, self.frames = tuple(wanted.shape), self.frames + 1
        # How much of the float result the scale that its readers see cannot express.
        self.amax = float(fake.scale) * _HALF_RANGE
        self.numel += wanted.numel()
        low, high = wanted.aminmax()
        if max(-float(low), float(high)) > self.amax:
            self.beyond += int(torch.count_nonzero(wanted.abs() > self.amax))

    def row(self, sources: list[NodeProbe]) -> BpuLayer:
        """What was seen, and of its inputs what they could not express."""
        read = sum(source.numel for source in sources)
        ranges = [source.amax for source in sources if source.amax is not None]
        return BpuLayer(
            self.label.path,
            self.label.operator,
            self.shape[1],
            self.numel / self.shape[1] / self.frames,
            self.fake.sqnr_db,
            self.fake.cosine,
            self.integer.sqnr_db,
            self.integer.cosine,
            self.max_steps,
            self.sum_steps / self.numel,
            self.differ / self.numel,
            sum(source.beyond for source in sources) / read if read else None,
            max(ranges, default=None),
        )


class Models(NamedTuple):
    """The model three times; the parts on the CPU are the same modules."""

    real: SplitModel
    fake: SplitModel
    integer: SplitModel


@dataclass(eq=False)
class Follower:
    """Collects what three models compute, node by node.

    Args:
        probes: What to watch, by "unit/node"; nodes that all three have.
    """

    probes: Mapping[str, NodeProbe]
    _stages: dict[str, tuple[StageProbe, PairSums]] = field(default_factory=dict)
    _order: list[NodeProbe] = field(default_factory=list)

    def follow(self, models: Models, batch: Batch) -> tuple[Any, Any, Any]:
        """Run one batch; answers the three outputs.

        Only what is watched is handed out, so that no model's values pile up.
        """
        leaders: list[Leader[Any]] = []

        def leading(place: int) -> Callable[[], Any]:
            def run() -> Any:
                return models[place](*batch, note=self._watched(leaders[place].hand_out))

            return run

        def judge(name: str, got: Tensor) -> None:
            wanted, quantized = (leader.take(name) for leader in leaders)
            self._judge(name, wanted, quantized, got)

        with lead(leading(0)) as real, lead(leading(1)) as fake:
            leaders += [real, fake]
            got = models.integer(*batch, note=self._watched(judge))
            return real.result(), fake.result(), got

    def _watched(self, note: Note) -> Note:
        def tell(name: str, value: Tensor) -> None:
            if name in self.probes or name in STAGE_TITLES:
                note(name, value)

        return tell

    def _judge(self, name: str, wanted: Tensor, fake: Tensor, got: Tensor) -> None:
        if name in STAGE_TITLES:
            if name not in self._stages:
                self._stages[name] = StageProbe(name, ""), PairSums()
            stage, integers = self._stages[name]
            stage.add(wanted, as_float(fake))
            integers.add(wanted, as_float(got))
        elif isinstance(fake, QTensor) and isinstance(got, QTensor):
            probe = self.probes[name]
            if probe not in self._order:
                self._order.append(probe)
            probe.judge(wanted, fake, got)

    def layers(self) -> tuple[BpuLayer, ...]:
        """Operators that gave integers, in the order of execution."""
        known = {name: probe for name, probe in self.probes.items() if probe in self._order}
        return tuple(
            probe.row([known[name] for name in probe.sources if name in known])
            for probe in self._order
            if probe.is_operator
        )

    def maps(self) -> list[StageMaps]:
        """Float and fake-quantized maps of the first frame at the end of each stage."""
        return [stage.result() for stage, _ in self._stages.values()]

    def stages(self) -> tuple[BpuStage, ...]:
        """Both quantized models at the end of each stage."""
        rows = [(stage.result().row, integers) for stage, integers in self._stages.values()]
        return tuple(
            BpuStage(
                *(row.stage, row.title, row.channels, row.sqnr_db, row.cosine),
                *(integers.sqnr_db, integers.cosine),
            )
            for row, integers in rows
        )


def node_probes(forms: Mapping[str, Forms]) -> dict[str, NodeProbe]:
    """What to watch, by "unit/node": everything called that all three graphs of a unit have."""
    probes = {}
    for unit, form in forms.items():
        graphs = (form.float_graph, form.fake_graph, form.integer_graph)
        known = set.intersection(*({node.name for node in g.graph.nodes} for g in graphs))
        for node in form.fake_graph.graph.nodes:
            label = form.labels.get(node.name)
            if label is None or node.name not in known:
                continue
            sources = tuple(f"{unit}/{source.name}" for source in node.all_input_nodes)
            probes[f"{unit}/{node.name}"] = NodeProbe(label, sources)
    return probes


def compare_forms(
    models: Models,
    forms: Mapping[str, Forms],
    batches: FrameBatches,
    config: BEVFusionConfig,
    accuracy: AccuracyTally | None = None,
) -> BpuComparison:
    """Run the three models side by side on every batch.

    Args:
        models: Float, fake-quantized, integers.
        forms: Of the units in them.
        batches: At least one.
        config: Sizes.
        accuracy: Is handed the models' detections, as "float", "quantized" and "integer".
    """
    follower, tallies = Follower(node_probes(forms)), ModelTallies(config, accuracy)
    model = models.real.model
    whole, first, shape = PairSums(), None, torch.Size()
    for index, batch in enumerate(batches):
        with torch.no_grad():
            wanted, fake, got = follower.follow(models, batch)
        whole.add(whole_output(wanted), whole_output(fake))
        shape = whole_output(wanted).shape
        if model.heads is not None:
            outputs = {"float": wanted, "quantized": fake, "integer": got}
            found = {who: model.head.decode(output)[0] for who, output in outputs.items()}
            name, labels = batches.names[index][0], batches.frame_labels(index)
            tallies.add(index, name, found, labels)
        first = wanted if first is None else first
    layers = follower.layers()
    table = [
        LayerRow(
            *(row.layer, row.operator, row.channels, row.cells, row.fake_sqnr_db, row.fake_cosine),
            *(row.saturated, row.input_amax),
        )
        for row in layers
    ]
    kind = "heatmap" if isinstance(first, dict) else "bird's-eye view"
    cells = shape.numel() / shape[1]
    table.append(LayerRow("output", kind, shape[1], cells, whole.sqnr_db, whole.cosine, None, None))
    seen = tallies.first
    judgement = Judgement(
        table,
        follower.maps(),
        [],
        *tallies.rows("quantized"),
        (seen["float"], seen["quantized"]) if seen else None,
        tallies.float_detections,
        first,
    )
    agreement, both = tallies.rows("integer")
    return BpuComparison(judgement, layers, follower.stages(), tuple(agreement), tuple(both))
