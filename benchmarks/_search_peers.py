"""Ranges searched by the task's loss, beside `search_ranges`, which takes the output's error.

LAPQ (Nahshan et al. 2019, arXiv 1911.07190) chooses the steps by the loss of the task. Here the
search of bevquant_qnn runs with such a score: for each group of layers alone quantized, the
detector's training loss less that of the float model. Its targets are the labels or the boxes of
the float model.
"""

from __future__ import annotations

import copy
import math
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from _streets import made_run, streets
from torch import Tensor

import bevquant_qnn._search_ranges as search
from bev_data.metrics import Bootstrap, DetectionAccumulator, drawn_mean_ap, metrics_of
from bevfusion.detectors import DETECTORS
from bevfusion.evaluation import FrameBatches, detection_rules
from bevfusion.model import Detector, trained_weights
from bevfusion.quantization import search_detector, whole_output
from bevfusion.training import Targets, targets_of
from bevquant_qnn._scores import Score

SHIPPED: Mapping[str, dict[str, Any]] = {
    "tiny": {},
    "centerpoint-pillars-tiny": {"model": "centerpoint-pillars", "cameras": ()},
}
_LEAST_SCORE = 0.1  # of a float box that is a target


def loss_of(model: Detector, output: Any, targets: Targets) -> float:
    """The training loss of one frame."""
    objective = DETECTORS[model.kind].objective
    return float(objective.loss(output, [targets], model.head.config).total)


def targets_from(exact: Detector, batches: FrameBatches, index: int, kind: str) -> Targets:
    """Targets of a frame: its labels, or the boxes of the float model."""
    if kind == "labels":
        return targets_of(batches.frame_labels(index), exact.head.config)
    with torch.no_grad():
        found = batches.boxes(exact, exact(*batches[index]), batches[index])
    rows = found.scores >= _LEAST_SCORE
    return Targets(found.boxes[rows], found.velocities[rows], found.labels[rows])


def search_by_loss(
    model: Detector, exact: Detector, batches: FrameBatches, kind: str
) -> search.RangeSearch:
    """`search_ranges` by the loss, in place.

    Args:
        model: Calibrated.
        exact: The float model.
        batches: Frames to search on.
        kind: "labels" or "float", the source of the targets.
    """
    frames = [batches[i] for i in range(len(batches))]
    targets = [targets_from(exact, batches, i, kind) for i in range(len(batches))]

    def excess(output: Any, reference: Any, batch: Any) -> float:
        (at,) = (i for i, frame in enumerate(frames) if frame is batch)
        return loss_of(model, output, targets[at]) - loss_of(model, reference, targets[at])

    def decibel(values: Sequence[float]) -> float:
        mean = math.fsum(values) / len(values)
        # Below float's loss no logarithm orders the ranges, but less is still better.
        return min(90.0, -10 * math.log10(mean)) if mean > 0 else 90.0 - mean

    own, search.score_of = search.score_of, lambda *_: Score("loss", excess, decibel)
    try:
        return search.search_ranges(model, frames, forward=lambda net, batch: net(*batch))
    finally:
        search.score_of = own


SEARCHES = {
    "mse": "",
    "by the output": "output",
    "by the loss, float's boxes": "float",
    "by the loss, labels": "labels",
}


def compare_searches(folder: Path, first: int, count: int) -> None:
    """Print what each search changes, and its SQNR, loss and mAP on streets that none has seen.

    Args:
        folder: Of the runs, made where missing.
        first: Seed of the first street that judges.
        count: Streets that judge.
    """
    for name, settings in SHIPPED.items():
        run = made_run(folder, f"search-{name}", weights=trained_weights(name), **settings)
        exact, models = run.float_model, {}
        seen = FrameBatches(streets(5000, 2), run.sizes, exact)
        print(f"\n{name}, W8A8: searched groups, changed ranges, CPU seconds")
        for title, score in SEARCHES.items():
            model, start, found = copy.deepcopy(run.quantized_model), time.process_time(), None
            if score == "output":
                found = search_detector(model, seen)
            elif score:
                found = search_by_loss(model, exact, seen, score)
            rows = found.rows if found else ()
            factors = ", ".join(f"{row.factor:.2f}" for row in rows if row.factor != 1)
            seconds = time.process_time() - start
            print(f"{title:32} {len(rows):3} {seconds:7.1f}  times {factors or '1'}", flush=True)
            models[title] = model
        judge(models, exact, FrameBatches(streets(first, count), run.sizes, exact))


def judge(models: Mapping[str, Detector], exact: Detector, batches: FrameBatches) -> None:
    """Print a row for each model: fake-quantized beside float on the same streets."""
    everyone = {"float": exact, **models}
    maps: dict[str, Tensor] = {}
    for title, model in everyone.items():
        decoder = model.get_submodule(model.stages["decoder"])
        decoder.register_forward_hook(
            lambda m, a, out, t=title: maps.update({t: whole_output(out)})
        )
    rules, config = detection_rules(batches), exact.head.config
    scored = {title: DetectionAccumulator(config.classes, rules) for title in everyone}
    losses: dict[str, list[float]] = {title: [] for title in everyone}
    noise: dict[str, list[float]] = {title: [] for title in everyone}
    for index in range(len(batches)):
        batch, labels = batches[index], batches.frame_labels(index)
        for title, model in everyone.items():
            with torch.no_grad():
                output = model(*batch)
            losses[title].append(loss_of(model, output, targets_of(labels, config)))
            noise[title].append(float((maps[title] - maps["float"]).double().square().sum()))
            scored[title].add(batches.boxes(exact, output, batch), labels)
        noise["float"][-1] = float(maps["float"].double().square().sum())
    drawn = {title: drawn_mean_ap(found, Bootstrap()) for title, found in scored.items()}
    mean_ap = {title: metrics_of(found).mean_ap for title, found in scored.items()}
    print(
        f"{len(batches)} streets, float: loss {np.mean(losses['float']):.4f}, "
        f"mAP {100 * mean_ap['float']:.2f}; SQNR of the decoder's map; rest less float"
    )
    for title in models:
        decibel = 10 * math.log10(math.fsum(noise["float"]) / math.fsum(noise[title]))
        more = np.subtract(losses[title], losses["float"])
        width = 1.96 * more.std(ddof=1) / math.sqrt(len(more))
        low, high = np.nanpercentile(100 * (drawn[title] - drawn["float"]), [2.5, 97.5])
        print(
            f"{title:32} {decibel:5.1f} dB, loss {more.mean():+.4f} ± {width:.4f}, mAP "
            f"{100 * (mean_ap[title] - mean_ap['float']):+.2f} ({low:+.2f} to {high:+.2f})",
            flush=True,
        )
