"""How fast streets are made, and that making thousands needs no more memory than making one.

    python benchmarks/scenes.py [scenes]

Prints scenes per second of `street_frame` at `tiny` size with six cameras (one caller whose
pictures are rendered by one thread per processor, and callers in two threads of their own), the
resident memory after every fifth of the scenes, and the time of a scene at `nuscenes` size. The
first scene, which loads the kernels or compiles them, is not counted.
"""

from __future__ import annotations

import os
import statistics
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from bev_scenes import street_frame


def tiny(seed: int, threads: int | None = None) -> int:
    return len(street_frame(seed, size="tiny", cameras="tiny", threads=threads))


def resident() -> float:
    """MiB of memory that this process holds now."""
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE") / 2**20


def sustained(count: int) -> None:
    print(f"{'tiny scenes':<24}{'scenes/s':>10}{'CPU s/scene':>14}{'resident MiB':>15}")
    part = max(count // 5, 1)
    for first in range(0, part * 5, part):
        start, busy = time.perf_counter(), time.process_time()
        points = [tiny(seed) for seed in range(first, first + part)]
        seconds, busy = time.perf_counter() - start, time.process_time() - busy
        label = f"{first} to {first + part - 1}"
        print(f"{label:<24}{part / seconds:>10.1f}{busy / part:>14.3f}{resident():>15.0f}")
    print(f"(points per scene: median {statistics.median(points):.0f})")
    start, busy = time.perf_counter(), time.process_time()
    with ThreadPoolExecutor(2) as pool:
        list(pool.map(lambda seed: tiny(seed, 1), range(part * 2)))
    seconds, busy = time.perf_counter() - start, time.process_time() - busy
    row = f"{'two callers':<24}{2 * part / seconds:>10.1f}{busy / part / 2:>14.3f}"
    print(f"{row}{resident():>15.0f}")


def full_size() -> None:
    print(f"\n{'nuscenes size':<24}{'seconds':>10}")
    for label, cameras in (("LiDAR, ten sweeps", None), ("and six 1600x900", "nuscenes")):
        times = []
        for seed in range(3):
            start = time.perf_counter()
            street_frame(seed, cameras=cameras)
            times.append(time.perf_counter() - start)
        print(f"{label:<24}{statistics.median(times):>10.2f}")


if __name__ == "__main__":
    tiny(0)
    street_frame(0)
    sustained(int(sys.argv[1]) if len(sys.argv) > 1 else 300)
    full_size()
