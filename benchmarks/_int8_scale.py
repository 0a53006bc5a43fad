"""Time and memory of the integer LiDAR encoder over frame and batch size.

Part of `python benchmarks/int8sim.py`. The cloud is a surface, z a smooth function of x and y with
a few voxels of roughness, of the same density everywhere: more voxels cover more ground, so that
each has as many neighbours in a large frame as in a small one. Every row is a process of its own;
memory is its peak above the imports.
"""

from __future__ import annotations

import json
import math
import sys

import numba  # noqa: F401  (counted with the imports)
import sparse_conv as float_bench
import torch
from _int8_encoder import random_encoder
from _int8_timing import MEMORY_IS_KNOWN, child, interleave, peak_mb
from torch import Tensor

FRAMES = (10_000, 80_000, 300_000, 1_000_000)
BATCHES = (1, 2, 4, 8)
_DENSITY = 0.5  # voxels per pillar


def cloud(voxels: int, batch: int) -> Tensor:
    """int32 ``[batch · voxels, 4]``: batch, x, y, z, no voxel twice.

    What the ground has no room for, at this density, lies on a second surface above it.
    """
    generator = torch.Generator().manual_seed(0)
    surfaces = math.ceil(voxels / (_DENSITY * float_bench.GRID[0] ** 2))
    side = min(math.ceil(math.sqrt(voxels / surfaces / _DENSITY)), float_bench.GRID[0])
    rows = []
    for b in range(batch):
        for surface in range(surfaces):
            count = voxels // surfaces + (surface < voxels % surfaces)
            pillars = torch.randperm(side * side, generator=generator)[:count].sort().values
            x, y = pillars // side, pillars % side
            height, relief = (18, 8) if surfaces == 1 else (10 + 19 * surface, 4)
            ground = height + relief * (torch.sin(x / 37 + b) + torch.cos(y / 53))
            z = (ground + torch.randint(0, 3, (count,), generator=generator)).long()
            rows.append(torch.stack([torch.full_like(x, b), x, y, z], 1))
    return torch.cat(rows).int()


def print_table(rounds: int) -> None:
    if not MEMORY_IS_KNOWN:
        print("scale skipped: this system does not tell a process its peak\n")
        return
    print("LiDAR encoder, int8, 2 threads, a rough surface of constant density\n")
    print("| voxels | batch | ms | best | best, µs a voxel | MB | bytes a voxel |")
    print("|---:|---:|---:|---:|---:|---:|---:|")
    for voxels, batch in (*((n, 1) for n in FRAMES), *((FRAMES[1], b) for b in BATCHES[1:])):
        seen = child("_int8_scale.py", str(voxels), str(batch), str(rounds))
        total = voxels * batch
        print(
            f"| {total:,} | {batch} | {seen['ms']:.1f} | {seen['best']:.1f} | "
            f"{seen['best'] * 1e3 / total:.2f} | {seen['mb']:.0f} | "
            f"{seen['mb'] * 2**20 / total:.0f} |"
        )
    print()


def measure(voxels: int, batch: int, rounds: int) -> dict[str, float]:
    torch.set_num_threads(2)
    before = peak_mb(lambda: None)
    indices, encoder = cloud(voxels, batch), random_encoder()
    q = torch.randint(-127, 128, (len(indices), 5), dtype=torch.int8)
    peaks = []

    def run() -> None:
        peaks.append(peak_mb(lambda: encoder(q, indices, "auto", batch)))

    ms, best = interleave({"": (2, run)}, rounds)[""]
    return {"ms": ms, "best": best, "mb": max(peaks) - before}


if __name__ == "__main__":
    with torch.no_grad():
        print(json.dumps(measure(*(int(v) for v in sys.argv[1:]))))
