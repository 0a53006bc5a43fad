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
from functools import cache
from multiprocessing import get_context
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from bev_data.metrics import Bootstrap, DetectionAccumulator, drawn_mean_ap, metrics_of
from bev_scenes import CONDITIONS, street_frame
from bevfusion.evaluation import detection_rules
from bevfusion.model import trained_weights
from bevfusion.quantization import measure_sensitivity
from bevfusion_quant.frames import FrameBatches
from bevfusion_quant.integer import lowered
from bevfusion_quant.options import PtqConfig
from bevfusion_quant.ptq import run_ptq
from bevfusion_quant.saved_run import LoadedRun, load_run
from bevquant_qnn import PrecisionPlan
from bevquant_quantizers.documents import sha256

ROUNDED = {"rounding": "gptq", "bias_correction": True}
W4A8 = {"weight_bits": 4, **ROUNDED}
FORMATS: dict[str, dict[str, Any]] = {
    "W8A8": {},
    "W8A8-unsigned": {"unsigned": True},
    "FP8": {"plan": "fp8"},
    "FP8-gptq": {"plan": "fp8", **ROUNDED},
    "W4A8": W4A8,
    "W4A8-head": {**W4A8, "quantize_head": True, "output_weight_bits": 4},
    "W4A8-last8": {**W4A8, "quantize_head": True},
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
        settings: Of `PtqConfig`; `plan` is the precision of all layers.

    Raises:
        ValueError: The run of this name has other weights.
    """
    digest, noted = sha256(settings["weights"]), folder / f"{name}.sha256"
    if not (folder / name).exists():
        if (precision := settings.pop("plan", None)) is not None:
            unrounded = settings | {"rounding": "nearest", "bias_correction": False}
            model = made_run(folder, f"{name}-int8", **unrounded).quantized_model
            settings["plan"] = folder / f"{name}.json"
            settings["plan"].write_text(PrecisionPlan.by_hand(model, {}, precision).to_json())
        folder.mkdir(parents=True, exist_ok=True)
        noted.write_text(digest)  # the run's own digests are those of folded weights
        config = PtqConfig(config="tiny", branch="all", **settings)
        run_ptq(streets(5000, 16), config, runs=folder, name=name)
    if not noted.is_file() or noted.read_text() != digest:
        raise ValueError(
            f"{folder / name} is a run of other weights than {settings['weights']}: name another "
            "folder, or remove the run"
        )
    return load_run(folder / name)


def run_of(folder: Path, number: int, weights: Path, name: str) -> LoadedRun:
    """The run of these weights in a format."""
    return made_run(folder, f"{name}-{number}", weights=weights, **FORMATS[name])


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
    folder: Path, weights: tuple[Path, ...], formats: tuple[str, ...]
) -> dict[tuple[int, str], tuple[LoadedRun, Any]]:
    """Runs and models by number of the weights and format; once a process."""
    models: dict[tuple[int, str], tuple[LoadedRun, Any]] = {}
    frames = streets(5000, 1)
    for number, file in enumerate(weights):
        for name in formats:
            run = run_of(folder, number, file, name)
            example = FrameBatches(frames, run.sizes, run.float_model)[0]
            models.setdefault((number, "float"), (run, run.float_model))
            models[number, name] = run, lowered(run.quantized_model, example, "auto")
    return models


def judged(
    folder: Path,
    weights: tuple[Path, ...],
    formats: tuple[str, ...],
    first: int,
    count: int,
    place: int,
) -> tuple[dict[tuple[int, str], Scores], float]:
    """Scores by model and format of the condition at `place`, and CPU seconds."""
    torch.set_num_threads(1)
    models = loaded(folder, weights, formats)
    start = time.process_time()
    run = next(iter(models.values()))[0]
    names = list(CONDITIONS)
    batches = FrameBatches(
        streets(first + place * count, count, names[place]), run.sizes, run.float_model
    )
    rules = detection_rules(batches)
    found = {key: DetectionAccumulator(run.sizes.head.classes, rules) for key in models}
    for index in range(len(batches)):
        batch, labels = batches[index], batches.frame_labels(index)
        assert labels is not None, "a generated street has labels"
        with torch.no_grad():
            for key, (run, model) in models.items():
                boxes = batches.boxes(run.float_model, model(*batch), batch)
                found[key].add(boxes, labels)
    scores = {}
    for key, accumulator in found.items():
        metrics = metrics_of(accumulator)
        drawn = drawn_mean_ap(accumulator, Bootstrap(seed=place))
        scores[key] = Scores(metrics.labels, metrics.mean_ap or math.nan, drawn)
    return scores, time.process_time() - start


def compare_streets(
    folder: Path,
    weights: Sequence[Path],
    formats: Sequence[str],
    first: int,
    count: int,
    conditions: Sequence[str],
) -> None:
    """Print a row for each condition, one for each model, and the mean over all.

    Args:
        folder: Where the runs are, or will be.
        weights: Files of trained weights; by default the package's.
        formats: Names of `FORMATS`.
        first: First seed.
        count: Streets of each condition; the next condition has the next ones.
        conditions: Names of `bev_scenes.CONDITIONS`; all by default.
    """
    weights = list(weights) or [trained_weights("tiny")]
    names = list(CONDITIONS)
    places = [names.index(name) for name in conditions or names]
    for number, file in enumerate(weights):  # made once, before several processes read them
        for name in formats:
            run_of(folder, number, file, name)
    print(
        f"\n{len(places) * count} streets, {count} of each condition from {first} on, "
        f"{len(weights)} models; points of mAP less float in integers, 95 % intervals"
    )
    print(f"{'':14} {'labels':>7} {'float':>7} " + "".join(f"{name:>26}" for name in formats))
    workers = min(len(os.sched_getaffinity(0)), len(places))
    start = time.perf_counter()
    with ProcessPoolExecutor(workers, get_context("spawn")) as pool:
        jobs = [
            pool.submit(judged, folder, tuple(weights), tuple(formats), first, count, place)
            for place in places
        ]
        results = [job.result() for job in jobs]
    tables = [scores for scores, _ in results]
    numbers = range(len(weights))
    for place, table in zip(places, tables, strict=True):
        print(row(names[place], [table], numbers, formats))
    for number in numbers if len(weights) > 1 else ():
        print(row(f"model {number}", tables, [number], formats))
    print(row("all", tables, numbers, formats))
    cpu = sum(seconds for _, seconds in results)
    print(f"{time.perf_counter() - start:.0f} seconds, {cpu:.0f} of the CPU, {workers} processes")


def row(
    title: str,
    tables: Sequence[Mapping[tuple[int, str], Scores]],
    numbers: Iterable[int],
    formats: Iterable[str],
) -> str:
    """Mean over conditions and models; its interval from the means of the draws."""
    exact = [table[number, "float"] for table in tables for number in numbers]
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
