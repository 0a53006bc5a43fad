"""BEVFusion stage by stage: time and peak memory in float and fake-quantized; then BEV pooling.

    python benchmarks/model.py [--config tiny] [--rounds N]

One street frame (six cameras, ten LiDAR sweeps) goes through the folded float model and through
the one quantized as NVIDIA does (everything but the head; ranges are maxima of that frame). Runs
are interleaved on 2 threads; times are medians of single stages and of whole forwards. Peak memory
of a stage is that of a fresh process while the stage runs, above what the process held before it.
The pooling of camera features, at `nuscenes` size, is then held against a plain index_add.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import _bev_pool
import torch
from _machine import print_machine
from torch import nn

from bev_scenes import street_frame
from bevfusion.model import CONFIGS, Batch, BEVFusion, build_model, random_weights
from bevfusion_quant.ptq import (
    FrameBatches,
    calibrate_branch,
    example_batch,
    fuse_branch,
    quantize_branch,
)

STAGES = {
    "encoders.camera.backbone": "camera: ResNet",
    "encoders.camera.neck": "camera: FPN",
    "encoders.camera.vtransform": "camera: view transform",
    "encoders.lidar.backbone": "LiDAR: sparse encoder",
    "fuser": "fuser",
    "decoder.backbone": "decoder: SECOND",
    "decoder.neck": "decoder: FPN",
    "heads.object": "head (float in both)",
}
KINDS = ("float", "fake-quant")
WHOLE = ""
Around = Callable[[str], tuple[Callable[[], None], Callable[[], None]]]


def models(config: str) -> tuple[dict[str, BEVFusion], Batch]:
    sizes = CONFIGS[config]
    model = build_model(sizes)
    batches = FrameBatches([street_frame(0, size=config, cameras=config)], sizes, model)
    batch = batches[0]
    random_weights(model, *batch, seed=0)
    example = example_batch(sizes)
    fused = fuse_branch(model, example).model
    quantized = quantize_branch(fused, example, "all", method="max").model
    calibrate_branch(quantized, [batch], method="max")
    return dict(zip(KINDS, (fused, quantized), strict=True)), batch


def forward(model: BEVFusion, batch: Batch, around: Around) -> None:
    """One forward pass with `around(stage)` = (before, after) called at each stage."""
    with ExitStack() as stack, torch.no_grad():
        for path in STAGES:
            before, after = around(path)
            stage: nn.Module = model.get_submodule(path)

            def enter(_module: nn.Module, _args: Any, act: Callable[[], None] = before) -> None:
                act()

            def leave(_m: nn.Module, _a: Any, _out: Any, act: Callable[[], None] = after) -> None:
                act()

            stack.callback(stage.register_forward_pre_hook(enter).remove)
            stack.callback(stage.register_forward_hook(leave).remove)
        before, after = around(WHOLE)
        before()
        model(*batch)
        after()


def times(config: str, rounds: int) -> dict[tuple[str, str], float]:
    """Median milliseconds by kind and stage."""
    both, batch = models(config)
    taken: dict[tuple[str, str], list[float]] = {}
    for number in range(rounds + 1):
        for kind, model in both.items():
            started: dict[str, float] = {}

            def around(stage: str, kind: str = kind, started: dict[str, float] = started) -> Any:
                def before() -> None:
                    started[stage] = time.perf_counter()

                def after() -> None:
                    elapsed = (time.perf_counter() - started[stage]) * 1e3
                    if number:  # noqa: B023 (called within this round)
                        taken.setdefault((kind, stage), []).append(elapsed)

                return before, after

            forward(model, batch, around)
    return {key: statistics.median(values) for key, values in taken.items()}


def print_own_peaks(config: str, kind: str) -> None:
    """Peak MB of each stage above what was held before it, after one pass that warms up."""
    both, batch = models(config)
    peaks: dict[str, float] = {}
    whole_before = 0

    def around(stage: str) -> Any:
        held: list[int] = []

        def before() -> None:
            nonlocal whole_before
            Path("/proc/self/clear_refs").write_text("5")  # the peak starts anew
            held.append(_bev_pool.peak_kb())
            if stage == WHOLE:
                whole_before = held[0]

        def after() -> None:
            if stage == WHOLE:
                return
            peak = _bev_pool.peak_kb()
            peaks[stage] = (peak - held.pop()) / 1024
            peaks[WHOLE] = max(peaks.get(WHOLE, 0.0), (peak - whole_before) / 1024)

        return before, after

    for _ in range(2):
        peaks.clear()
        forward(both[kind], batch, around)
    print(json.dumps(peaks))


def memory(config: str, kind: str) -> dict[str, float]:
    if not Path("/proc/self/clear_refs").exists():
        return {}
    command = [sys.executable, __file__, "--config", config, "--memory", kind]
    # Memory that is freed goes back to the system at once; otherwise stages reuse it unseen.
    environment = os.environ | {"MALLOC_MMAP_THRESHOLD_": "65536", "MALLOC_TRIM_THRESHOLD_": "0"}
    run = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True, env=environment)
    peaks: dict[str, float] = json.loads(run.stdout)
    return peaks


def print_table(config: str, rounds: int) -> None:
    taken = times(config, rounds)
    peaks = {kind: memory(config, kind) for kind in KINDS}
    print_machine()
    print(
        f"`{config}`, 2 threads, medians of {rounds} interleaved runs\n\n"
        "| stage | float, ms | fake-quant, ms | ratio | float, peak MB | fake-quant, peak MB |\n"
        "|---|---:|---:|---:|---:|---:|"
    )
    for stage, title in {**STAGES, WHOLE: "**whole forward**"}.items():
        plain, quantized = (taken[kind, stage] for kind in KINDS)
        megabytes = " | ".join(
            f"{peaks[kind][stage]:.0f}" if stage in peaks[kind] else "–" for kind in KINDS
        )
        print(
            f"| {title} | {plain:.0f} | {quantized:.0f} | {quantized / plain:.2f} | {megabytes} |"
        )


def main() -> None:
    parser = argparse.ArgumentParser(description="BEVFusion stage by stage")
    parser.add_argument("--config", choices=sorted(CONFIGS), default="nuscenes")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--memory", choices=KINDS, help=argparse.SUPPRESS)
    options = parser.parse_args()
    torch.set_num_threads(2)
    if options.memory:
        print_own_peaks(options.config, options.memory)
        return
    print_table(options.config, options.rounds)
    if options.config == "nuscenes":
        print("\nBEV pooling\n")
        rows = _bev_pool.measure(options.rounds)
        _bev_pool.print_table(rows)


if __name__ == "__main__":
    main()
