"""Quantization-aware training: a quantized run is trained further with its rounding."""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, Unpack, cast

from bev_data.metrics import Accuracy
from bev_data.points import Frame
from bevfusion.detectors import is_foreign
from bevfusion.evaluation import accumulate_models, accuracy_accumulator
from bevfusion.model import Detector
from bevfusion.quantization import QatDetectorTrainer, evaluate_quantized
from bevfusion.training import (
    CHECKPOINT,
    Augmentation,
    FrameSource,
    PreparedFrames,
    begun_before,
    identity_of,
    in_parts,
    prepare_frames,
    take_steps,
)
from bevfusion_quant._errors import InputError
from bevfusion_quant.frames import FrameBatches
from bevfusion_quant.options import ConfigName, Place, QatOptions, TrainedBranch
from bevfusion_quant.pages import EvaluatedRun
from bevfusion_quant.run import Clock, RunRecord, new_run
from bevfusion_quant.saved_run import (
    PLAN_FILE,
    LoadedRun,
    ModelSettings,
    load_run,
    read_model_settings,
    read_plan,
    save_model,
)
from bevfusion_quant.stages import quantized_parts
from bevfusion_quant.train import TrainConfig, refusing_divergence, usable_device
from bevquant_qnn import FramePart, add_up
from bevquant_quantizers.ranks import current_ranks

__all__ = [
    "FramePart",
    "QatConfig",
    "QatResult",
    "add_up",
    "read_trainable",
    "run_qat",
    "trainer_for",
]


@dataclass(frozen=True, kw_only=True)
class QatConfig(QatOptions):
    """Settings of `run_qat`; see `QatOptions`.

    Args:
        augmentation: Random movements of frames.

    Raises:
        InputError: A setting is outside its range; named as the command's option.

    Example:
        >>> QatConfig(steps=300).frozen_after
        150
    """

    augmentation: Augmentation = field(default_factory=Augmentation)

    def __post_init__(self) -> None:
        self.check_optimizer()
        if not 0 <= self.distill < float("inf"):
            raise InputError(f"--distill {self.distill}: it must be a weight from 0 up")
        if self.freeze_after is not None and self.freeze_after < 0:
            raise InputError(
                f"--freeze-after {self.freeze_after}: it must be a number of steps from 0 up"
            )
        if self.learn_ranges and self.freeze_after == 0:
            raise InputError(
                "--freeze-after 0: ranges that stand still from the first step cannot learn; "
                "add --no-learn-ranges, or give a number of steps"
            )

    @property
    def frozen_after(self) -> int:
        """Step from which ranges are constant."""
        return self.steps // 2 if self.freeze_after is None else self.freeze_after


def trainer_for(
    config: QatConfig, model: Detector, teacher: Detector | None, frames: PreparedFrames
) -> QatDetectorTrainer:
    """The trainer of the calibrated model, which it changes in place."""
    training = {name: getattr(config, name) for name in _TRAINED_BY}
    return QatDetectorTrainer(model, frames, teacher=teacher, **training)


_TRAINED_BY = (
    "steps", "batch", "lr", "weight_decay", "clip", "seed", "augmentation", "learn_ranges",
    "frozen_after", "train_float", "distill",
)  # fmt: skip


def read_trainable(run: str | Path) -> ModelSettings:
    """Read a run's settings and refuse a run without a loss.

    Raises:
        InputError: No run with a model, a run for a BPU, or a run without a head.
    """
    settings = read_model_settings(run)
    if settings.for_bpu:
        raise InputError(f"{run} is a run for a BPU: qat trains runs of ptq without --target bpu")
    if is_foreign(settings.model):
        raise InputError(
            f"{run} is of {settings.model}, whose losses and targets are in its own code: train "
            "bevfusion_quant.ptq.load_quantized(run).network there with bevquant_qnn.QatTrainer"
        )
    if "head" not in settings.parts:
        raise InputError(
            f"{run} holds the {settings.branch} encoder alone, and without a head "
            "there are no detections to train by: quantize a detector, with ptq --branch all (or "
            "fuser, decoder, head, lidar-detector, camera-detector)"
        )
    if not settings.fold:
        raise InputError(
            f"{run} has batch norms that are not folded, and qat trains folded models: quantize "
            "again with ptq without --no-fold"
        )
    return settings


