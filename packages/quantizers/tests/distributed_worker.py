"""One of the processes that test_distributed.py starts; writes what it found as JSON."""

from __future__ import annotations

import atexit
import gc
import json
import shutil
import sys
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist

sys.path.insert(0, str(Path(__file__).parent))
from calibration_cases import Block, make_batches, outcome

from bevquant_quantizers import PeerError, all_merge, calib, calibrate

atexit.register(gc.freeze)  # torch is not searched for garbage at the end: a tenth of the CPU time


class Killed(BaseException):
    """Ends a run as a signal would: nobody is told."""


def whole(iterate, method):
    model = Block()
    batches = iter(make_batches()) if iterate else make_batches()
    return outcome(model, calibrate(model, batches, method=method))


def resumed(folder, rank, behind):
    """Both processes die in the third round; one of them had last saved after the first."""
    path = folder / f"collected-{behind}.npz"
    own = path.with_name(f"{path.name}.{rank}-of-2")
    calls = 0

    def dies(model, batch):
        nonlocal calls
        calls += 1
        if len(batch) == len(make_batches()[4 + rank]):
            raise Killed
        model(batch)

    class Kept(list):
        def __getitem__(self, i):
            if i == 2 + rank and rank == behind:
                shutil.copy(own, folder / "earlier.npz")
            return super().__getitem__(i)

    try:
        calibrate(Block(), Kept(make_batches()), dies, resume=path)
    except Killed:
        if rank == behind:
            shutil.copy(folder / "earlier.npz", own)
    dist.barrier()
    model = Block()
    return outcome(model, calibrate(model, make_batches(), resume=path))


def failing(rank):
    def fails(model, batch):
        if rank == 1:
            raise ValueError("a bad frame")
        model(batch)

    try:
        calibrate(Block(), make_batches(), fails)
    except (ValueError, PeerError) as error:
        return f"{type(error).__name__}: {error}"


def unequal(rank):
    try:
        calibrate(Block(), make_batches(7 - 2 * rank))
    except (ValueError, PeerError) as error:
        return f"{type(error).__name__}: {error}"


def merged(rank):
    largest = calib.MaxCalibrator(8, None, False)
    largest.collect(torch.tensor([1.0 + rank, -0.5]))
    counts = calib.HistogramCalibrator(8, None, False)
    if rank == 0:
        counts.collect(torch.tensor([1.0, 3.0]))
    return [all_merge(largest).compute_amax().item(), all_merge(counts).compute_amax("max").item()]


def main():
    torch.set_num_threads(1)
    dist.init_process_group("gloo", timeout=timedelta(seconds=600))
    rank, folder = dist.get_rank(), Path(sys.argv[1])
    found = {
        "mse": whole(False, "mse"),
        "iterated": whole(True, "percentile"),
        "behind 0": resumed(folder, rank, 0),
        "behind 1": resumed(folder, rank, 1),
        "failing": failing(rank),
        "unequal": unequal(rank),
        "merged": merged(rank),
    }
    (folder / f"{rank}.json").write_text(json.dumps(found))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
