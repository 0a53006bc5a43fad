"""Detectors on generated streets: mAP less float by format, condition and model; sensitivity.

Ranges come from clear streets alone, which are not judged. A condition is a stratum of the
bootstrap: its streets are drawn with replacement, the same for all models and formats, and no
street is in two conditions. A figure over several models or conditions is the mean of theirs in
each draw, so its interval counts that the models have seen the same streets.
"""

from __future__ import annotations

import math
import os
import time
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import replace
from functools import cache
from multiprocessing import get_context
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from safetensors.torch import load_model, save_model

from bev_data.metrics import Bootstrap, DetectionAccumulator, drawn_mean_ap, metrics_of
from bev_scenes import CONDITIONS, street_frame
from bevfusion.evaluation import detection_rules
from bevfusion.model import trained_weights
from bevfusion.quantization import measure_sensitivity
from bevfusion.training import prepare_frames
from bevfusion_quant.frames import FrameBatches, training_frames
from bevfusion_quant.integer import lowered
from bevfusion_quant.options import FrameOptions, PtqConfig
from bevfusion_quant.ptq import run_ptq
from bevfusion_quant.qat import QatConfig, run_qat, trainer_for
from bevfusion_quant.saved_run import LoadedRun, load_run
from bevfusion_quant.sensitivity import run_sensitivity
from bevfusion_quant.train import TrainConfig
from bevquant_qnn import PrecisionPlan, weighted_layers
from bevquant_quantizers import named_quantizers
from bevquant_quantizers.documents import sha256

ROUNDED = {"rounding": "gptq", "bias_correction": True}
TRAINING = training_frames(FrameOptions(dataset="street"), size="tiny", with_cameras=True)
W4A8 = {"weight_bits": 4, **ROUNDED}
# First layers and the layers that compute the head's outputs keep 8 bits.
ENDS = (
    "encoders.camera.backbone.conv1",
    "encoders.camera.vtransform.dtransform.0",
    "heads.object.heatmap_head.1",
    *(
        f"heads.object.prediction_heads.0.{name}.1"
        for name in ("center", "height", "dim", "rot", "vel", "heatmap")
    ),
)
FORMATS: dict[str, dict[str, Any]] = {
    "W8A8": {},
    "W8A8-1": {"frames": 1},
    "W8A8-4": {"frames": 4},
    "W8A8-64": {"frames": 64},
    "W8A8-unsigned": {"unsigned": True},
    "FP8": {"plan": "fp8"},
    "FP8-bias": {"plan": "fp8", "bias_correction": True},
    "FP8-gptq": {"plan": "fp8", **ROUNDED},
    "FP8-mixed": {"plan": "fp8", "budget": "time=1.2", "bias_correction": True},
    "FP8-int8": {"plan": "fp8", "sparse": "int8", "budget": "time=1.2", "bias_correction": True},
    "W4A8": W4A8,
    "W4A8-head": {**W4A8, "quantize_head": True, "output_weight_bits": 4},
    "W4A8-last8": {**W4A8, "quantize_head": True},
    "W4A4": {"plan": "w4a4", "unsigned": True, "quantize_head": True},
    "W4A4-qat": {"trained_from": "W4A4", "training": {"steps": 400}},
    "W8A8-qat": {"trained_from": "W8A8"},
    "W8A8-qat-follow": {
        "trained_from": "W8A8",
        "training": {"learn_ranges": False, "distill": 0.0},
    },
    "W8A8-float": {"trained_from": "W8A8", "rounds": False},
}


def streets(first: int, count: int, conditions: str = "clear") -> list[Any]:
    """Frames of consecutive seeds."""
    seeds = range(first, first + count)
    return [street_frame(s, size="tiny", cameras="tiny", conditions=conditions) for s in seeds]


def made_run(folder: Path, name: str, **settings: Any) -> LoadedRun:
    """The run of this name, made if the folder has none.

    Args:
        folder: Of the runs.
        name: Of the run.
        settings: Of `PtqConfig`; `frames` is the number of streets for the ranges, `plan` the
            precision of all layers, or with `budget` of those that `run_sensitivity` does not leave
            in float; `sparse` that of sparse convolutions.

    Raises:
        ValueError: The run of this name has other weights.
    """
    count = settings.pop("frames", 16)
    digest, noted = sha256(settings["weights"]), folder / f"{name}.sha256"
    if not (folder / name).exists():
        if (precision := settings.pop("plan", None)) is not None:
            budget, sparse = settings.pop("budget", None), settings.pop("sparse", None)
            unrounded = settings | {"rounding": "nearest", "bias_correction": False}
            model = made_run(folder, f"{name}-int8", **unrounded).quantized_model
            if budget is None:
                settings["plan"] = folder / f"{name}.json"
                ends = dict.fromkeys(ENDS if precision == "w4a4" else (), "int8")
                plan = PrecisionPlan.by_hand(model, ends, precision)
                settings["plan"].write_text(plan.to_json())
            else:
                settings["plan"] = folder / f"{name}-plan" / "plan.json"
                run_sensitivity(
                    folder / f"{name}-int8", streets(5000, 4), precisions=(precision,),
                    sparse_precisions=(sparse,) if sparse else (), budget=budget,
                    runs=folder, name=f"{name}-plan", overwrite=True,
                )  # fmt: skip
        folder.mkdir(parents=True, exist_ok=True)
        noted.write_text(digest)  # the run's own digests are those of folded weights
        config = PtqConfig(config="tiny", branch="all", **settings)
        run_ptq(streets(5000, count), config, runs=folder, name=name)
    if not noted.is_file() or noted.read_text() != digest:
        raise ValueError(
            f"{folder / name} is a run of other weights than {settings['weights']}: name another "
            "folder, or remove the run"
        )
    return load_run(folder / name)


