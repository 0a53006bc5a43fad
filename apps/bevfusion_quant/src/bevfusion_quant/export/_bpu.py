"""A run for a BPU as files: dense units for hb_mapper, the CPU's parts in float beside them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from bevfusion.model import CONFIGS
from bevfusion_quant.export._check import beside_bpu_layers
from bevfusion_quant.export._export import export_pieces
from bevfusion_quant.export._files import LIDAR, FilePart, bpu_files
from bevfusion_quant.export._pieces import Piece
from bevfusion_quant.frames import FrameBatches
from bevfusion_quant.steps import example_batch, fuse_branch

if TYPE_CHECKING:
    from torch import nn

    from bev_data.points import Frame
    from bevfusion.model import BEVFusion
    from bevfusion_quant.bpu import LoadedBpuRun
    from bevfusion_quant.results import ExportedSet
    from bevfusion_quant.run import Clock

__all__ = ["export_bpu"]


def export_bpu(
    frames: Sequence[Frame],
    clock: Clock,
    folder: Path,
    *,
    run: str,
    cameras: Sequence[str] | None,
    **given: Any,
) -> tuple[ExportedSet, FrameBatches]:
    """Write and check the set of a run for a BPU.

    Args:
        frames: At least one.
        clock: Times the steps.
        folder: Made here.
        run: A folder that `run_bpu` wrote.
        cameras: Names of the cameras to use; those of the run by default.
        **given: command and settings, for the manifest.

    Raises:
        InputError: Whatever is wrong with the run or the input.
    """
    from bevfusion_quant.bpu import load_bpu_run
    from bevfusion_quant.bpu._compare import compare_forms, node_probes
    from bevfusion_quant.bpu._quantize import for_march
    from bevfusion_quant.bpu._units import PREFIXES, node_labels

    with clock.step("load the run"):
        loaded = load_bpu_run(run)
    config, sizes = loaded.config, CONFIGS[loaded.config.config]
    folded = fuse_branch(loaded.units.model, example_batch(sizes)).model
    with for_march(config.march):
        batches = FrameBatches(frames, sizes, folded, cameras or config.cameras)
        exported = export_pieces(
            bpu_pieces(loaded, folded), folded, batches, sizes, clock, folder,
            target="bpu", march=config.march, run=run, **given,
        )  # fmt: skip
        labels = {unit: node_labels(unit, f.fake_graph) for unit, f in loaded.forms.items()}
        with clock.step("compare layers", blame="float and integer model cannot be compared"):
            compared = compare_forms(
                loaded.models, node_probes(loaded.forms, labels), batches.head(1), sizes
            )
    paths = {
        PREFIXES[unit] + label.place: label.path
        for unit, found in labels.items()
        for label in found.values()
    }
    files = beside_bpu_layers(exported.files, compared.layers, paths)
    return replace(exported, files=files), batches


def bpu_pieces(loaded: LoadedBpuRun, folded: BEVFusion) -> list[Piece]:
    """The files in the order of execution."""
    on_bpu = loaded.units.parts
    pieces = []
    for file in bpu_files(folded.parts, on_bpu):
        unit = _unit(file, on_bpu)
        if unit in loaded.forms:
            form = loaded.forms[unit]
            pieces.append(
                Piece(
                    file,
                    "bpu",
                    form.float_graph,
                    form.fake_graph,
                    _integers(form.integer_graph),
                    prefix="encoders.camera." if unit == "camera" else "",
                )
            )
            continue
        module = file.module(folded)
        pieces.append(Piece(file, "sparse" if file.name == LIDAR else "float", module, module))
    return pieces


def _unit(file: FilePart, on_bpu: Sequence[str]) -> str:
    """Name of the unit that a file holds; empty for one of the CPU's."""
    units = {"camera.backbone": ("camera", "camera"), "fuser": ("fuser", "bev"),
             "decoder": ("decoder", "bev")}  # fmt: skip
    part, unit = units.get(file.name, ("", ""))
    return unit if part in on_bpu else ""


def _integers(graph: nn.Module) -> Any:
    return lambda module, args: graph
