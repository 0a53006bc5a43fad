"""The detector in units that a BPU runs, the whole of it with others in their place, judged."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol

import torch
from torch import Tensor, fx, nn
from torch.ao.quantization import DeQuantStub, QuantStub

from bev_data.metrics import AccuracyAccumulator, AgreementRow, FoundRow
from bev_data.tables import CellParts, Row, Table, or_dash, table_of
from bevfusion.deployment._files import DECODER, CenterPart, HeldPart
from bevfusion.evaluation import FrameBatches, ModelAccumulators
from bevfusion.model import Batch, Detector
from bevfusion.model._model import FlowStep
from bevfusion.quantization import STAGE_TITLES, QuantizationEvaluation, StageProbe, whole_output
from bevquant_qnn import LayerRow, PairSums

# The dense parts of a detector between quantization stubs, as a BPU runs them.

UNIT_PREFIXES = {"camera": "encoders.camera.", "bev": ""}
"""Unit → what stands before its modules' paths in the model."""


class CameraUnit(nn.Module):
    """Backbone and neck: images to the feature map that the view transform lifts."""

    def __init__(self, camera: nn.ModuleDict) -> None:
        super().__init__()
        self.quant_images = QuantStub()
        self.backbone = camera["backbone"]
        self.neck = camera["neck"]
        self.dequant_features = DeQuantStub()

    def forward(self, images: Tensor) -> Any:
        """Float [images, 3, height, width] → float [images, channels, rows, columns]."""
        return self.dequant_features(self.neck(self.backbone(self.quant_images(images)))[0])


class FusedUnit(HeldPart):
    """Fuser, and the decoder downstream if it is quantized too."""

    def __init__(self, modules: Mapping[str, nn.Module]) -> None:
        super().__init__(modules)
        self.quant_camera_map, self.quant_lidar_map = QuantStub(), QuantStub()
        self.dequant_map = DeQuantStub()

    def forward(self, camera_map: Tensor, lidar_map: Tensor) -> Any:
        """Two bird's-eye-view maps → one."""
        maps = self.quant_camera_map(camera_map), self.quant_lidar_map(lidar_map)
        return self.dequant_map(super().forward(*maps))


class DecoderUnit(HeldPart):
    """SECOND and SECONDFPN."""

    def __init__(self, modules: Mapping[str, nn.Module]) -> None:
        super().__init__(modules)
        self.quant_fused_map, self.dequant_map = QuantStub(), DeQuantStub()

    def forward(self, fused_map: Tensor) -> Any:
        """The fused map → the decoded one."""
        return self.dequant_map(super().forward(self.quant_fused_map(fused_map)))


class CenterUnit(CenterPart):
    """CenterPoint's decoder, head or both; of the head one tensor for each map."""

    def __init__(self, model: Detector, parts: Sequence[str]) -> None:
        super().__init__(model, parts)
        self.quant_map = QuantStub()
        names = model.head.output_names if "head" in parts else ("map",)
        self.dequant = nn.ModuleDict({name: DeQuantStub() for name in names})

    def forward(self, spatial_features: Tensor) -> Any:
        """A map to the decoder's map, or to the head's maps in their order."""
        made = super().forward(self.quant_map(spatial_features))
        stubs = self.dequant.values()
        if isinstance(made, tuple):
            return tuple(stub(value) for stub, value in zip(stubs, made, strict=True))
        (stub,) = stubs
        return stub(made)


def bpu_units(model: Detector, parts: Sequence[str]) -> dict[str, nn.Module]:
    """The BPU's units of the model: "camera", "bev" or both.

    Args:
        model: In float; the units' layers are its own.
        parts: What runs on the BPU: any of "camera", "fuser" and "decoder"; of CenterPoint any of
            "decoder" and "head".
    """
    units: dict[str, nn.Module] = {}
    built: Any = model
    if model.kind != "bevfusion":
        units["bev"] = CenterUnit(model, parts)
    elif "fuser" in parts:
        units["bev"] = FusedUnit.of(model, "fuser", *(DECODER if "decoder" in parts else ()))
    elif "decoder" in parts:
        units["bev"] = DecoderUnit.of(model, *DECODER)
    if "camera" in parts:
        units = {"camera": CameraUnit(built.camera), **units}
    return {name: unit.eval() for name, unit in units.items()}


