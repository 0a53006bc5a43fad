"""Calibration in one process and in two, and its memory from 10 to 1,000 frames, in one run.

    python benchmarks/ranks.py [frames]

The tiny fused detector, its ranges searched by mse, on streets with six cameras that are read from
disk anew for every frame. Each process has one thread. The one-process run is what the two are
held against, in seconds and in the bits of every range; turns are taken, and the median stands.
Memory is the peak of a process of its own for each number of frames; beside it the prepared frames
that it has kept, up to a limit, which later steps of `ptq` use again. Nothing is asserted.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from _machine import print_machine

STREETS = 20
FRAMES = 60
ROUNDS = 3
MEMORY_FRAMES = (10, 100, 1000)
MIB = 2**20


class Repeated(Sequence[Any]):
    """The frames of a sequence again and again, read at each use."""

    def __init__(self, frames: Sequence[Any], count: int) -> None:
        self._frames, self._count = frames, count

    def __len__(self) -> int:
        return self._count

    def __getitem__(self, index: Any) -> Any:
        return self._frames[index % len(self._frames)]


def write_streets(folder: Path) -> None:
    """The frames on disk, as `--dataset files` reads them."""
    from bev_data.datasets import write_frame_folder
    from bev_scenes import street_frame

    for seed in range(STREETS):
        frame = street_frame(seed, size="tiny", cameras="tiny")
        write_frame_folder(folder / frame.name, frame)


def calibrate(folder: Path, count: int) -> dict[str, Any]:
    """Calibrate as one of the processes that the environment names; what it took."""
    from bevfusion.model import CONFIGS, build_model, load_weights, trained_weights
    from bevfusion_quant.datasets import open_dataset
    from bevfusion_quant.ptq import (
        FrameBatches,
        calibrate_branch,
        example_batch,
        fuse_branch,
        quantize_branch,
    )
    from bevfusion_quant.run._record import peak_memory_mib
    from bevquant_quantizers import named_quantizers
    from bevquant_quantizers.ranks import launched

    # torch.fx notes once that spconv's tensor class asks about tracing.
    logging.getLogger("torch.fx._symbolic_trace").setLevel(logging.ERROR)
    sizes, example = CONFIGS["tiny"], example_batch(CONFIGS["tiny"])
    with launched() as ranks:
        model = build_model(sizes)
        load_weights(model, trained_weights("tiny"))
        quantized = quantize_branch(fuse_branch(model, example).model, example, "all").model
        frames = open_dataset("files", sorted(folder.iterdir()))
        warm = FrameBatches(Repeated(frames, ranks.world), sizes, model)
        calibrate_branch(quantized, warm)
        before = peak_memory_mib()
        batches = FrameBatches(Repeated(frames, count), sizes, model)
        ranks.gather({ranks.rank: b"ready"})
        start = time.perf_counter()
        calibrate_branch(quantized, batches)
        seconds = time.perf_counter() - start
        ranges = hashlib.sha256()
        for entry in named_quantizers(quantized):
            if entry.quantizer.amax is not None:
                ranges.update(entry.quantizer.amax.numpy().tobytes())
    kept = sum(v.nbytes for batch in batches._kept.values() for v in batch if hasattr(v, "nbytes"))
    return {
        "seconds": seconds,
        "ranges": ranges.hexdigest(),
        "before": before,
        "peak": peak_memory_mib(),
        "kept": kept / MIB,
    }


def started(world: int, folder: Path, count: int) -> dict[str, Any]:
    """What the first of `world` processes found."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = str(free.getsockname()[1])
    place = {"WORLD_SIZE": str(world), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
    threads = {"OMP_NUM_THREADS": "1", "OMP_WAIT_POLICY": "PASSIVE", "NUMBA_NUM_THREADS": "1"}
    processes = [
        subprocess.Popen(
            [sys.executable, __file__, "--process", str(folder), str(count)],
            env=os.environ | threads | place | {"RANK": str(rank)},
            stdout=subprocess.PIPE,
            text=True,
        )
        for rank in range(world)
    ]
    answers = [process.communicate()[0] for process in processes]
    if any(process.returncode for process in processes):
        raise SystemExit("a process failed; its message is above")
    found: dict[str, Any] = json.loads(answers[0].splitlines()[-1])
    return found


def main() -> None:
    """Measure, and print two tables."""
    count = int(sys.argv[1]) if len(sys.argv) > 1 else FRAMES
    print_machine(peaks=False)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        write_streets(folder)
        found: dict[int, list[dict[str, Any]]] = {1: [], 2: []}
        for _ in range(ROUNDS):
            for world, runs in found.items():
                runs.append(started(world, folder, count))
        seconds = {
            w: statistics.median(run["seconds"] for run in runs) for w, runs in found.items()
        }
        same = len({run["ranges"] for runs in found.values() for run in runs}) == 1
        print(f"{count} frames; ranges of all runs equal: {same}\n")
        print("ranks    seconds   frames/s      ratio")
        for world, taken in seconds.items():
            print(f"{world:5} {taken:10.1f} {count / taken:10.2f} {seconds[1] / taken:9.2f}×")
        print("\nframes   before, MiB   peak, MiB   frames kept, MiB   the rest, MiB")
        for frames in MEMORY_FRAMES:
            run = started(1, folder, frames)
            rest = run["peak"] - run["kept"]
            print(
                f"{frames:6,} {run['before']:13,.0f} {run['peak']:11,.0f} {run['kept']:18,.0f} "
                f"{rest:15,.0f}"
            )


if __name__ == "__main__":
    if sys.argv[1:2] == ["--process"]:
        print(json.dumps(calibrate(Path(sys.argv[2]), int(sys.argv[3]))))
    else:
        main()
