"""What the cost of each step grows like: voxels, batch, frames, layers, calibrated tensors.

    python benchmarks/growth.py [voxels] [batch] [frames] [layers] [parts] [tensors] [--short]

Every row is a process of its own: seconds, peak memory above what it held before, and the
exponent e of ``cost ~ size^e`` against the row before; below each table the exponent over all its
rows (least squares of logarithms). 1 is linear. `--short` leaves the largest rows out.

- voxels: the LiDAR encoder in int8 and in float32 (bevquant_sparse), rulebooks included, on a rough
  surface of constant density, 10,000 to 2,000,000.
- batch: the same, 1 to 8 frames of 80,000 voxels.
- frames: calibration (histograms, mse) and the integer comparison of a small net, 10 to 1,000.
- layers: folding, quantizing, calibrating, lowering and writing a residual net, 10 to 500 layers.
- parts: the capture of a net of so many blocks; each writes into slices, and a part of each that
  sorts by numpy cannot be followed.
- tensors: the search for ranges of as many histograms, 20 to 2,000, mse.
"""

from __future__ import annotations

import argparse
import json
import math
import sys
import tempfile
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import torch
from _int8_timing import MEMORY_IS_KNOWN, child, peak_mb
from _machine import print_machine
from torch import Tensor, nn

SIZES = {
    "voxels": (10_000, 30_000, 100_000, 300_000, 1_000_000, 2_000_000),
    "batch": (1, 2, 4, 8),
    "frames": (10, 30, 100, 300, 1_000),
    "layers": (10, 30, 100, 200, 500),
    "parts": (2, 5, 10, 20, 50),
    "tensors": (20, 60, 200, 600, 2_000),
}
Costs = dict[str, float]


@contextmanager
def step(costs: Costs, name: str) -> Iterator[None]:
    """Add the seconds of a block."""
    start = time.perf_counter()
    yield
    costs[name] = costs.get(name, 0.0) + time.perf_counter() - start


def encoder(voxels: int, batch: int = 1) -> Costs:
    """The LiDAR encoder, in int8 and in float32; the second of two passes."""
    import sparse_conv as float_bench
    import spconv.pytorch as spconv
    from _int8_encoder import random_encoder
    from _int8_scale import cloud

    indices, integer = cloud(voxels, batch), random_encoder()
    q = torch.randint(-127, 128, (len(indices), 5), dtype=torch.int8)
    torch.manual_seed(0)
    net = float_bench.Encoder(spconv).eval()
    engine = float_bench.our_engine("auto")
    costs: Costs = {}
    for again in range(2):
        costs = {}
        with step(costs, "int8"):
            integer(q, indices, "auto", batch)
        if voxels * batch <= 1_000_000 or again:  # the first pass only compiles
            with step(costs, "float32"):
                x = spconv.SparseConvTensor(q.float(), indices, list(float_bench.GRID), batch)
                net(x, engine)
    return costs


