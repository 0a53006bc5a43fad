"""A LiDAR detector on the labels of one PandaSet sequence, cross-validated over blocks of time.

Each block of consecutive frames is judged by a detector that was trained and calibrated on the
others. Frames of one drive show the same parked cars, so intervals over frames are too narrow.
"""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from functools import partial
from multiprocessing import get_context
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from _streets import W4A8

from bev_data.datasets import open_dataset
from bev_data.metrics import (
    Bootstrap,
    DetectionAccumulator,
    DetectionRules,
    drawn_mean_ap,
    metrics_of,
)
from bev_data.points import Labels
from bevfusion.evaluation import detection_rules
from bevfusion.training import FrameSource
from bevfusion_quant.frames import FrameBatches
from bevfusion_quant.integer import lowered
from bevfusion_quant.options import PtqConfig
from bevfusion_quant.ptq import run_ptq
from bevfusion_quant.saved_run import load_run
from bevfusion_quant.train import WEIGHTS, TrainConfig, run_train

FORMATS: dict[str, dict[str, Any]] = {"W8A8": {}, "W4A8": W4A8}
BLOCKS, STEPS = 4, 600


def of_blocks(data: Path, block: int, *, inside: bool) -> Sequence[Any]:
    """The frames of a block, or those of all others."""
    frames = open_dataset("pandaset", data, cameras="none")
    held = np.array_split(np.arange(len(frames)), BLOCKS)[block]
    return [frames[i] for i in range(len(frames)) if (i in held) == inside]


class Found(NamedTuple):
    """Labels and detections by model of each frame of a block."""

    classes: tuple[str, ...]
    rules: DetectionRules
    frames: list[tuple[Labels, dict[str, Any]]]


def judged(folder: Path, data: Path, block: int) -> Found:
    """What the models find that were trained and quantized on the other blocks."""
    torch.set_num_threads(1)
    others = partial(of_blocks, data, block, inside=False)
    trained = folder / f"block{block}"
    if not (trained / WEIGHTS).exists():
        config = TrainConfig(config="tiny", branch="lidar", steps=STEPS, batch=2, cameras=())
        source = FrameSource(f"{data.name} without block {block} of {BLOCKS}", others)
        run_train(source, config, trained, resume=True, workers=0)
    models: dict[str, Any] = {}
    for name, settings in FORMATS.items():
        if not (folder / f"{name}-{block}").exists():
            ptq = PtqConfig(
                config="tiny", branch="lidar-detector", weights=trained / WEIGHTS, **settings
            )
            run_ptq(others(), ptq, runs=folder, name=f"{name}-{block}")
        run = load_run(folder / f"{name}-{block}")
        models["float"] = run.float_model
        example = FrameBatches(others()[:1], run.sizes, run.float_model)[0]
        models[name] = lowered(run.quantized_model, example, "auto")
    batches = FrameBatches(of_blocks(data, block, inside=True), run.sizes, run.float_model)
    frames = []
    for index in range(len(batches)):
        batch, labels = batches[index], batches.frame_labels(index)
        assert labels is not None, "frames of PandaSet have labels"
        with torch.no_grad():
            boxes = {
                name: batches.boxes(run.float_model, model(*batch), batch)
                for name, model in models.items()
            }
        frames.append((labels, boxes))
    return Found(run.sizes.head.classes, detection_rules(batches), frames)


def cross_validate(folder: Path, data: Path) -> None:
    """Print mAP of float, and of integers less float with 95 % intervals over the frames.

    Args:
        folder: Where weights and runs are, or will be.
        data: The folder of a PandaSet sequence in compact form.
    """
    folder.mkdir(parents=True, exist_ok=True)
    with ProcessPoolExecutor(2, get_context("spawn")) as pool:
        jobs = [pool.submit(judged, folder, data, block) for block in range(BLOCKS)]
        blocks = [job.result() for job in jobs]
    frames = [frame for block in blocks for frame in block.frames]
    first = blocks[0]
    found = {name: DetectionAccumulator(first.classes, first.rules) for name in ("float", *FORMATS)}
    for labels, boxes in frames:
        for name, accumulator in found.items():
            accumulator.add(boxes[name], labels)
    exact, metrics = drawn_mean_ap(found["float"], Bootstrap()), metrics_of(found["float"])
    low, high = np.nanpercentile(100 * exact, [2.5, 97.5])
    print(
        f"\n{data.name}: {len(frames)} frames, {metrics.labels} labels, {BLOCKS} blocks; float "
        f"{100 * (metrics.mean_ap or 0):.2f} ({low:.2f} to {high:.2f})"
    )
    for name in FORMATS:
        gap = 100 * ((metrics_of(found[name]).mean_ap or 0) - (metrics.mean_ap or 0))
        apart = 100 * (drawn_mean_ap(found[name], Bootstrap()) - exact)
        low, high = np.nanpercentile(apart, [2.5, 97.5])
        print(f"{name}: {gap:+.2f} ({low:+.2f} to {high:+.2f})")
