"""A finished run on other frames: the comparison again, nothing calibrated, nothing changed."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from bev_data.metrics import Accuracy, Bootstrap
from bevfusion.model import CONFIGS
from bevfusion_quant.frames import FrameBatches
from bevfusion_quant.measure import (
    LayerRow,
    StageRow,
    accuracy_tally,
    judge,
)
from bevfusion_quant.report import JudgedRun
from bevfusion_quant.run import (
    Clock,
    RunRecord,
    run_folder,
    run_shards,
)
from bevfusion_quant.steps import load_run, quantized_parts, read_model_settings, refuse_unfolded

if TYPE_CHECKING:
    from bev_data.metrics import AgreementRow, FoundRow
    from bev_data.points import Frame
    from bevfusion_quant.integer import Simulation

__all__ = ["EvaluateResult", "run_evaluate"]


@dataclass(frozen=True)
class EvaluateResult:
    """Where the evaluation lies, its tables, seconds by step, peak memory in MiB.

    `accuracy` is None without a head or without labels.
    """

    folder: Path
    layers: list[LayerRow]
    stages: list[StageRow]
    agreement: list[AgreementRow]
    labels_found: list[FoundRow]
    seconds: dict[str, float]
    peak_memory_mib: float
    simulation: Simulation | None = None
    accuracy: Accuracy | None = None


def run_evaluate(
    run: str | Path,
    frames: Sequence[Frame],
    *,
    cameras: Sequence[str] | None = None,
    runs: Path = Path("runs"),
    name: str = "evaluate",
    overwrite: bool = False,
    command: str = "",
    integers: str | None = None,
    bootstrap: Bootstrap | None = None,
) -> EvaluateResult:
    """Compare a run's models on the given frames and write `runs/name`.

    The float model is the run's own, its batch norms folded if the run folded them. The run is
    read and left as it is. Where frames have labels and the model a head, every model's detections
    are judged by them.

    Args:
        run: A folder that `run_ptq` wrote.
        frames: At least one.
        cameras: Names of the cameras to use; those of the run by default.
        runs: Folder of all runs.
        name: The evaluation's folder in it.
        overwrite: Replace an earlier run of that name.
        command: The command line that repeats this evaluation, for the summary.
        integers: Kernels to run the model in integers on, such as "auto"; None for float and
            fake-quantized alone.
        bootstrap: How the intervals of the mean average precision are found; `Bootstrap()` by
            default.

    Raises:
        InputError: Whatever is wrong with the run or the input; nothing is written then.
    """
    from bevfusion_quant.integer import check_backend, lower_model, simulate_model

    if integers is not None:
        check_backend(integers)
        refuse_unfolded(read_model_settings(run), run, "run in integers")
    clock = Clock()
    with run_folder(runs, name, overwrite=overwrite, keep=Path(run)) as folder:
        with clock.step("load the run"):
            loaded = load_run(run)
        ran, model = loaded.settings, loaded.quantized_model
        sizes = CONFIGS[ran.config]
        batches = FrameBatches(frames, sizes, model, cameras or ran.used_cameras)
        tally = accuracy_tally(sizes, batches, bootstrap)
        shards = run_shards(
            runs,
            name,
            frames,
            {"evaluates": str(run), "cameras": cameras, "integers": integers, "command": command},
            loaded.float_model,
            model,
        )
        low = lower_model(loaded.float_model, model, batches, sizes, clock, integers)
        layers = None if low is None else low.layers
        judgement = judge(
            loaded.float_model, model, batches, sizes, clock, tally, shards, integers=layers
        )
        simulation = None
        if low is not None:
            simulation = simulate_model(
                low,
                model,
                batches,
                sizes,
                judgement,
                clock,
                folder,
                branch=ran.branch,
                accuracy=tally,
                shards=shards,
            )
        with clock.step("judge by labels"):
            accuracy = tally.result()
        tables = judgement.summary()
        made = partial(
            EvaluateResult,
            runs / name,
            **{key: rows for key, rows in tables.items() if key != "quantizers"},
            simulation=simulation,
            accuracy=accuracy,
        )
        if not shards.ranks.first:  # the first one writes
            seconds, peak = clock.spent()
            return made(seconds=seconds, peak_memory_mib=peak)
        settings = {
            "evaluates": str(run),
            "config": ran.config,
            "weights": ran.weights,
            "cameras": cameras,
        }
        record = RunRecord(folder, command, clock)
        judged = JudgedRun(
            record, name, sizes, batches, judgement, simulation=simulation, accuracy=accuracy
        )
        judged.draw(quantized_parts(ran.branch)[-1])
        record.write_settings({"run_sha256": ran.sha256, **settings})
        judged.write_page(settings)
        seconds, peak = judged.write_summary({"evaluates": str(run), "accuracy": None})
    shards.remove()
    return made(seconds=seconds, peak_memory_mib=peak)
