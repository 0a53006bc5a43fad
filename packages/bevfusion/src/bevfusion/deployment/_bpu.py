"""The detector split for a BPU: placement of each part, files, and their layers.

Nothing of a BPU's packages is imported: callers pass in their results.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any, Protocol, TypeVar

import torch
from torch import Tensor, nn

from bevfusion.deployment._check import Figures, join_figures
from bevfusion.deployment._files import FilePart, bpu_files, centerpoint_files
from bevfusion.deployment._pieces import Piece
from bevfusion.deployment._result import ExportedFile
from bevfusion.deployment._split import SplitModel
from bevfusion.model import PART_PATHS, Batch, Detector

Shape = tuple[int, ...]
PlanOfUnit = TypeVar("PlanOfUnit", contravariant=True)

_WHY_CPU = {
    "lidar": "sparse convolutions, where a BPU has dense ones alone",
    "scatter": "each pillar's features go to its cell, a place that the frame decides",
    "vtransform": "a softmax over depth, then sums over the frustum points of each cell; the "
    "mapper runs the first on the CPU and does not know the second",
    "head": "attention and a choice of queries by score; the mapper runs parts of both on the CPU, "
    "so the head stays float as a whole",
}


class _Composer(Protocol[PlanOfUnit]):
    """Composes a plan, as `bevquant_hybrid.partition.PlanComposer`."""

    def source(self, name: str, shape: Shape | None = None) -> str: ...
    def on_cpu(
        self,
        name: str,
        *inputs: str,
        reason: str,
        operator: str = "",
        path: str = "",
        shape: Shape | None = None,
    ) -> str: ...
    def unit(self, plan: PlanOfUnit, *inputs: str) -> tuple[str, ...]: ...


def stage_shapes(split: SplitModel, batch: Batch) -> dict[str, Shape]:
    """Run the model; return the shapes of its inputs and noted tensors by name.

    Images and depth images of all cameras and frames share the first axis.
    """
    shapes: dict[str, Shape] = {}

    def keep(name: str, value: Tensor) -> None:
        shapes.setdefault(name, tuple(value.shape))

    sources = {"images": batch.images, "depth": batch.depth, "voxels": batch.features}
    for name, value in sources.items():
        if value is not None:
            keep(name, value if name == "voxels" else value.flatten(0, 1))
    with torch.no_grad():
        split(*batch, note=keep)
    return shapes


def unit_inputs(unit: str, parts: Sequence[str], kind: str = "bevfusion") -> tuple[str, ...]:
    """Inputs of a unit, under the names of `stage_shapes`.

    Args:
        unit: "camera" or "bev".
        parts: What runs on the BPU.
        kind: Of the detector.
    """
    if unit == "camera":
        return ("images",)
    if "fuser" in parts:
        return ("camera", "lidar")
    if "decoder" in parts:
        return ("fuser" if kind == "bevfusion" else "lidar",)
    return ("decoder",)


def compose_plan(
    model: Detector,
    parts: Sequence[str],
    units: Mapping[str, PlanOfUnit],
    made: _Composer[PlanOfUnit],
    *,
    shapes: Mapping[str, Shape],
    reasons: Mapping[str, str],
) -> tuple[str, ...]:
    """Placement of the whole model: sensors, units, and the CPU's parts between them.

    Args:
        model: In float.
        parts: Parts on the BPU; see `bpu_units`.
        units: The plan of each unit; see `bpu_units`.
        made: Receives the nodes, in the order of execution.
        shapes: From `stage_shapes`.
        reasons: Reason of each part that runs on the CPU although a BPU could run it.

    Returns:
        The names of the model's outputs.
    """

    def source(name: str) -> str:
        return made.source(name, shapes.get(name))

    def place(name: str, path: str, why: str, stage: str, *inputs: str) -> str:
        operator, shape = type(model.get_submodule(path)).__name__, shapes.get(stage)
        return made.on_cpu(name, *inputs, reason=why, operator=operator, path=path, shape=shape)

    def on_cpu(name: str, part: str, below: str, stage: str, *inputs: str) -> str:
        why = _WHY_CPU.get(below.removeprefix(".")) or _WHY_CPU.get(part) or reasons[part]
        return place(name, f"{PART_PATHS[part]}{below}", why, stage, *inputs)

    if model.kind != "bevfusion":
        x = source("voxels")
        for path, why in model.kept_in_float.items():
            x = place("pillar encoder", path, why, "", x)
        name, why = ("scatter",) * 2 if model.kept_in_float else ("LiDAR encoder", "lidar")
        x = place(name, model.stages["lidar"], _WHY_CPU[why], "lidar", x)
        if "decoder" not in parts:
            backbone, neck = model.part_paths["decoder"]
            x = place("decoder backbone", backbone, reasons["decoder"], "", x)
            x = place("decoder neck", neck, reasons["decoder"], "decoder", x)
        outputs = made.unit(units["bev"], x)
        if "head" in model.parts and "head" not in parts:
            outputs = (place("head", model.stages["head"], reasons["head"], "head", *outputs),)
        return outputs
    maps = []
    if "camera" in model.parts:
        x = source("images")
        if "camera" in parts:
            (x,) = made.unit(units["camera"], x)
        else:
            x = on_cpu("camera backbone", "camera", ".backbone", "", x)
            x = on_cpu("camera neck", "camera", ".neck", "neck", x)
        depth = source("depth")
        maps.append(on_cpu("view transform", "camera", ".vtransform", "camera", x, depth))
    if "lidar" in model.parts:
        voxels = source("voxels")
        maps.append(on_cpu("LiDAR encoder", "lidar", ".backbone", "lidar", voxels))
    x = maps[0]
    if "fuser" in parts:
        (x,) = made.unit(units["bev"], *maps)
    elif "fuser" in model.parts:
        x = on_cpu("fuser", "fuser", "", "fuser", *maps)
    if "decoder" in model.parts and "decoder" not in parts:
        x = on_cpu("decoder backbone", "decoder", ".backbone", "", x)
        x = on_cpu("decoder neck", "decoder", ".neck", "decoder", x)
    elif "decoder" in model.parts and "fuser" not in parts:
        (x,) = made.unit(units["bev"], x)
    if "head" in model.parts:
        x = on_cpu("head", "head", "", "head", x)
    return (x,)


class _UnitForms(Protocol):
    """Graphs of a unit and the prefix of its modules in the model, as `forms.Forms`."""

    @property
    def float_graph(self) -> nn.Module: ...
    @property
    def fake_graph(self) -> nn.Module: ...
    @property
    def integer_graph(self) -> nn.Module: ...
    @property
    def prefix(self) -> str: ...


def bpu_pieces(
    folded: Detector, parts: Sequence[str], forms: Mapping[str, _UnitForms]
) -> list[Piece]:
    """The files for a BPU and its CPU, in the order of execution.

    Args:
        folded: The float model, batch norms folded.
        parts: Parts on the BPU; see `bpu_units`.
        forms: Of the units, by name.
    """
    pieces = []
    if folded.kind == "bevfusion":
        files = bpu_files(folded.parts, parts)
    else:
        files = centerpoint_files(folded, apart=len(parts) == 1)
    for file in files:
        form = forms.get(_unit(file, parts))
        if form is not None:
            graphs = form.float_graph, form.fake_graph, _as_it_is(form.integer_graph)
            pieces.append(Piece(file, "bpu", *graphs, prefix=form.prefix))
        else:
            module = file.module(folded)
            pieces.append(Piece(file, "sparse" if file.sparse else "float", module, module))
    return pieces


def _unit(file: FilePart, on_bpu: Sequence[str]) -> str:
    """Name of the unit that a file holds; empty for one of the CPU's."""
    units = {
        "camera.backbone": ("camera", "camera"), "fuser": ("fuser", "bev"),
        "decoder": ("decoder", "bev"), "rpn_centerhead": ("decoder", "bev"),
        "rpn": ("decoder", "bev"), "centerhead": ("head", "bev"),
    }  # fmt: skip
    part, unit = units.get(file.name, ("", ""))
    return unit if part in on_bpu else ""


