"""The model split for a BPU: units fused, calibrated and in all their forms; plan and estimate."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, cast

import torch
from torch import Tensor

from bevfusion.model import PART_PATHS, Batch, BEVFusion
from bevfusion_quant.bpu._compare import Models
from bevfusion_quant.bpu._quantize import Forms, calibrating_form, finished_forms, names_on_cpu
from bevfusion_quant.bpu._units import PREFIXES, SplitModel, bpu_parts, bpu_units
from bevfusion_quant.options import BpuConfig, Branch
from bevfusion_quant.results import BpuEstimate
from bevfusion_quant.steps import why_float
from bevquant_hybrid.partition import Plan, PlanNode, number_segments
from bevquant_hybrid.quantization import fuse_fx
from bevquant_hybrid_tools.by_layer import estimate_by_layer, plan_by_layer
from bevquant_hybrid_tools.performance import load_chip_figures

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
                self.fused[name], graph, self.on_cpu[name],
                state_of(name) if state_of else None,
                PREFIXES[name],
            )
            for name, graph in calibrated.items()
        }  # fmt: skip

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
            name: plan_by_layer(
                form.fake_graph, march, self._inputs(name),
                prefix=form.prefix,
                on_cpu=dict.fromkeys(self.on_cpu[name], "--exclude names it"),
            )
            for name, form in forms.items()
        }  # fmt: skip
        return compose_plan(self.model, plans, self.config.branch, march, self.shapes)

    def estimates(self, forms: Mapping[str, Forms]) -> dict[str, BpuEstimate]:
        """What each unit costs, estimated."""
        march = self.config.march
        figures = load_chip_figures(march)
        return {
            name: BpuEstimate(
                figures, 1, *estimate_by_layer(
                    form.integer_graph, form.labels, march, self._inputs(name)
                )
            )
            for name, form in forms.items()
        }  # fmt: skip

    def _inputs(self, unit: str) -> list[Shape]:
        """Shapes of a unit's inputs."""
        if unit == "camera":
            return [self.shapes["images"]]
        return [
            self.shapes[name]
            for name in (("camera", "lidar") if "fuser" in self.parts else ("fuser",))
        ]
