"""The trained model as a run folder like that of `ptq`, judged and drawn."""

from __future__ import annotations

import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tqdm import tqdm

from bevfusion.model import CONFIGS
from bevfusion_quant.frames import FrameBatches
from bevfusion_quant.measure import accuracy_tally, judge, tally_models
from bevfusion_quant.ranks import current_ranks
from bevfusion_quant.report import write_pictures, write_run_page
from bevfusion_quant.run import (
    RunRecord,
    sha256,
)
from bevfusion_quant.steps import PLAN_FILE, quantized_parts, save_model

if TYPE_CHECKING:
    from bev_data.metrics import Accuracy
    from bev_data.points import Frame
    from bevfusion.model import BEVFusion
    from bevfusion_quant.run import Clock
    from bevfusion_quant.steps import LoadedRun

__all__ = ["write_run"]


def write_run(
    folder: Path,
    name: str,
    start: LoadedRun,
    model: BEVFusion,
    told: dict[str, Any],
    clock: Clock,
    *,
    run: Path,
    command: str,
    cameras: Sequence[str],
    shown: Sequence[Frame],
    judged: bool,
) -> Accuracy | None:
    """Write what `ptq` writes: model, settings, summary, page, pictures.

    The float model beside the trained one, in the page and in the folder, is that of the run that
    training began from.

    Args:
        folder: Empty.
        name: Of the run.
        start: The run that training began from.
        model: Trained, ranges constant, on the CPU in eval mode.
        told: What was done, kept under `qat`.
        clock: Times the steps.
        run: Folder of the run that training began from, for its plan.
        command: The command line that repeats this run.
        cameras: Names of the cameras that were used.
        shown: Frames; the first is drawn.
        judged: Whether all of them are judged by their labels.

    Returns:
        How well the models find what is labelled, if they were judged.
    """
    ran = start.settings
    sizes, branch = CONFIGS[ran.config], ran.branch
    batches = FrameBatches(shown, sizes, model, cameras)
    accuracy = None
    if judged:
        with clock.step("judge by labels"):
            accuracy = _accuracy(start.float_model, model, batches, sizes)
    judgement = judge(start.float_model, model, batches.head(1), sizes, clock)
    if not current_ranks().first:
        return accuracy
    record = RunRecord(folder, command, clock)
    with clock.step("draw"):
        write_pictures(folder, sizes, batches.first_frame, judgement, quantized_parts(branch)[-1])
    with clock.step("write"):
        digests = save_model(folder, model, start.float_model)
        if ran.plan is not None:
            shutil.copyfile(run / PLAN_FILE, folder / PLAN_FILE)
            digests[PLAN_FILE] = sha256(folder / PLAN_FILE)
        record.write_settings({**ran.written, "cameras": cameras, "sha256": digests, "qat": told})
    settings = {
        key: value for key, value in told["settings"].items() if key not in ("run", "cameras")
    }
    with clock.step("page"):
        shown_settings = {"trained from": told["run"], "weights": ran.weights, **settings}
        write_run_page(record, name, sizes, shown_settings, batches, judgement, accuracy=accuracy)
    record.write_summary(
        {
            "branch": branch,
            "frames": batches.listed(),
            "qat": told,
            **judgement.summary(),
            "accuracy": None if accuracy is None else accuracy.summary(),
        }
    )
    return accuracy


def _accuracy(
    float_model: BEVFusion, model: BEVFusion, batches: FrameBatches, sizes: Any
) -> Accuracy | None:
    """Both models' detections by the labels, frame by frame."""
    tally = accuracy_tally(sizes, batches)
    models = {"float": float_model, "quantized": model}
    judged = tally_models("held out", models, model.head.decode, batches, tally)
    quiet = not current_ranks().first
    for _ in tqdm(judged, desc="held out", total=len(batches), disable=quiet):
        pass
    return tally.result()