def _as_it_is(graph: nn.Module) -> Any:
    return lambda module, args: graph


class _UnitLayer(Protocol):
    """A layer in all forms, as `bevquant_hybrid_tools.forms.BpuLayer`."""

    @property
    def layer(self) -> str: ...
    @property
    def fake_sqnr_db(self) -> float | None: ...
    @property
    def integer_sqnr_db(self) -> float | None: ...
    @property
    def max_steps(self) -> int: ...


def beside_bpu_layers(
    files: Iterable[ExportedFile], rows: Iterable[_UnitLayer], paths: Mapping[str, str]
) -> tuple[ExportedFile, ...]:
    """`beside_layers` of files for a BPU.

    Args:
        files: Written for it.
        rows: Results of comparing its executions.
        paths: Name of a function's stand-in in the unit's graph to its path in the model.
    """
    known: dict[tuple[str, str], list[Figures]] = defaultdict(list)
    for row in rows:
        scope, _, name = row.layer.rpartition(".")
        key = (scope, "resize") if name.startswith("interpolate") else (row.layer, "")
        known[key].append((row.fake_sqnr_db, row.integer_sqnr_db, row.max_steps))
    named = [
        replace(file, layers=tuple(replace(v, path=paths.get(v.path, v.path)) for v in file.layers))
        for file in files
    ]
    return join_figures(named, known)
