"""Runs that are to be compared, loaded and found to be of one float model."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from bevfusion_quant._errors import InputError
from bevfusion_quant.measure import relative_change, whole_output
from bevfusion_quant.steps import built_parts, load_run, read_model_settings

if TYPE_CHECKING:
    from torch import Tensor

    from bevfusion.model import Batch, BEVFusion
    from bevfusion_quant.steps import ModelSettings

__all__ = ["AlikeRuns", "check_settings", "load_alike", "names_of"]

# Folding moves a heat map by 1e-5 of its largest value, other weights by as much as it is.
_SAME = 1e-3


@dataclass(eq=False)
class AlikeRuns:
    """One float model, and what the runs made of it, in eval mode."""

    float_model: BEVFusion
    quantized: list[BEVFusion]


def check_settings(folders: Sequence[Path]) -> list[ModelSettings]:
    """The runs' settings, if the runs can be compared as far as those tell.

    Raises:
        InputError: No run, one given twice, one for a BPU or without a head, or two of models
            that differ in sizes, parts or cameras.
    """
    if not folders:
        raise InputError("no runs to compare: name finished runs with --run")
    found = [read_model_settings(folder) for folder in folders]
    for folder, settings in zip(folders, found, strict=True):
        if sum(folder.samefile(other) for other in folders) > 1:
            raise InputError(f"--run {folder} is given twice: name each run once")
        if settings.for_bpu:
            raise InputError(
                f"--run {folder} is a run for a BPU, whose model is in other parts: judge it with "
                "bevfusion-quant evaluate"
            )
        if "head" not in built_parts(settings.branch):
            raise InputError(
                f"--run {folder} holds the {settings.branch} branch alone, without a "
                "head: it detects nothing that labels could judge; compare detectors"
            )
        for what, one, other in _differences(found[0], settings):
            raise InputError(
                f"--run {folder} is no run of the float model of {folders[0]}: its {what} is "
                f"{one}, there it is {other}; compare runs of one model"
            )
    return found


def names_of(folders: Sequence[Path]) -> list[str]:
    """A name for each run: its folder's, or where that is not the only one the whole path."""
    often = Counter(folder.resolve().name for folder in folders)
    return [f.resolve().name if often[f.resolve().name] == 1 else str(f) for f in folders]


def load_alike(folders: Sequence[Path], batch: Batch) -> AlikeRuns:
    """Load the runs one after the other; of the float models the first stays.

    Args:
        folders: Checked by `check_settings`.
        batch: On which the float models must agree, within a thousandth of the heat map's largest
            value: runs with and without folded batch norms do.

    Raises:
        InputError: A run cannot be loaded, or began with other weights.
    """
    quantized: list[BEVFusion] = []
    first: tuple[BEVFusion, Tensor] | None = None
    for folder in folders:
        run = load_run(folder)
        with torch.no_grad():
            output = whole_output(run.float_model(*batch))
        first = first or (run.float_model, output)
        change = relative_change(first[1], output)
        if not change <= _SAME:
            raise InputError(
                f"--run {folder} began with other weights than {folders[0]}: on the first frame "
                f"their float models' heat maps differ by {change:.2g} of the largest value; "
                "compare runs of one model"
            )
        quantized.append(run.quantized_model)
    assert first is not None
    return AlikeRuns(first[0], quantized)


def _differences(first: ModelSettings, other: ModelSettings) -> list[tuple[str, object, object]]:
    def parts(settings: ModelSettings) -> str:
        return " and ".join(built_parts(settings.branch))

    differ = [
        ("configuration", other.config, first.config),
        ("set of parts", parts(other), parts(first)),
        ("list of cameras", other.cameras, first.cameras),
    ]
    return [item for item in differ if item[1] != item[2]]
