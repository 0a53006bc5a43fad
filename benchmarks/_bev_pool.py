"""BEV pooling at nuScenes size against a plain index_add: time, peak memory, error.

    python benchmarks/_bev_pool.py [rounds]

Part of `python benchmarks/model.py`, which runs it last.

Six cameras × 118 depth bins × 32 × 88 pixels, 80 channels, into 360 × 360 cells. The peers pool
the same depth distribution and context: index_add needs their outer product in memory and
sends points outside to a cell of their own, both in the cheapest form; bev_pool starts from the
same product; lift_splat_pool from depth and context. Runs are interleaved on 2 threads; times are
medians. Peak memory is that of a fresh process above what it held before; error is the largest
difference from a float64 index_add, over that one's largest value.
"""

from __future__ import annotations

import math
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from bevfusion.model import CONFIGS
from bevfusion.model.camera import (
    DepthLSSTransform,
    PoolPlan,
    bev_pool,
    lift_splat_pool,
    make_pool_plan,
)

BINS, CHANNELS, CELLS = 118, 80, 360 * 360
HEADINGS = ((90, 1260), (35, 1260), (145, 1260), (-90, 800), (-160, 1260), (-20, 1260))  # °, px

Pool = Callable[[Tensor, Tensor], Tensor]


@dataclass(frozen=True)
class Row:
    """Milliseconds and peak MB of one peer, forward and with the backward pass."""

    name: str
    forward_ms: float
    both_ms: float
    forward_mb: float
    both_mb: float
    error: float


def frustum_cells() -> Tensor:
    """Six cameras as nuScenes mounts them: level, half a metre from the LiDAR, 0.3 m below it."""
    intrinsics, to_camera = np.zeros((2, 1, 6, 4, 4))
    for n, (degrees, focal) in enumerate(HEADINGS):
        angle = math.radians(degrees)
        forward = np.array([math.cos(angle), math.sin(angle), 0.0])
        right = np.array([forward[1], -forward[0], 0.0])
        rotation = np.stack([right, np.cross(forward, right), forward])
        to_camera[0, n, :3, :3] = rotation
        to_camera[0, n, :3, 3] = -rotation @ (0.5 * forward - [0.0, 0.0, 0.3])
        to_camera[0, n, 3, 3] = 1.0
        intrinsics[0, n, :3, :3] = [[focal, 0, 800], [0, focal, 450], [0, 0, 1]]
    image_aug = np.broadcast_to([[0.48, 0, -32], [0, 0.48, -176], [0, 0, 1]], (1, 6, 3, 3))
    transform = DepthLSSTransform(CONFIGS["nuscenes"].camera)
    matrices = (intrinsics[..., :3, :3], to_camera, image_aug)
    return transform.cells(*(torch.from_numpy(m.copy()) for m in matrices))


def inputs() -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(0)
    depth = torch.randn(6, BINS, 32, 88, generator=generator).softmax(1)
    context = torch.randn(6, CHANNELS, 32, 88, generator=generator)
    return depth, context


def outer(depth: Tensor, context: Tensor) -> Tensor:
    rows = context.permute(0, 2, 3, 1).contiguous()  # so that the product is laid out by points
    return (depth.unsqueeze(-1) * rows.unsqueeze(1)).view(-1, context.shape[1])


def index_add(rows: Tensor, target: Tensor) -> Tensor:
    return rows.new_zeros(CELLS + 1, rows.shape[1]).index_add(0, target, rows)[:CELLS]


def peers(cells: Tensor) -> dict[str, Pool]:
    target = torch.where(cells < 0, CELLS, cells)
    plan: PoolPlan = make_pool_plan(cells, CELLS)
    return {
        "outer product, index_add": lambda d, c: index_add(outer(d, c), target),
        "outer product, bev_pool": lambda d, c: bev_pool(outer(d, c), plan, CELLS),
        "lift_splat_pool": lambda d, c: lift_splat_pool(d, c, plan, CELLS),
    }


def run(pool: Pool, *, backward: bool) -> Tensor:
    depth, context = (t.requires_grad_(backward) for t in inputs_once)
    out = pool(depth, context)
    if backward:
        torch.autograd.grad(out, (depth, context), gradient_once)
    return out.detach()


