"""The detector split for a BPU: placement of each part, files, and their layers.

Nothing of a BPU's packages is imported: callers pass in their results.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from bevfusion.centerpoint import CenterPoint
from bevfusion.deployment._check import Figures, join_figures
from bevfusion.deployment._files import FilePart, bpu_files, centerpoint_files
from bevfusion.deployment._pieces import Piece
from bevfusion.deployment._result import ExportedFile
from bevfusion.deployment._split import SplitModel, unit_of
from bevfusion.model import Batch, BEVFusion, Detector

Shape = tuple[int, ...]

_WHY_CPU = {
    "LiDAR encoder": "sparse convolutions, where a BPU has dense ones alone",
    "scatter": "each pillar's features go to its cell, a place that the frame decides",
    "view transform": "a softmax over depth, then sums over the frustum points of each cell; the "
    "mapper runs the first on the CPU and does not know the second",
    "heads.object": "attention and a choice of queries by score; the mapper runs parts of both on "
    "the CPU, so the head stays float as a whole",
}


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
    steps = (BEVFusion if kind == "bevfusion" else CenterPoint).steps
    return next(step.inputs for step in steps if unit_of(step, parts) == unit)


def compose_plan(
    model: Detector,
    parts: Sequence[str],
    units: Mapping[str, Any],
    composer: Any,
    *,
    shapes: Mapping[str, Shape],
    reasons: Mapping[str, str],
) -> tuple[str, ...]:
    """Placement of the whole model: sensors, units, and the CPU's parts between them.

    Args:
        model: In float.
        parts: Parts on the BPU; see `bpu_units`.
        units: The `bevquant_hybrid.partition.Plan` of each unit; see `bpu_units`.
        composer: A `bevquant_hybrid.partition.PlanComposer`, which gets the nodes in the order of
            execution.
        shapes: From `stage_shapes`.
        reasons: Reason of each part that runs on the CPU although a BPU could run it.

    Returns:
        The names of the model's outputs.
    """
    named: dict[str, tuple[str, ...]] = {}
    placed: dict[str, tuple[str, ...]] = {}
    last: tuple[str, ...] = ()
    for step in model.flow:
        for name in step.inputs:
            if name not in named:
                named[name] = (composer.source(name, shapes.get(name)),)
        inputs = [name for value in step.inputs for name in named[value]]
        unit = unit_of(step, parts)
        if not unit:
            known = {**_WHY_CPU, **model.kept_in_float}
            reason = known.get(step.path) or known.get(step.name) or reasons[step.part]
            last = (
                composer.on_cpu(
                    step.name, *inputs, reason=reason, path=step.path,
                    operator=type(model.get_submodule(step.path)).__name__,
                    shape=shapes.get(step.output),
                ),
            )  # fmt: skip
        elif unit not in placed:
            last = placed[unit] = composer.unit(units[unit], *inputs)
        named[step.output] = last
    return last


def bpu_pieces(folded: Detector, parts: Sequence[str], forms: Mapping[str, Any]) -> list[Piece]:
    """The files for a BPU and its CPU, in the order of execution.

    Args:
        folded: The float model, batch norms folded.
        parts: Parts on the BPU; see `bpu_units`.
        forms: `bevquant_hybrid_tools.forms.Forms` of the units, by name.
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


def beside_bpu_layers(
    files: Iterable[ExportedFile], rows: Iterable[Any], paths: Mapping[str, str]
) -> tuple[ExportedFile, ...]:
    """`beside_layers` of files for a BPU.

    Args:
        files: Written for it.
        rows: `bevquant_hybrid_tools.forms.BpuLayer`, results of comparing its executions.
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
