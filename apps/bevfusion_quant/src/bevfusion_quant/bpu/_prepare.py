"""The model split for a BPU: units folded, calibrated, converted; plan and estimate."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from fnmatch import fnmatchcase
from functools import partial
from typing import Any, NamedTuple

from torch import Tensor, nn

from bev_data.metrics import AccuracyAccumulator
from bevfusion.deployment import (
    UNIT_PREFIXES,
    SplitComparison,
    SplitModel,
    bpu_units,
    compose_plan,
    evaluate_split,
    stage_shapes,
    unit_inputs,
)
from bevfusion.model import Batch, Detector
from bevfusion.quantization import expand_patterns
from bevfusion_quant._errors import InputError
from bevfusion_quant.frames import FrameBatches
from bevfusion_quant.options import BpuConfig
from bevfusion_quant.stages import why_float
from bevquant_hybrid.march import use_march
from bevquant_hybrid.partition import Plan, PlanComposer
from bevquant_hybrid.quantization import fuse_fx
from bevquant_hybrid_tools import forms as dense
from bevquant_hybrid_tools.forms import (
    BpuEstimate,
    Forms,
    FormsComparison,
    finished_forms,
    run_noting,
)

_PARTS: dict[str, tuple[str, ...]] = {
    "bevfusion": ("camera", "fuser", "decoder"),
    "centerpoint": ("decoder", "head"),
    "centerpoint-pillars": ("decoder", "head"),
}
_NO_BPU_PART = {
    ("bevfusion", "lidar"): "its sparse convolutions have no BPU form",
    ("bevfusion", "head"): "its attention and its choice of queries run on the CPU",
    ("centerpoint", "lidar"): "its sparse convolutions have no BPU form",
    ("centerpoint-pillars", "lidar"): "its pillar encoder stays float and its scatter has no BPU "
    "form",
}


def bpu_parts(branch: str, model: str = "bevfusion") -> tuple[str, ...]:
    """Parts of the model that run on the BPU, whole or up to the neck.

    Raises:
        InputError: No part of the branch can run on a BPU.

    Example:
        >>> bpu_parts("all"), bpu_parts("all", "centerpoint")
        (('camera', 'fuser', 'decoder'), ('decoder', 'head'))
    """
    parts = _PARTS[model]
    if branch not in (*parts, "all"):
        images = " (with --dataset, as they read images)" if "camera" in parts else ""
        why = _NO_BPU_PART.get((model, branch), f"--model {model} has no such part")
        raise InputError(
            f"--target bpu has nothing to do for --branch {branch}: {why}; choose "
            f"--branch {', '.join(parts)}, all{images}, or leave --target bpu out"
        )
    return parts if branch == "all" else (branch,)


class Models(NamedTuple):
    """The model three times; the parts on the CPU are the same modules."""

    real: SplitModel
    fake: SplitModel
    integer: SplitModel


@contextmanager
def for_march(march: str) -> Iterator[None]:
    """`use_march`, with the option's name in its error.

    Raises:
        InputError: No such march.
    """
    with ExitStack() as stack:
        try:
            stack.enter_context(use_march(march))
        except ValueError as error:
            raise InputError(f"--march {march}: {error}") from error
        yield


def calibrating_form(fused: nn.Module, method: str, on_cpu: Iterable[str]) -> Any:
    """`bevquant_hybrid_tools.forms.calibrating_form`, with the option's name in its error.

    Raises:
        InputError: An unknown method.
    """
    try:
        return dense.calibrating_form(fused, method, on_cpu)
    except ValueError as error:
        if method in dense.OBSERVERS:
            raise
        raise InputError(f"--method {error}") from error


def names_on_cpu(
    model: Detector, units: Mapping[str, nn.Module], exclude: Iterable[str]
) -> dict[str, list[str]]:
    """Modules of each unit that `exclude` names, as paths within the unit."""
    found: dict[str, list[str]] = {name: [] for name in units}
    for given in exclude:
        before = sum(map(len, found.values()))
        for pattern in expand_patterns(model, [given]):
            for name, unit in units.items():
                found[name] += [
                    path
                    for path, _ in unit.named_modules()
                    if path and fnmatchcase(UNIT_PREFIXES[name] + path, pattern)
                ]
        if sum(map(len, found.values())) == before:
            raise InputError(
                f"--exclude {given}: it names nothing that runs on the BPU; bevfusion-quant tree "
                "prints the modules' paths"
            )
    return found


class SplitUnits:
    """Units of a float model for the BPU, which share its layers. Set the march first."""

    def __init__(self, model: Detector, config: BpuConfig) -> None:
        self.model, self.config = model, config
        self.parts = bpu_parts(config.branch, config.model)
        self.units = bpu_units(model, self.parts)
        self.on_cpu = names_on_cpu(model, self.units, config.exclude)
        self.fused: dict[str, Any] = {name: fuse_fx(unit) for name, unit in self.units.items()}
        self.shapes: dict[str, tuple[int, ...]] = {}

    def calibrating(self) -> dict[str, Any]:
        """Graphs that record activations while float values pass through them."""
        return {
            name: calibrating_form(fused, self.config.method, self.on_cpu[name])
            for name, fused in self.fused.items()
        }

    def run(self, graphs: Mapping[str, Any], batches: Iterable[Batch]) -> None:
        """Run the whole model with the graphs in it, and record the shapes of its stages."""
        split = SplitModel(self.model, graphs, self.parts, run_noting)
        for batch in batches:
            for name, shape in stage_shapes(split, batch).items():
                self.shapes.setdefault(name, shape)

    def finished(
        self,
        calibrated: Mapping[str, Any],
        state_of: Callable[[str], Mapping[str, Tensor]] | None = None,
    ) -> dict[str, Forms]:
        """All forms of each unit, with the calibrated ranges or the state of a file."""
        return {
            name: finished_forms(
                self.fused[name], graph, self.on_cpu[name],
                state_of(name) if state_of else None,
                UNIT_PREFIXES[name],
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
        return Models(*(SplitModel(self.model, g, self.parts, run_noting).eval() for g in graphs))

    def plan(self, forms: Mapping[str, Forms]) -> Plan:
        """Placement of the whole model: sensors, units, and the CPU parts between them."""
        made = PlanComposer(self.config.march)
        outputs = compose_plan(
            self.model,
            self.parts,
            {
                name: form.plan(self.config.march, self._inputs(name), "--exclude names it")
                for name, form in forms.items()
            },
            made,
            shapes=self.shapes,
            reasons={part: why_float(part, self.config.branch) for part in self.model.parts},
        )
        return made.plan(*outputs)

    def estimates(self, forms: Mapping[str, Forms]) -> dict[str, BpuEstimate]:
        """Estimated cost of each unit."""
        march = self.config.march
        return {name: form.estimate(march, self._inputs(name)) for name, form in forms.items()}

    def _inputs(self, unit: str) -> list[tuple[int, ...]]:
        return [self.shapes[name] for name in unit_inputs(unit, self.parts, self.model.kind)]


def compare_forms(
    models: Models,
    forms: Mapping[str, Forms],
    batches: FrameBatches,
    accuracy: AccuracyAccumulator | None = None,
) -> SplitComparison:
    """`bevfusion.deployment.evaluate_split` of the three models, whose units have these forms."""
    return evaluate_split(models, partial(FormsComparison, forms), batches, accuracy=accuracy)
