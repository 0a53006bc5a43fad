"""The model split for a BPU: units fused, calibrated and in all their forms; plan and estimate."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, cast

import torch
from torch import Tensor, fx

from bevfusion.model import PART_PATHS, Batch, BEVFusion
from bevfusion_quant.bpu._compare import Models
from bevfusion_quant.bpu._quantize import Forms, calibrating_form, finished_forms, names_on_cpu
from bevfusion_quant.bpu._units import Label, SplitModel, bpu_parts, bpu_units, node_labels
from bevfusion_quant.options import BpuConfig, Branch
from bevfusion_quant.results import BpuEstimate
from bevfusion_quant.steps import why_float
from bevquant_hybrid.operators import OperatorCall, find_violations, trace_calls
from bevquant_hybrid.partition import Plan, PlanNode, number_segments, partition, place_operator
from bevquant_hybrid.quantization import fuse_fx
from bevquant_hybrid_tools.performance import estimate_layers, load_chip_figures


def estimate_unit(
    graph: fx.GraphModule,
    labels: Mapping[str, Label],
    march: str,
    shapes: Sequence[tuple[int, ...]],
) -> BpuEstimate:
    """Trace one image, or one frame's maps, and estimate all of them.

    Args:
        graph: From `convert_fx`.
        labels: Of the form that it was converted from.
        march: The BPU.
        shapes: Of the unit's inputs; of several images one is run, since shapes are all that
            counts and tracing holds every activation.
    """
    count = shapes[0][0]
    calls = trace_calls(graph, tuple(torch.zeros(1, *shape[1:]) for shape in shapes))
    calls = [_call_of_batch(call, count) for call in calls]
    on_bpu = [c for c in calls if c.operator.endswith("Stub") or "float32" not in c.input_dtypes]
    names = {label.place: label.path for label in labels.values()}
    layers = [
        replace(
            layer,
            path=names.get(layer.path, layer.path),
            fused_into=names.get(layer.fused_into, layer.fused_into),
        )
        for layer in estimate_layers(on_bpu, march)
        if not layer.operator.endswith("Stub")
    ]
    told = [str(v) for v in find_violations([c for c in on_bpu if c.input_dtypes], march)]
    return BpuEstimate(load_chip_figures(march), 1, tuple(layers), tuple(told))


def _call_of_batch(call: OperatorCall, count: int) -> OperatorCall:
    """The call with `count` entries along the first axis instead of one."""

    def grown(shape: tuple[int, ...]) -> tuple[int, ...]:
        return (shape[0] * count, *shape[1:]) if len(shape) == 4 else shape

    shapes = tuple(map(grown, call.input_shapes))
    return replace(call, input_shapes=shapes, output_shape=grown(call.output_shape))


def unit_plan(
    unit: str,
    graph: fx.GraphModule,
    march: str,
    shapes: Sequence[tuple[int, ...]],
    on_cpu: Sequence[str],
) -> Plan:
    """Where each node of a prepared unit runs, under the names of its layers, and why.

    Args:
        unit: "camera" or "bev".
        graph: From `prepare_qat_fx`.
        march: The BPU.
        shapes: Of the unit's inputs; of several images one is run.
        on_cpu: Paths of modules within the unit that the user put on the CPU.
    """
    examples = tuple(torch.zeros(1, *shape[1:]) for shape in shapes)
    found = partition(graph, march, example_inputs=examples)
    labels = node_labels(unit, graph)
    names = {node: label.short for node, label in labels.items()}
    nodes = []
    for single in found.nodes:
        node = _node_of_batch(single, shapes[0][0])
        label = labels.get(node.name)
        if label is None:
            inputs = tuple(names.get(name, name) for name in node.inputs)
            nodes.append(replace(node, inputs=inputs))
            continue
        reason = node.reason
        if node.kind == "operator" and node.place == "BPU":
            reason = f"{node.operator}: {place_operator(node.operator, march).because}"
        elif node.kind == "operator" and _named(label.short, on_cpu):
            reason = "--exclude names it"
        nodes.append(
            replace(
                node,
                name=label.short,
                path=label.path,
                operator=label.operator if node.kind == "operator" else node.operator,
                inputs=tuple(names.get(name, name) for name in node.inputs),
                reason=reason,
            )
        )
    return replace(found, nodes=tuple(nodes))


def _named(path: str, on_cpu: Sequence[str]) -> bool:
    return any(path == named or path.startswith(f"{named}.") for named in on_cpu)


def _node_of_batch(node: PlanNode, count: int) -> PlanNode:
    """The node with `count` entries along the first axis instead of one."""
    shape = node.shape
    return node if shape is None else replace(node, shape=(shape[0] * count, *shape[1:]))


_WHY_CPU = {
    "lidar": "sparse convolutions, where a BPU has dense ones alone",
    "vtransform": "a softmax over depth, then sums over the frustum points of each cell; the "
    "mapper runs the first on the CPU and does not know the second",
    "head": "attention and a choice of queries by score; the mapper runs parts of both on the CPU, "
    "so the head stays float as a whole",
}


def compose_plan(
    model: BEVFusion,
    units: Mapping[str, Plan],
    branch: str,
    march: str,
    shapes: Mapping[str, tuple[int, ...]],
) -> Plan:
    """One plan: sensors, units on the BPU, the parts on the CPU between them.

    Args:
        model: Says which parts there are.
        units: By unit, "camera" and "bev".
        branch: What the run puts on the BPU.
        march: The BPU.
        shapes: Of the inputs "images", "depth" and "voxels", and of every stage's result.
    """
    made = _Composer(model, units, cast(Branch, branch), shapes)
    maps = []
    if "camera" in model.parts:
        maps.append(made.camera())
    if "lidar" in model.parts:
        voxels = made.source("voxels")
        path = f"{PART_PATHS['lidar']}.backbone"
        maps.append(made.on_cpu("LiDAR encoder", path, "lidar", _WHY_CPU["lidar"], voxels))
    x = made.decoded(*maps)
    if model.heads is not None:
        x = made.on_cpu("head", PART_PATHS["head"], "head", _WHY_CPU["head"], x)
    nodes = [*made.nodes, PlanNode("output", "output", inputs=(x,))]
    notes = tuple(note for plan in units.values() for note in plan.warnings)
    return Plan(march, number_segments(nodes), notes)


@dataclass
class _Composer:
    """The nodes so far; every method adds some and answers the last one's name."""

    model: BEVFusion
    units: Mapping[str, Plan]
    branch: Branch
    shapes: Mapping[str, tuple[int, ...]]
    nodes: list[PlanNode] = field(default_factory=list)

    def source(self, name: str) -> str:
        self.nodes.append(PlanNode(name, "input", shape=self.shapes.get(name)))
        return name

    def on_cpu(self, name: str, path: str, stage: str, why: str, *inputs: str) -> str:
        kind, shape = type(self.model.get_submodule(path)).__name__, self.shapes.get(stage)
        self.nodes.append(PlanNode(name, "operator", "CPU", why, kind, path, inputs, shape))
        return name

    def unit(self, name: str, *inputs: str) -> str:
        plan = self.units[name]
        placeholders = [node.name for node in plan.nodes if node.kind == "input"]
        given = dict(zip(placeholders, inputs, strict=True))
        last = ""
        for node in plan.nodes:
            sources = tuple(given.get(source, source) for source in node.inputs)
            if node.kind == "output":
                (last,) = sources
            elif node.kind != "input":
                self.nodes.append(replace(node, inputs=sources))
        return last

    def camera(self) -> str:
        path, images = PART_PATHS["camera"], self.source("images")
        if "camera" in bpu_parts(self.branch):
            x = self.unit("camera", images)
        else:
            why = why_float("camera", self.branch)
            x = self.on_cpu("camera backbone", f"{path}.backbone", "", why, images)
            x = self.on_cpu("camera neck", f"{path}.neck", "neck", why, x)
        depth, why = self.source("depth"), _WHY_CPU["vtransform"]
        return self.on_cpu("view transform", f"{path}.vtransform", "camera", why, x, depth)

    def decoded(self, *maps: str) -> str:
        parts = bpu_parts(self.branch)
        x = maps[0]
        if "fuser" in parts:
            x = self.unit("bev", *maps)
        elif self.model.fuser is not None:
            why = why_float("fuser", self.branch)
            x = self.on_cpu("fuser", PART_PATHS["fuser"], "fuser", why, *maps)
        if self.model.decoder is None:
            return x
        if "decoder" not in parts:
            why, path = why_float("decoder", self.branch), PART_PATHS["decoder"]
            x = self.on_cpu("decoder backbone", f"{path}.backbone", "", why, x)
            return self.on_cpu("decoder neck", f"{path}.neck", "decoder", why, x)
        return x if "fuser" in parts else self.unit("bev", x)