def measure(rounds: int = 5) -> list[Row]:
    """All peers in turn, `rounds` times after one that is not timed; memory in processes apart."""
    cells = frustum_cells()
    pools = peers(cells)
    exact = sum(
        index_add(outer(d[None].double(), c[None].double()), t)
        for d, c, t in zip(
            *inputs_once, torch.where(cells < 0, CELLS, cells).view(6, -1), strict=True
        )
    )
    assert isinstance(exact, Tensor)
    times: dict[tuple[str, bool], list[float]] = {}
    errors: dict[str, float] = {}
    for number in range(rounds + 1):
        for name, pool in pools.items():
            for backward in (False, True):
                start = time.perf_counter()
                out = run(pool, backward=backward)
                elapsed = (time.perf_counter() - start) * 1e3
                if number:
                    times.setdefault((name, backward), []).append(elapsed)
                errors[name] = float((out - exact).abs().max() / exact.abs().max())
    return [
        Row(
            name,
            *(statistics.median(times[name, backward]) for backward in (False, True)),
            *(peak_mb(number, backward) for backward in (False, True)),
            errors[name],
        )
        for number, name in enumerate(pools)
    ]


def peak_mb(number: int, backward: bool) -> float:
    """Peak memory of one run in a process of its own, above what it held before the run."""
    if not Path("/proc/self/clear_refs").exists():
        return math.nan
    command = [sys.executable, __file__, "--memory", str(number), str(int(backward))]
    return float(subprocess.run(command, check=True, capture_output=True, text=True).stdout)


def print_own_peak(number: int, backward: bool) -> None:
    pool = list(peers(frustum_cells()).values())[number]
    small = torch.zeros(1, dtype=torch.int64)
    weight = torch.ones(1, 1, 1, 1, requires_grad=True)
    lift_splat_pool(weight, weight, small, 1).sum().backward()  # compiled kernels in memory
    Path("/proc/self/clear_refs").write_text("5")  # the peak starts anew
    before = peak_kb()
    run(pool, backward=backward)
    print((peak_kb() - before) / 1024)


def peak_kb() -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith("VmHWM"))


def print_table(rows: list[Row]) -> None:
    bar = rows[0]
    print("| | forward, ms | against index_add | with backward, ms | against index_add |"
          " peak MB, forward | with backward | max error |")  # fmt: skip
    print("|---|---:|---:|---:|---:|---:|---:|---:|")
    for row in rows:
        print(
            f"| {row.name} | {row.forward_ms:.0f} | {bar.forward_ms / row.forward_ms:.1f}× | "
            f"{row.both_ms:.0f} | {bar.both_ms / row.both_ms:.1f}× | {row.forward_mb:.0f} | "
            f"{row.both_mb:.0f} | {row.error:.1e} |"
        )


def print_once(label: str, act: Callable[[], object], rounds: int) -> None:
    times = []
    for _ in range(rounds + 1):
        start = time.perf_counter()
        act()
        times.append((time.perf_counter() - start) * 1e3)
    print(f"{label}: {statistics.median(times[1:]):.0f} ms")


inputs_once = inputs()
gradient_once = torch.randn(CELLS, CHANNELS, generator=torch.Generator().manual_seed(1))


def main() -> None:
    torch.set_num_threads(2)
    if sys.argv[1:2] == ["--memory"]:
        print_own_peak(int(sys.argv[2]), sys.argv[3] == "1")
        return
    rounds = int(sys.argv[1]) if len(sys.argv) > 1 else 5
    cells = frustum_cells()
    print(
        f"{cells.numel():,} points, {int((cells >= 0).sum()):,} of them in "
        f"{cells[cells >= 0].unique().numel():,} of {CELLS:,} cells, {CHANNELS} channels, torch "
        f"{torch.__version__}, 2 threads, medians of {rounds} interleaved runs\n"
    )
    print_table(measure(rounds))
    print("\nOnce per calibration:")
    print_once("cells", frustum_cells, rounds)
    print_once("plan", lambda: make_pool_plan(cells, CELLS), rounds)


if __name__ == "__main__":
    main()