def residual_net(layers: int, channels: int = 8) -> nn.Module:
    """Convolution, batch norm and ReLU, with a sum over every second one."""

    class Block(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.conv1, self.bn1 = nn.Conv2d(channels, channels, 3, padding=1), norm()
            self.conv2, self.bn2 = nn.Conv2d(channels, channels, 3, padding=1), norm()

        def forward(self, x: Tensor) -> Tensor:
            y = self.bn1(self.conv1(x)).relu()
            return (x + self.bn2(self.conv2(y))).relu()

    def norm() -> nn.Module:
        return nn.BatchNorm2d(channels)

    torch.manual_seed(0)
    return nn.Sequential(*(Block() for _ in range(layers // 2))).eval()


def frames(count: int) -> Costs:
    """Calibration of a net of ten layers, and its integers against float, frame by frame."""
    from bevquant_fusion import fuse_model
    from bevquant_int8sim import compare
    from bevquant_qnn import quantize_model
    from bevquant_quantizers import calibrate

    example = torch.randn(1, 8, 32, 32)
    folded = fuse_model(residual_net(10), example).model
    model = quantize_model(folded, example_inputs=example).model
    generator = torch.Generator().manual_seed(0)

    def batches() -> Iterator[Tensor]:
        for _ in range(count):
            yield torch.randn(1, 8, 64, 64, generator=generator)

    costs: Costs = {}
    with step(costs, "calibrate"):
        calibrate(model, batches(), method="mse", progress=False)
    with step(costs, "compare integers"):
        compare(folded, model, batches())
    return costs


def layers(count: int) -> Costs:
    """A net of so many convolutions, from float to a file."""
    from bevquant_export import export_qdq_onnx
    from bevquant_fusion import fuse_model
    from bevquant_int8sim import simulate
    from bevquant_qnn import quantize_model
    from bevquant_quantizers import calibrate

    x = torch.randn(1, 8, 16, 16)
    model, costs = residual_net(count), {}
    with step(costs, "fold"):
        model = fuse_model(model, x).model
    with step(costs, "quantize"):
        model = quantize_model(model, example_inputs=x).model
    with step(costs, "calibrate"):
        calibrate(model, [x], method="mse", progress=False)
    with step(costs, "simulate"):
        integers = simulate(model, x)
    with tempfile.TemporaryDirectory() as folder, step(costs, "export"):
        export_qdq_onnx(integers, x, Path(folder) / "net.onnx")
    return costs


class Sorted(nn.Module):
    """A part that no graph can follow."""

    def forward(self, x: Tensor) -> Tensor:
        """Along the last axis."""
        return torch.from_numpy(np.sort(x.numpy(), -1))


class Writes(nn.Module):
    """A residual block that writes into slices."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.sorted = nn.Linear(16, 16), Sorted()

    def forward(self, x: Tensor) -> Tensor:
        """Two halves, one after the other."""
        y = self.layer(x)
        y[..., :8] += self.sorted(x[..., 8:])
        y[..., 8:] = y[..., 8:].sigmoid()
        return x + y


def parts(count: int) -> Costs:
    """The capture of blocks with a part that cannot be followed, and of the same without."""
    from bevquant_graph import capture

    x, costs = torch.randn(4, 16), dict[str, float]()
    net = nn.Sequential(*(Writes() for _ in range(count))).eval()
    with step(costs, "not followed"):
        capture(net, x)
    for block in net:
        block.sorted = nn.Softmax(-1)
    with step(costs, "followed"):
        capture(net, x)
    return costs


def tensors(count: int) -> Costs:
    """Ranges of so many histograms."""
    from bevquant_quantizers import TensorQuantizer, calibrate
    from bevquant_quantizers.tensor_quant import QuantDescriptor

    values = torch.randn(1 << 14)
    several = nn.ModuleList(
        TensorQuantizer(QuantDescriptor(calib_method="histogram")) for _ in range(count)
    )

    def forward(model: nn.Module, batch: Tensor) -> None:
        for scale, quantizer in enumerate(model.children(), 1):
            quantizer(batch * scale)

    costs: Costs = {}
    with step(costs, "calibrate"):
        calibrate(several, [values], forward=forward, method="mse", progress=False)
    return costs


WORK: dict[str, Callable[[int], Costs]] = {
    "voxels": encoder,
    "batch": lambda batch: encoder(80_000, batch),
    "frames": frames,
    "layers": layers,
    "parts": parts,
    "tensors": tensors,
}


def measure(what: str, size: int) -> Costs:
    """Costs of one size in this process, with its peak memory above the imports."""
    torch.set_num_threads(2)
    costs: Costs = {}
    if not MEMORY_IS_KNOWN:
        return WORK[what](size)
    WORK[what](min(SIZES[what]))  # imports and compiled kernels
    before = peak_mb(lambda: None)
    most = peak_mb(lambda: costs.update(WORK[what](size)))
    return costs | {"MB": most - before}


def exponent(sizes: Sequence[float], costs: Sequence[float]) -> float:
    """Slope of log cost over log size, by least squares."""
    x, y = ([math.log(max(v, 1e-9)) for v in values] for values in (sizes, costs))
    mean_x, mean_y = sum(x) / len(x), sum(y) / len(y)
    spread = sum((v - mean_x) ** 2 for v in x)
    return sum((a - mean_x) * (b - mean_y) for a, b in zip(x, y, strict=True)) / spread


def print_table(what: str, sizes: Sequence[int]) -> None:
    rows = [(size, child("growth.py", "--one", what, str(size))) for size in sizes]
    names = list(rows[0][1])
    units = [name if name == "MB" else f"{name}, s" for name in names]
    print(f"| {what} | " + " | e | ".join(units) + " | e |")
    print("|---:|" + "---:|---:|" * len(names))
    for i, (size, costs) in enumerate(rows):
        cells = []
        for name in names:
            digits = 0 if name == "MB" else 2
            cells.append(f"{costs[name]:.{digits}f}")
            pair = [rows[i - 1], rows[i]] if i else []
            slope = exponent([s for s, _ in pair], [c[name] for _, c in pair]) if pair else None
            cells.append("" if slope is None else f"{slope:.2f}")
        print(f"| {size:,} | " + " | ".join(cells) + " |")
    over_all = (exponent(sizes, [costs[name] for _, costs in rows]) for name in names)
    print("| all | " + " | ".join(f"| {slope:.2f}" for slope in over_all) + " |\n", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("tables", nargs="*", metavar="table")
    parser.add_argument("--short", action="store_true")
    parser.add_argument("--one", nargs=2, help=argparse.SUPPRESS)
    options = parser.parse_args()
    warnings.simplefilter("ignore")
    if options.one:
        with torch.no_grad():
            print(json.dumps(measure(options.one[0], int(options.one[1]))))
        return
    unknown = sorted(set(options.tables) - set(SIZES))
    if unknown:
        parser.error(f"unknown tables {', '.join(unknown)}: expected {', '.join(SIZES)}")
    print_machine(peaks=False)
    for what in options.tables or SIZES:
        print_table(what, SIZES[what][: -2 if options.short else None])


if __name__ == "__main__":
    sys.exit(main())
