"""The units' partitions composed into one plan of the whole model."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, cast

from bevfusion.model import PART_PATHS
from bevfusion_quant.bpu._config import bpu_parts
from bevfusion_quant.options import Branch
from bevfusion_quant.steps import why_float
from bevquant_hybrid.partition import Plan, PlanNode, number_segments

if TYPE_CHECKING:
    from bevfusion.model import BEVFusion

__all__ = ["compose_plan"]

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