Note = Callable[[str, Tensor], None]
"""Takes a value and its name."""
RunGraph = Callable[..., Tensor]
"""Runs a graph: called with it, with what takes every node and its result, and with the inputs."""

_GRAPH = "bpu."  # before the names of a unit's graph, in a file


def split_weights(
    model: Detector, graphs: Mapping[str, nn.Module], parts: Sequence[str]
) -> dict[str, Tensor]:
    """Weights of a detector whose units are graphs, for one file.

    The CPU's parts keep their names; each unit's graph is under "bpu.<unit>.<name>".

    Args:
        model: Holds the CPU's parts.
        graphs: By unit, such as "camera".
        parts: The replaced parts; see `bpu_units`.
    """
    tensors = cpu_weights(model, parts)
    for unit, graph in graphs.items():
        tensors |= {f"{_GRAPH}{unit}.{name}": t for name, t in graph.state_dict().items()}
    return tensors


def cpu_weights(model: Detector, parts: Sequence[str]) -> dict[str, Tensor]:
    """A model's weights of the parts in float.

    Args:
        model: In float.
        parts: Parts on the BPU; see `bpu_units`.

    Example:
        >>> from bevfusion.model import CONFIGS, build_model
        >>> model = build_model(CONFIGS["tiny"], ("lidar", "decoder"))
        >>> {name.split(".")[0] for name in cpu_weights(model, ["decoder"])}
        {'encoders'}
    """
    on_bpu = {
        UNIT_PREFIXES[unit] + name
        for unit, module in bpu_units(model, parts).items()
        for name in module.state_dict()
    }
    return {name: tensor for name, tensor in model.state_dict().items() if name not in on_bpu}


def unit_weights(state: Mapping[str, Tensor], unit: str) -> dict[str, Tensor]:
    """A unit's graph among `split_weights`."""
    stem = f"{_GRAPH}{unit}."
    return {name.removeprefix(stem): t for name, t in state.items() if name.startswith(stem)}


def unit_of(step: FlowStep, parts: Sequence[str]) -> str:
    """The unit that holds a step if these parts run on the BPU; "" for the CPU's."""
    if step.part not in parts or step.output == "camera":  # the view transform
        return ""
    return "camera" if step.part == "camera" else "bev"


FUSED_LAYER = "fuser.0"  # whose result is the fused map, wherever it runs


def _nothing(name: str, value: Tensor) -> None:
    """Take no note."""