def run_of(folder: Path, number: int, weights: Path, name: str, seed: int = 0) -> LoadedRun:
    """The run of these weights in a format, trained with this seed if the format is trained."""
    settings = FORMATS[name]
    if (start := settings.get("trained_from")) is None:
        return made_run(folder, f"{name}-{number}", weights=weights, **settings)
    run, trained = run_of(folder, number, weights, start), f"{name}-{number}-{seed}"
    if not settings.get("rounds", True):
        train_without_rounding(run, folder, trained, QatConfig(seed=seed))
        return run
    if not (folder / trained).exists():
        config = QatConfig(seed=seed, **settings.get("training", {}))
        run_qat(
            folder / f"{start}-{number}", TRAINING, config,
            runs=folder, name=trained, cache=folder / "frames",
        )  # fmt: skip
    return load_run(folder / trained)


def train_without_rounding(run: LoadedRun, folder: Path, name: str, config: QatConfig) -> None:
    """Train the layers that `run_qat` trains, in the same way but in float, as a control.

    Args:
        run: Its quantized model becomes the trained float model.
        folder: Of the trained weights, made if the folder has none, and of the prepared frames.
        name: Of the trained weights.
        config: As for `run_qat`.
    """
    model, file = run.quantized_model, folder / f"{name}.safetensors"
    model.requires_grad_(False)
    for layer in weighted_layers(model):
        layer.requires_grad_(True)
    for entry in named_quantizers(model):
        entry.quantizer.disable()
    if not file.exists():
        form = TrainConfig(cameras=run.settings.used_cameras)
        frames = prepare_frames(TRAINING, form, folder / "frames")
        config = replace(config, train_float=True, freeze_after=0, learn_ranges=False, distill=0.0)
        trainer = trainer_for(config, model, None, frames)
        for step in range(config.steps):
            trainer.step(step)
        save_model(trainer.finish(), str(file))
    load_model(model, file)


def compare_ranks(folder: Path) -> None:
    """Print Spearman's ρ of estimated and measured SQNR of each group of layers alone."""
    print("\nsensitivity on two streets: groups of layers, SQNR, ρ of estimate, CPU seconds")
    pillars = {"model": "centerpoint-pillars", "cameras": ()}
    shipped: dict[str, dict[str, Any]] = {
        "W8A8": {"weights": trained_weights("tiny")},
        "pillars": {**pillars, "weights": trained_weights("centerpoint-pillars-tiny")},
    }
    for name, settings in shipped.items():
        run = made_run(folder, name, **settings)
        model = run.quantized_model
        batches = FrameBatches(streets(100, 2), run.sizes, model)
        tables, seconds = [], []
        for estimate in (False, True):
            start = time.process_time()
            tables.append(measure_sensitivity(model, batches, without=False, estimate=estimate))
            seconds.append(time.process_time() - start)
        scores = [row.alone["int8"] for row in tables[0]]
        print(
            f"{name:10} {len(scores)} groups of {min(scores):.0f} to {max(scores):.0f} dB, "
            f"ρ = {tables[0].rank_correlation(tables[1]):.3f}; {seconds[0]:.1f} measured, "
            f"{seconds[1]:.1f} estimated",
            flush=True,
        )


class Scores(NamedTuple):
    """Mean average precision of one model on one condition: on all streets, and in each draw."""

    labels: int
    mean_ap: float
    drawn: NDArray[np.float64]


@cache
def loaded(
    folder: Path, weights: tuple[Path, ...], formats: tuple[str, ...], seeds: tuple[int, ...]
) -> dict[tuple[int, str], tuple[LoadedRun, Any]]:
    """Runs and models by number and format; once a process.

    Numbers count weights, and of each its seeds of training. What is not trained has one model for
    all seeds.
    """
    models: dict[tuple[int, str], tuple[LoadedRun, Any]] = {}
    frames = streets(5000, 1)
    for number, (place, file, seed) in enumerate(variants(weights, seeds)):
        first = place * len(seeds)
        for name in formats:
            if "trained_from" not in FORMATS[name] and number > first:
                models[number, name] = models[first, name]
                continue
            run = run_of(folder, place, file, name, seed)
            model = run.quantized_model
            if FORMATS[name].get("rounds", True):
                example = FrameBatches(frames, run.sizes, run.float_model)[0]
                model = lowered(model, example, "auto")
            models[number, name] = run, model
            models.setdefault((first, "float"), (run, run.float_model))
        models[number, "float"] = models[first, "float"]
    return models


