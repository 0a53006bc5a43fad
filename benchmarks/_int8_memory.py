"""Peak memory of the integer LiDAR encoder on a real frame, in a process of its own.

Part of `python benchmarks/int8sim.py`. Counted is what comes on top of the imports (torch, numba,
the package): weights, frame, compiled kernels from numba's cache, rulebooks, features. Weights are
random integers; memory does not depend on them.
"""

from __future__ import annotations

import json

import numba  # noqa: F401  (counted with the imports)
import sparse_conv as float_bench
import torch
from _int8_encoder import random_encoder
from _int8_timing import MEMORY_IS_KNOWN, child, peak_mb

from bevquant_int8sim import quantize


def print_table() -> None:
    if not MEMORY_IS_KNOWN:
        print("memory skipped: this system does not tell a process its peak\n")
        return
    child("_int8_memory.py")  # kernels are in numba's cache now
    seen = child("_int8_memory.py")
    print(f"LiDAR encoder, {seen['voxels']:,} voxels, int8: peak memory above the imports\n")
    print("| run | MB |\n|---|---:|")
    for name, mb in seen["mb"].items():
        print(f"| {name} | {mb:.0f} |")
    print()


def measure() -> dict[str, object]:
    torch.set_num_threads(2)
    before = peak_mb(lambda: None)
    encoder = random_encoder()
    features, indices = float_bench.load_frame()
    q = quantize(features, float(features.abs().max()) / 127)
    runs = ("first frame", "second frame")
    mb = {name: peak_mb(lambda: encoder(q, indices, "auto")) - before for name in runs}
    return {"voxels": len(indices), "mb": mb}


if __name__ == "__main__":
    with torch.no_grad():
        print(json.dumps(measure()))