class SplitModel(nn.Module):
    """A detector with some parts replaced by graphs of any arithmetic.

    Args:
        model: Runs the other parts, in float.
        graphs: By unit: "camera" (images → feature map), "bev" (maps → map, or the head's maps).
        parts: Parts that the graphs replace; see `bpu_units`.
        run: Runs a graph, such as `bevquant_hybrid_tools.forms.run_noting`.
    """

    def __init__(
        self,
        model: Detector,
        graphs: Mapping[str, fx.GraphModule],
        parts: Sequence[str],
        run: RunGraph,
    ) -> None:
        super().__init__()
        self.model = model
        self._run_graph = run
        self.parts = tuple(parts)
        self.graphs = nn.ModuleDict(dict(graphs))
        self._ends = {
            f"{unit}/{node}": stage
            for unit, graph in graphs.items()
            for node, stage in _stage_ends(graph, self.parts)
        }

    def forward(
        self,
        features: Tensor | None,
        coords: Tensor | None,
        batch_size: int,
        images: Tensor | None = None,
        depth: Tensor | None = None,
        cells: Tensor | None = None,
        *,
        note: Note = _nothing,
    ) -> Any:
        """Run a `Batch`.

        Args:
            features: As the model takes them, like all but `note`.
            coords: Of the voxels.
            batch_size: Number of frames.
            images: Of the cameras.
            depth: In metres.
            cells: Of the frustum points.
            note: Called with every result on the way: of an operator under "unit/node", of a
                stage under its name.
        """
        values: dict[str, Any] = {"voxels": features, "depth": depth}
        if images is not None:
            values["images"] = images.flatten(0, 1)
        flow, ran = self.model.flow, set()
        units = [unit_of(step, self.parts) for step in flow]
        for step, unit, following in zip(flow, units, [*units[1:], ""], strict=True):
            inputs = [values[name] for name in step.inputs]
            if not unit:
                x = self._on_cpu(step, inputs, coords, batch_size, cells)
            elif unit not in ran:  # the graph holds its other steps too
                x = self._run(unit, note, *inputs)
                ran.add(unit)
            # A graph hands on the head's maps in their order, without names.
            if step.output == "head" and not isinstance(x, dict):
                x = dict(zip(self.model.head.output_names, x, strict=True))
            values[step.output] = x
            # Inside a unit, the graph's nodes note the stages.
            if step.output in STAGE_TITLES and (not unit or unit != following):
                note(step.output, whole_output(x) if step.output == "head" else x)
        return x

    def _on_cpu(
        self, step: FlowStep, inputs: list[Any], coords: Any, batch_size: int, cells: Any
    ) -> Any:
        module, x = self.model.get_submodule(step.path), inputs[0]
        if step.output == "camera":
            return module(x.unflatten(0, (batch_size, -1)), inputs[1], cells)
        if step.output == "lidar":
            return module(x, coords, batch_size)
        made = module(*inputs)
        return made[0] if step.output == "neck" else made

    def _run(self, unit: str, note: Note, *inputs: Tensor) -> Any:
        def tell(node: fx.Node, value: Any) -> None:
            if isinstance(value, Tensor):
                note(f"{unit}/{node.name}", value)
            if stage := self._ends.get(f"{unit}/{node.name}"):
                note(stage, value)

        return self._run_graph(self.graphs[unit], tell, *inputs)


def _stage_ends(graph: fx.GraphModule, parts: Sequence[str]) -> Iterator[tuple[str, str]]:
    """Nodes of a unit that make the map of a stage before its last one, and the stage."""
    inside = [n for n in graph.graph.nodes if str(n.target).startswith("pts_bbox_head.")]
    for node in graph.graph.nodes if "decoder" in parts else ():
        if node.target == FUSED_LAYER:
            yield node.name, "fuser"
        elif node not in inside and set(node.users).intersection(inside):
            yield node.name, "decoder"


CompareStage = Callable[[Tensor, Tensor, Tensor], None]
"""Takes a stage's float values, the fake-quantized ones and those of the integers."""


@dataclass(frozen=True)
class SplitStage:
    """The end of one stage, over all frames: both quantized models against float."""

    stage: str
    title: str
    channels: int
    fake_sqnr_db: float | None
    fake_cosine: float | None
    integer_sqnr_db: float | None
    integer_cosine: float | None


@dataclass(frozen=True, eq=False)
class SplitComparison:
    """All comparisons of a split detector.

    Attributes:
        evaluation: Float against fake-quantized.
        layers: Operators of the units in the order of execution, as `comparing` returns them.
        stages: Of the model, in order.
        agreement: Detections, float against integers; empty without a head.
        found: Labelled objects that both find.
    """

    evaluation: QuantizationEvaluation
    layers: tuple[Any, ...]
    stages: tuple[SplitStage, ...]
    agreement: tuple[AgreementRow, ...]
    found: tuple[FoundRow, ...]


class Comparison(Protocol):
    """Runs three models in step, as `bevquant_hybrid_tools.forms.FormsComparison` does."""

    def run(self, models: Sequence[Callable[[Note], Any]]) -> tuple[Any, Any, Any]:
        """Run them on one batch; their outputs."""

    def layers(self) -> Iterable[Any]:
        """A row for each operator, such as `bevquant_hybrid_tools.forms.BpuLayer`."""


class _Stage:
    def __init__(self, name: str) -> None:
        self.fake, self.integers = StageProbe(name, ""), PairSums()

    def compare(self, wanted: Tensor, fake: Tensor, got: Tensor) -> None:
        self.fake.add(wanted, fake.dequantize())
        self.integers.add(wanted, got.dequantize())

    def row(self) -> SplitStage:
        row, integers = self.fake.result().row, self.integers
        return SplitStage(
            *(row.stage, row.title, row.channels, row.sqnr_db, row.cosine),
            *(integers.sqnr_db, integers.cosine),
        )