@dataclass(frozen=True)
class QatResult:
    """Folder and course of a training run.

    Attributes:
        folder: A run folder as that of `run_ptq`.
        work: Prepared frames, unless they are kept elsewhere.
        terms: Names of the losses.
        losses: Mean of each loss in up to ten equal parts of the run.
        steps: Steps of this process.
        seconds: Seconds by step of the job.
        accuracy: Scores on held-out frames: "float" is the run's float model, "quantized" the
            trained one. None without held-out frames.
    """

    folder: Path
    work: Path
    terms: tuple[str, ...]
    losses: list[tuple[float, ...]]
    steps: int
    seconds: dict[str, float]
    accuracy: Accuracy | None


def run_qat(
    run: str | Path,
    source: FrameSource,
    config: QatConfig,
    *,
    resume: bool = False,
    device: str = "cpu",
    workers: int = 1,
    cache: Path | None = None,
    checkpoint_every: int = 100,
    judge_by: FrameSource | None = None,
    cameras: Sequence[str] | None = None,
    **place: Unpack[Place],
) -> QatResult:
    """Train a run's quantized model with its fake quantizers on, and write it as `runs/name`.

    Batch norms are folded. The bits of weights and the plan of precisions are the run's. At the end
    every range is constant, so every other command takes the new run as one of `run_ptq`. The old
    run is not changed.

    During training `runs/name.training` holds the checkpoint. SIGTERM and Ctrl-C stop between two
    steps; `resume` continues. On the same machine with the same number of threads, the result then
    equals that of an uninterrupted run bit for bit.

    Several ranks share the frames of each step, and `runs` must be one folder to all of them. The
    weights equal those of one process bit for bit. The first rank writes.

    Args:
        run: A folder of `run_ptq` or `run_qat`, with a head.
        source: Labelled frames to train on.
        config: Settings.
        resume: Continue from the checkpoint, or start where there is none.
        device: torch's name, such as "cpu" or "cuda".
        workers: Processes that prepare frames ahead; 0 prepares them in this process.
        cache: Folder of the prepared frames. Default: `runs/name.training/frames`.
        checkpoint_every: Steps between checkpoints.
        judge_by: Labelled frames for scores at the end; the page shows the first. Default: no
            scores, and the page shows the first training frame.
        cameras: Names of the cameras to use. Default: those of the run.
        **place: Where the new run is written; see `Place`. Overwriting an earlier run removes its
            checkpoint too.

    Raises:
        InputError: The run or the input is wrong, a loss is not finite, or a stop was requested;
            the message names the step.
    """
    if checkpoint_every < 1:
        raise InputError(f"--checkpoint-every {checkpoint_every}: it must be at least 1")
    start = read_trainable(run)
    target = usable_device(device)
    clock = Clock()
    with new_run("qat", clock, keep=run, **place) as record:
        work = record.path.with_name(f"{record.path.name}.training")
        checkpoint, overwrite = work / CHECKPOINT, place.get("overwrite", False)
        used = tuple(cameras or start.used_cameras)
        size, digest = cast("ConfigName", start.config), _digest(start.sha256)
        identity = identity_of(source, config, run=digest, cameras=", ".join(used))
        begun = begun_before(checkpoint, identity, "--name") if resume else None
        if checkpoint.is_file() and not (resume or overwrite):
            raise InputError(
                f"{checkpoint} is of a run that was stopped: go on with --resume, begin anew with "
                "--overwrite, or choose another --name"
            )
        with clock.step("load the run"):
            loaded = load_run(run)
        # As `train` prepares them: both can share a cache.
        branch = _sensors(start.parts) if start.model == "bevfusion" else "all"
        form = TrainConfig(model=start.model, config=size, branch=branch, cameras=used)
        ranks = current_ranks()
        ranks.goes_on(
            "run the same command with --resume, and it goes on from the last checkpoint, in "
            f"{work}"
        )
        with clock.step("prepare frames"):
            prepare = partial(
                prepare_frames, source, form, cache or work / "frames", workers=workers
            )
            frames = prepare() if ranks.first else None
            step = 0 if begun is None else begun.step
            ranks.agree("the state of the training", f"{identity}, after step {step}")
            frames = prepare() if frames is None else frames
        shown = source.open()[:1] if judge_by is None else judge_by.open()
        teacher = copy.deepcopy(loaded.float_model).to(target) if config.distill else None
        trainer = trainer_for(config, loaded.quantized_model.to(target), teacher, frames)
        if begun is None:
            trainer.survey()
        work.mkdir(parents=True, exist_ok=True)
        with clock.step("train"), refusing_divergence():
            losses, first = take_steps(
                trainer, checkpoint, identity, begun,
                steps=config.steps,
                every=checkpoint_every,
                title="qat",
                quiet=not ranks.first,
            )  # fmt: skip
        model = trainer.finish()
        training = {
            "run": str(run),
            "run_sha256": start.sha256,
            **identity,
            "device": device,
            "losses": [dict(zip(trainer.terms, part, strict=True)) for part in in_parts(losses)],
        }
        accuracy = write_run(
            record, loaded, model, training, clock, run=Path(run),
            cameras=used,
            shown=shown,
            evaluated=judge_by is not None,
        )  # fmt: skip
    if ranks.first:
        checkpoint.unlink(missing_ok=True)
        if not any(work.iterdir()):
            work.rmdir()
    return QatResult(
        record.path,
        work,
        trainer.terms,
        in_parts(losses),
        config.steps - first,
        clock.seconds(),
        accuracy,
    )


