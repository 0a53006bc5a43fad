"""Judge the runs' models frame by frame, and write what was found."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from bev_data.cameras import CAMERA_NAMES
from bevfusion.model import CONFIGS
from bevfusion_quant._errors import InputError
from bevfusion_quant.compare._alike import AlikeRuns, check_settings, load_alike, names_of
from bevfusion_quant.compare._outcome import ComparedRun, Comparison
from bevfusion_quant.compare._page import write_comparison_page
from bevfusion_quant.frames import FrameBatches
from bevfusion_quant.measure import Model, accuracy_tally, tally_models
from bevfusion_quant.run import (
    Clock,
    RunRecord,
    peak_memory_mib,
    run_folder,
    run_shards,
)

if TYPE_CHECKING:
    from bev_data.metrics import Accuracy, AccuracyTally, Bootstrap
    from bev_data.points import Frame
    from bevfusion_quant.steps import ModelSettings

__all__ = ["CompareResult", "run_compare"]

LOG = logging.getLogger(__name__)
_TOLD = 10  # frames between two lines of progress
_UNFOLDED = "ptq --no-fold left batch norms in place"


@dataclass(frozen=True, eq=False)
class CompareResult:
    """Where the comparison lies, what it found, seconds by step, peak memory in MiB."""

    folder: Path
    comparison: Comparison
    seconds: dict[str, float]
    peak_memory_mib: float


def run_compare(
    compared: Sequence[str | Path],
    frames: Sequence[Frame],
    *,
    integers: str | None = None,
    cameras: Sequence[str] | None = None,
    bootstrap: Bootstrap | None = None,
    runs: Path = Path("runs"),
    name: str = "compare",
    overwrite: bool = False,
    command: str = "",
) -> CompareResult:
    """Judge several runs of one float model by the labels of the same frames; write `runs/name`.

    Every frame is made once and run through the float model, each run's fake-quantized model and,
    where asked for, its integers; detections alone are kept of it. Intervals of the differences to
    float draw the same scenes for both. All runs' models are held at once, the float model once.
    Of several ranks each runs its share of the frames.

    Args:
        compared: Folders that `run_ptq` wrote, or QAT, all from the same float weights.
        frames: At least one with labels.
        integers: Kernels to run the models in integers on, such as "auto"; None for no integers.
            Runs whose batch norms are not folded have none, which is said.
        cameras: Names of the cameras to use; those of the runs by default.
        bootstrap: How intervals are found; `Bootstrap()` by default.
        runs: Folder of all runs.
        name: The comparison's folder in it.
        overwrite: Replace an earlier run of that name.
        command: The command line that repeats it, for the summary.

    Raises:
        InputError: Runs that cannot be compared, or whatever is wrong with the frames; nothing is
            written then.
    """
    from bevfusion_quant.integer import check_backend

    if integers is not None:
        check_backend(integers)
    folders = [Path(folder) for folder in compared]
    found = check_settings(folders)
    _keep(folders, runs / name)
    clock = Clock()
    told = tuple(
        _compared(run, str(folder), ran, integers)
        for run, folder, ran in zip(names_of(folders), folders, found, strict=True)
    )
    with run_folder(runs, name, overwrite=overwrite) as folder:
        sizes = CONFIGS[found[0].config]
        with clock.step("load the runs"):
            batches = _batches(frames, found[0], cameras)
            alike = load_alike(folders, batches[0])
        with clock.step("lower to integers"):
            models = _models(alike, told, batches, integers)
        digests = [run.settings.sha256 for run in told]
        decides = {"compares": digests, "integers": integers, "cameras": cameras}
        shards = run_shards(runs, name, frames, {**decides, "command": command}, alike.float_model)
        tally = accuracy_tally(sizes, batches, bootstrap)
        with clock.step("run all models"):
            decode = alike.float_model.head.decode
            for index in tally_models("compare", models, decode, batches, tally, shards):
                if (index + 1) % _TOLD == 0:
                    LOG.info("frame %d of %d", index + 1, len(batches))
        with clock.step("judge by labels"):
            comparison = Comparison(told, _accuracy(tally))
        seconds, peak = clock.seconds(), round(peak_memory_mib(), 1)
        if not shards.ranks.first:  # the first one writes
            return CompareResult(runs / name, comparison, seconds, peak)
        record = RunRecord(folder, command, clock)
        entries = [run.summary() for run in told]
        settings = {"compares": entries, "config": sizes.name, "cameras": cameras}
        record.write_settings({"evaluates": [run.folder for run in told], **settings})
        with clock.step("page"):
            write_comparison_page(record, name, comparison, batches.frame_names)
        seconds, peak = record.write_summary(
            {
                **settings,
                "frames": batches.frame_names,
                "accuracy": comparison.accuracy.summary(),
                "notes": comparison.left_out(),
            }
        )
    shards.remove()
    return CompareResult(runs / name, comparison, seconds, peak)


def _keep(folders: Sequence[Path], target: Path) -> None:
    for folder in folders:
        if target.exists() and target.samefile(folder):
            raise InputError(
                f"{target} is one of the runs that are compared, and would be replaced: choose "
                "another --name"
            )


def _compared(name: str, folder: str, ran: ModelSettings, integers: str | None) -> ComparedRun:
    why_not = "" if integers is None or ran.fold else _UNFOLDED
    return ComparedRun(name, folder, ran, integers is not None and ran.fold, why_not)


def _batches(
    frames: Sequence[Frame], ran: ModelSettings, cameras: Sequence[str] | None
) -> FrameBatches:
    """The frames as batches, made by a model of the right parts, which is not run."""
    from bevfusion.model import build_model
    from bevfusion_quant.steps import built_parts

    sizes = CONFIGS[ran.config]
    model = build_model(sizes, built_parts(ran.branch))
    return FrameBatches(frames, sizes, model, cameras or ran.cameras or CAMERA_NAMES)


def _models(
    alike: AlikeRuns, told: Sequence[ComparedRun], batches: FrameBatches, backend: str | None
) -> dict[str, Model]:
    """What is run on each frame, by its name in the tables."""
    from bevfusion_quant.integer._simulation import lowered

    models: dict[str, Model] = {"float": alike.float_model}
    for run, model in zip(told, alike.quantized, strict=True):
        names = run.models
        models[names["quantized"]] = model
        if "integers" in names:
            models[names["integers"]] = lowered(model, batches[0], backend or "auto")
    return models


def _accuracy(tally: AccuracyTally) -> Accuracy:
    found = tally.result()
    if found is None:
        raise InputError(
            "none of the frames has labels, which runs are compared by: give frames of a labelled "
            "data set (--dataset), or compare layers with bevfusion-quant evaluate"
        )
    return found
