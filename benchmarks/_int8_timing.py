"""Timing in turns, memory of this process, children that measure, and the machine's int8 peak.

Part of `python benchmarks/int8sim.py`.
"""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch

__all__ = ["MEMORY_IS_KNOWN", "Runs", "Times", "child", "interleave", "peak", "peak_mb"]

Runs = dict[str, tuple[int, Callable[[], Any]]]  # threads, what to run
Times = dict[str, tuple[float, float]]  # median and best milliseconds
MEMORY_IS_KNOWN = Path("/proc/self/clear_refs").exists()
_PAUSE = 0.005  # seconds; the threads of the one before have then gone to sleep


def interleave(runs: Runs, rounds: int) -> Times:
    """Median and best milliseconds of each, in turn, once untimed before."""
    times: dict[str, list[float]] = {name: [] for name in runs}
    usual = torch.get_num_threads()
    try:
        for number in range(rounds + 1):
            for name, (threads, run) in runs.items():
                torch.set_num_threads(threads)
                time.sleep(_PAUSE)
                start = time.perf_counter()
                run()
                if number:
                    times[name].append((time.perf_counter() - start) * 1e3)
    finally:
        torch.set_num_threads(usual)
    return {name: (statistics.median(t), min(t)) for name, t in times.items()}


def peak_mb(run: Callable[[], object]) -> float:
    """Peak of this process's resident memory during `run`, MB."""
    Path("/proc/self/clear_refs").write_text("5")  # the peak starts anew
    run()
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith("VmHWM")) / 1024


def child(script: str, *arguments: str, environment: Mapping[str, str] | None = None) -> Any:
    """What a script of this folder prints as JSON, in a process of its own."""
    command = [sys.executable, str(Path(__file__).with_name(script)), *arguments]
    done = subprocess.run(
        command, check=True, stdout=subprocess.PIPE, text=True,
        env=os.environ | (environment or {}),
    )  # fmt: skip
    return json.loads(done.stdout)


def peak(kind: str) -> Callable[[], float]:
    """GMAC of one call of the widest tile on operands that stay in the first cache.

    Each task stores to rows of its own: threads that write to one cache line wait for each other.
    """
    from bevquant_int8sim._compiled.grid import grid_calls, make_plan
    from bevquant_int8sim._compiled.launch import run_calls
    from bevquant_int8sim._compiled.packed import pack_weight

    depth, columns, outputs, shared = 512, 64, 120_000, 1_000
    packed = pack_weight(np.ones((1, depth, columns), np.int8), kind)
    x = np.ones((packed.rows, depth), np.int8)
    rows = np.arange(outputs) % packed.rows
    plan = make_plan(rows, np.arange(outputs) // shared, np.zeros(1), packed.rows)
    out = np.empty((outputs // shared, columns), np.int32)

    def run() -> float:
        run_calls(grid_calls(x, packed, None, plan, out))
        return outputs * depth * columns / 1e9

    return run