def evaluate_split(
    models: Sequence[SplitModel],
    comparing: Callable[[Mapping[str, CompareStage]], Comparison],
    batches: FrameBatches,
    *,
    accuracy: AccuracyAccumulator | None = None,
) -> SplitComparison:
    """Run three forms of a split detector side by side on every batch.

    Args:
        models: Float, fake-quantized, integers; their parts in float are the same modules.
        comparing: Makes the comparison of their units from the receiver of each stage's output,
            such as ``partial(FormsComparison, forms)`` of `bevquant_hybrid_tools.forms`.
        batches: At least one.
        accuracy: Receives the models' detections, as "float", "quantized" and "integer".
    """
    stages = {name: _Stage(name) for name in STAGE_TITLES}
    comparison = comparing({name: stage.compare for name, stage in stages.items()})
    accumulators, model = ModelAccumulators(batches.sizes, accuracy), models[0].model
    whole, first, shape = PairSums(), None, torch.Size()
    for index, batch in enumerate(batches):
        wanted, fake, got = comparison.run([_on(batch, split) for split in models])
        whole.add(whole_output(wanted), whole_output(fake))
        shape = whole_output(wanted).shape
        if "head" in model.parts:
            outputs = {"float": wanted, "quantized": fake, "integer": got}
            found = {who: model.head.decode(output)[0] for who, output in outputs.items()}
            name, labels = batches.names[index][0], batches.frame_labels(index)
            accumulators.add(index, name, found, labels)
        first = wanted if first is None else first
    layers = tuple(comparison.layers())
    table = [
        LayerRow(
            *(row.layer, row.operator, row.channels, row.cells, row.fake_sqnr_db, row.fake_cosine),
            *(row.saturated, row.input_amax),
        )
        for row in layers
    ]
    kind = "heatmap" if isinstance(first, dict) else "bird's-eye view"
    cells = shape.numel() / shape[1]
    row = LayerRow("output", kind, shape[1], cells, whole.sqnr_db, whole.cosine, None, None)
    table.append(replace(row, not_finite=int(whole.not_finite)))
    seen, reached = accumulators.first, [stage for stage in stages.values() if stage.fake.channels]
    evaluation = QuantizationEvaluation(
        table,
        [stage.fake.result() for stage in reached],
        [],
        *accumulators.rows("quantized"),
        (seen["float"], seen["quantized"]) if seen else None,
        accumulators.float_detections,
        first,
    )
    agreement, both = accumulators.rows("integer")
    rows = tuple(stage.row() for stage in reached)
    return SplitComparison(evaluation, layers, rows, tuple(agreement), tuple(both))


def _on(batch: Batch, model: SplitModel) -> Callable[[Note], Any]:
    return lambda note: model(*batch, note=note)


def split_stage_table(stages: Sequence[SplitStage]) -> Table:
    """Fake-quantized and integer model against float at the end of each stage."""
    columns = {
        "Stage": "{title}",
        "Channels": "{channels}",
        "Fake dB": "{fake_sqnr_db:.1f}",
        "Integer dB": "{integer_sqnr_db:.1f}",
        "Fake cosine": "{fake_cosine:.6f}",
        "Integer cosine": "{integer_cosine:.6f}",
    }
    return table_of("SQNR and cosine against float", stages, columns, "wide")


def boundary_table(plan: Any) -> Table:
    """Every crossing between float and integers in a `bevquant_hybrid.partition.Plan`, in bytes."""
    table = table_of(
        "Bytes of integers across each boundary, in a frame",
        plan.boundaries,
        {
            "Boundary": lambda boundary: CellParts(path=boundary.name),
            "Kind": "{kind}",
            "From → to": lambda found: CellParts(arrow=found.source, paths=found.readers),
            "Bytes": "{transfer_bytes:,}",
        },
        kind="classes boundaries",
    )
    together = Row(["together", "", "", or_dash(plan.transfer_bytes, ",")])
    return replace(table, rows=[*table.rows, together])