Shape = tuple[int, ...]


@dataclass(eq=False)
class SplitUnits:
    """The units of a model on their way to the BPU; the march must be set.

    Args:
        model: Float; shares its layers with the units.
        config: What the run does.
    """

    model: BEVFusion
    config: BpuConfig

    def __post_init__(self) -> None:
        self.parts = bpu_parts(self.config.branch)
        self.units = bpu_units(self.model, self.config.branch)
        self.on_cpu = names_on_cpu(self.model, self.units, self.config.exclude)
        self.fused: dict[str, Any] = {name: fuse_fx(unit) for name, unit in self.units.items()}
        self.shapes: dict[str, Shape] = {}

    def calibrating(self) -> dict[str, Any]:
        """Graphs that count activations while float values pass through them."""
        return {
            name: calibrating_form(fused, self.config.method, self.on_cpu[name])
            for name, fused in self.fused.items()
        }

    def run(self, graphs: Mapping[str, Any], batches: Iterable[Batch]) -> None:
        """Run the whole model with the graphs in it; the shapes of its stages are kept."""
        split = SplitModel(self.model, graphs, self.parts)

        def keep(name: str, value: Tensor) -> None:
            self.shapes.setdefault(name, tuple(value.shape))

        for batch in batches:
            sources = {"images": batch.images, "depth": batch.depth, "voxels": batch.features}
            for name, value in sources.items():
                if value is not None:
                    keep(name, value if name == "voxels" else value.flatten(0, 1))
            with torch.no_grad():
                split(*batch, note=keep)

    def finished(
        self,
        calibrated: Mapping[str, Any],
        state_of: Callable[[str], Mapping[str, Tensor]] | None = None,
    ) -> dict[str, Forms]:
        """All forms of each unit, with the ranges found, or with the state of a file."""
        return {
            name: finished_forms(
                self.fused[name], graph, self.on_cpu[name], state_of(name) if state_of else None
            )
            for name, graph in calibrated.items()
        }

    def models(self, forms: Mapping[str, Forms]) -> Models:
        """The whole model in its three forms."""
        graphs = (
            {name: form.float_graph for name, form in forms.items()},
            {name: form.fake_graph for name, form in forms.items()},
            {name: form.integer_graph for name, form in forms.items()},
        )
        return Models(*(SplitModel(self.model, g, self.parts).eval() for g in graphs))

    def plan(self, forms: Mapping[str, Forms]) -> Plan:
        """Where everything in the model runs."""
        march = self.config.march
        plans = {
            name: unit_plan(name, form.fake_graph, march, self._inputs(name), self.on_cpu[name])
            for name, form in forms.items()
        }
        return compose_plan(self.model, plans, self.config.branch, march, self.shapes)

    def estimates(self, forms: Mapping[str, Forms]) -> dict[str, BpuEstimate]:
        """What each unit costs, estimated."""
        return {
            name: estimate_unit(
                form.integer_graph,
                node_labels(name, form.fake_graph),
                self.config.march,
                self._inputs(name),
            )
            for name, form in forms.items()
        }

    def _inputs(self, unit: str) -> list[Shape]:
        """Shapes of a unit's inputs."""
        if unit == "camera":
            return [self.shapes["images"]]
        return [
            self.shapes[name]
            for name in (("camera", "lidar") if "fuser" in self.parts else ("fuser",))
        ]