def variants(weights: Iterable[Path], seeds: Sequence[int]) -> list[tuple[int, Path, int]]:
    """Number of the weights, their file, and a seed of training, for each pair."""
    return [(place, file, seed) for place, file in enumerate(weights) for seed in seeds]


def judged(
    folder: Path,
    weights: tuple[Path, ...],
    formats: tuple[str, ...],
    seeds: tuple[int, ...],
    first: int,
    count: int,
    place: int,
) -> tuple[dict[tuple[int, str], Scores], float]:
    """Scores by model and format of the condition at `place`, and CPU seconds."""
    torch.set_num_threads(1)
    models = loaded(folder, weights, formats, seeds)
    start = time.process_time()
    run = next(iter(models.values()))[0]
    names = list(CONDITIONS)
    batches = FrameBatches(
        streets(first + place * count, count, names[place]), run.sizes, run.float_model
    )
    rules = detection_rules(batches)
    distinct = {id(model): (run, model) for run, model in models.values()}
    found = {key: DetectionAccumulator(run.sizes.head.classes, rules) for key in distinct}
    for index in range(len(batches)):
        batch, labels = batches[index], batches.frame_labels(index)
        assert labels is not None, "a generated street has labels"
        with torch.no_grad():
            for key, (run, model) in distinct.items():
                boxes = batches.boxes(run.float_model, model(*batch), batch)
                found[key].add(boxes, labels)
    scores = {}
    for key, accumulator in found.items():
        metrics = metrics_of(accumulator)
        drawn = drawn_mean_ap(accumulator, Bootstrap(seed=place))
        scores[key] = Scores(metrics.labels, metrics.mean_ap or math.nan, drawn)
    by_model = {key: scores[id(model)] for key, (_, model) in models.items()}
    return by_model, time.process_time() - start


def compare_streets(
    folder: Path,
    weights: Sequence[Path],
    formats: Sequence[str],
    seeds: Sequence[int],
    first: int,
    count: int,
    conditions: Sequence[str],
) -> None:
    """Print a row for each condition, one for each model, and the mean over all.

    Args:
        folder: Where the runs are, or will be.
        weights: Files of trained weights; by default the package's.
        formats: Names of `FORMATS`.
        seeds: Of the training, for formats that are trained; each gives a model.
        first: First seed.
        count: Streets of each condition; the next condition has the next ones.
        conditions: Names of `bev_scenes.CONDITIONS`; all by default.
    """
    weights = list(weights) or [trained_weights("tiny")]
    names = list(CONDITIONS)
    places = [names.index(name) for name in conditions or names]
    models = variants(weights, seeds)
    for number, file, seed in models:  # made once, before several processes read them
        for name in formats:
            run_of(folder, number, file, name, seed)
    print(
        f"\n{len(places) * count} streets, {count} of each condition from {first} on, "
        f"{len(models)} models; points of mAP less float in integers, 95 % intervals"
    )
    print(f"{'':14} {'labels':>7} {'float':>7} " + "".join(f"{name:>26}" for name in formats))
    workers = min(len(os.sched_getaffinity(0)), len(places))
    start = time.perf_counter()
    with ProcessPoolExecutor(workers, get_context("spawn")) as pool:
        jobs = [
            pool.submit(
                judged, folder, tuple(weights), tuple(formats), tuple(seeds), first, count, place
            )
            for place in places
        ]
        results = [job.result() for job in jobs]
    tables = [scores for scores, _ in results]
    numbers = range(len(models))
    for place, table in zip(places, tables, strict=True):
        print(row(names[place], [table], numbers, formats))
    for number in numbers if len(models) > 1 else ():
        print(row(f"model {number}", tables, [number], formats))
    print(row("all", tables, numbers, formats))
    if {"W8A8-qat", "W8A8-float"} <= set(formats):
        print(row("qat less float", tables, numbers, ["W8A8-qat"], "W8A8-float"))
    cpu = sum(seconds for _, seconds in results)
    print(f"{time.perf_counter() - start:.0f} seconds, {cpu:.0f} of the CPU, {workers} processes")


def row(
    title: str,
    tables: Sequence[Mapping[tuple[int, str], Scores]],
    numbers: Iterable[int],
    formats: Iterable[str],
    base: str = "float",
) -> str:
    """Mean over conditions and models, less `base`; its interval from the means of the draws."""
    exact = [table[number, base] for table in tables for number in numbers]
    labels = sum(next(iter(table.values())).labels for table in tables)
    cells = []
    for name in formats:
        others = [table[number, name] for table in tables for number in numbers]
        pairs = list(zip(others, exact, strict=True))
        gap = 100 * np.mean([other.mean_ap - one.mean_ap for other, one in pairs])
        drawn = 100 * np.mean([other.drawn - one.drawn for other, one in pairs], axis=0)
        low, high = np.nanpercentile(drawn, [2.5, 97.5])
        cells.append(f"{f'{gap:+.2f} ({low:+.2f} to {high:+.2f})':>26}")
    whole = 100 * np.mean([one.mean_ap for one in exact])
    return f"{title:14} {labels:7,} {whole:7.2f} {''.join(cells)}"
