"""Compiling the kernels into an empty cache, and finding them there in the next process.

Part of `python benchmarks/int8sim.py`. Counted is what the first pass takes longer than the second
one, imports not included.
"""

from __future__ import annotations

import json
import sys
import tempfile
import time
from collections.abc import Callable

import numba  # noqa: F401  (not counted)
import torch
from _int8_encoder import random_encoder
from _int8_scale import cloud
from _int8_timing import child
from torch import nn

from bevquant_int8sim import simulate
from bevquant_qnn import quantize_model
from bevquant_quantizers import calibrate


def print_table() -> None:
    print("First pass, seconds more than the second one (CPU seconds in brackets)\n")
    print("| net | empty cache | next process |\n|---|---:|---:|")
    for net in NETS:
        with tempfile.TemporaryDirectory() as folder:
            cache = {"NUMBA_CACHE_DIR": folder}
            seen = [child("_int8_jit.py", net, environment=cache) for _ in range(2)]
        cells = " | ".join(f"{s['wall']:.2f} ({s['cpu']:.2f})" for s in seen)
        print(f"| {net} | {cells} |")
    print()


def encoder() -> Callable[[], object]:
    indices, net = cloud(10_000, 1), random_encoder()
    q = torch.randint(-127, 128, (len(indices), 5), dtype=torch.int8)
    return lambda: net(q, indices, "auto")


class Residual(nn.Module):
    """Every kind of step of the decoder and of the ResNet."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, 64, 3, stride=2, padding=1)
        self.pool = nn.MaxPool2d(3, stride=2, padding=1)
        self.conv = nn.Conv2d(64, 64, 3, padding=1)
        self.up = nn.ConvTranspose2d(64, 64, 2, stride=2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Float [1, 3, h, w] → float [1, 64, h / 2, w / 2]."""
        x = self.pool(torch.relu(self.stem(x)))
        x = torch.relu(self.conv(x) + x)
        return torch.relu(self.up(x))


def dense() -> Callable[[], object]:
    x = torch.randn(1, 3, 256, 256)
    net = quantize_model(Residual().eval(), example_inputs=(x,)).model
    calibrate(net, [(x,)], method="max")
    model = simulate(net, (x,))
    return lambda: model(x)


NETS = {"LiDAR encoder": encoder, "dense convolutions": dense}


def measure(net: str) -> dict[str, float]:
    run = NETS[net]()
    seconds = []
    for _ in range(2):
        start = time.perf_counter(), time.process_time()
        run()
        seconds.append((time.perf_counter() - start[0], time.process_time() - start[1]))
    (wall, cpu), (again, again_cpu) = seconds
    return {"wall": wall - again, "cpu": cpu - again_cpu}


if __name__ == "__main__":
    with torch.no_grad():
        print(json.dumps(measure(sys.argv[1])))