def _sensors(parts: Sequence[str]) -> TrainedBranch:
    """The name in `train` of a detector with the same sensors."""
    both = {"lidar", "camera"} <= set(parts)
    return "all" if both else "camera" if "camera" in parts else "lidar"


def _digest(sha256: Mapping[str, str]) -> str:
    return ", ".join(f"{name} {digest[:16]}" for name, digest in sha256.items())


def write_run(
    record: RunRecord,
    start: LoadedRun,
    model: Detector,
    training: dict[str, Any],
    clock: Clock,
    *,
    run: Path,
    cameras: Sequence[str],
    shown: Sequence[Frame],
    evaluated: bool,
) -> Accuracy | None:
    """Write the files of a `ptq` run, with summary, page and pictures; return the scores."""
    ran = start.settings
    # The float model in the page and in the folder is that of the run from which training started.
    batches = FrameBatches(shown, start.sizes, model, cameras)
    accuracy = None
    if evaluated:
        accumulator = accuracy_accumulator(batches)
        models = {"float": start.float_model, "quantized": model}
        with clock.step("judge by labels"):
            found = accumulate_models("held out", models, model, batches, accumulator)
            for _ in found:
                pass
            accuracy = accumulator.result()
    with clock.step("compare"):
        evaluation = evaluate_quantized(start.float_model, model, batches.head(1))
    if not current_ranks().first:
        return accuracy
    evaluated_run = EvaluatedRun(record, batches, evaluation, accuracy=accuracy)
    evaluated_run.draw(quantized_parts(ran.branch, ran.model)[-1])
    with clock.step("write"):
        plan = None if ran.plan is None else read_plan(run / PLAN_FILE)
        digests = save_model(record.folder, model, start.float_model, plan)
        record.write_settings(
            {**ran.written, "cameras": cameras, "sha256": digests, "qat": training}
        )
    settings = {
        key: value for key, value in training["settings"].items() if key not in ("run", "cameras")
    }
    evaluated_run.write_page({"trained from": training["run"], "weights": ran.weights, **settings})
    evaluated_run.write_summary({"branch": ran.branch, "qat": training, "accuracy": None})
    return accuracy
