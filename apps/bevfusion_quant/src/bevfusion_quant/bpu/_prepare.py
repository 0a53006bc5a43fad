"""The model split for a BPU: units fused, calibrated and in all their forms; plan and estimate."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from bevfusion_quant.bpu._compose import compose_plan
from bevfusion_quant.bpu._config import bpu_parts
from bevfusion_quant.bpu._estimate import estimate_unit
from bevfusion_quant.bpu._follow import Models
from bevfusion_quant.bpu._labels import node_labels
from bevfusion_quant.bpu._plan import unit_plan
from bevfusion_quant.bpu._quantize import Forms, calibrating_form, finished_forms, names_on_cpu
from bevfusion_quant.bpu._split import SplitModel
from bevfusion_quant.bpu._units import bpu_units
from bevfusion_quant.results import BpuEstimate
from bevquant_hybrid.quantization import fuse_fx

if TYPE_CHECKING:
    from torch import Tensor

    from bevfusion.model import Batch, BEVFusion
    from bevfusion_quant.bpu._config import BpuConfig
    from bevquant_hybrid.partition import Plan

__all__ = ["SplitUnits"]

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
