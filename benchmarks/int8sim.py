"""Integer kernels against float and integer peers: the LiDAR encoder, dense nets, memory, scale.

    python benchmarks/int8sim.py [encoder] [dense] [memory] [scale] [--rounds N]

Without names all tables are printed. Needs numba; the encoder needs spconv (the `cpu` extra) and
the frame `nvidia_scn` under `BEVQUANT_DATA` or `../shared/data`, the dense table onnx and
onnxruntime. Runs of the peers are interleaved; times are medians. Nets have random weights and
ranges taken from one float pass.
"""

from __future__ import annotations

import argparse
import importlib.util
import os
import statistics
import subprocess
import sys
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from bevquant_int8sim import (
    backend_report,
    int8_sparse_conv,
    int8_to_dense,
    plan_rulebook,
    quantize,
    quantize_bias,
)
from bevquant_sparse import WeightLayout

sys.path.insert(0, str(Path(__file__).parent))
import sparse_conv as float_bench

Runs = dict[str, tuple[int, Callable[[], Any]]]


def interleave(runs: Runs, rounds: int) -> dict[str, tuple[float, float]]:
    """Median and best milliseconds of each, in turn, once untimed before."""
    times: dict[str, list[float]] = {name: [] for name in runs}
    usual = torch.get_num_threads()
    try:
        for number in range(rounds + 1):
            for name, (threads, run) in runs.items():
                torch.set_num_threads(threads)
                start = time.perf_counter()
                run()
                if number:
                    times[name].append((time.perf_counter() - start) * 1e3)
    finally:
        torch.set_num_threads(usual)
    return {name: (statistics.median(t), min(t)) for name, t in times.items()}


# --- the machine's int8 peak ---


def peak(kind: str) -> Callable[[], float]:
    """GMAC of one call of the widest tile on operands that stay in the first cache."""
    from bevquant_int8sim._grid_numba import grid_calls, make_plan
    from bevquant_int8sim._launch import run_calls
    from bevquant_int8sim._packed import pack_weight

    depth, columns, outputs = 256, 64, 120_000
    packed = pack_weight(np.ones((1, depth, columns), np.int8), kind)
    x = np.ones((packed.rows, depth), np.int8)
    rows = np.arange(outputs) % packed.rows
    plan = make_plan(rows, np.zeros(outputs), np.zeros(1), packed.rows)
    out = np.empty((1, columns), np.int32)

    def run() -> float:
        run_calls(grid_calls(x, packed, None, plan, out))
        return outputs * depth * columns / 1e9

    return run


# --- the encoder ---


class IntegerEncoder:
    """The float encoder's folded convolutions in int8, ranges from one float pass."""

    def __init__(self, encoder: Any, features: Tensor, indices: Tensor) -> None:
        self.shape = list(float_bench.GRID)
        self.scales: list[float] = []
        self.layers: list[dict[str, Any]] = []
        self.features = features
        engine = self._engine(features)
        import spconv.pytorch as spconv

        start = spconv.SparseConvTensor(features, indices, self.shape, 1)
        encoder(start, engine)
        kinds = float_bench.geometries()
        self.kinds = [kinds[i] for i, n in enumerate([5, 1, 4, 1, 4, 1, 4, 1]) for _ in range(n)]
        self.scales.append(self.last)
        for number, layer in enumerate(self.layers):
            layer["scale"] = self.scales[number + 1]

    def _engine(self, features: Tensor) -> Any:
        """An engine that convolves in float and writes down weights and input ranges."""

        def run(conv: Any, x: Any, shift: Tensor | None) -> Any:
            self.scales.append(float(x.features.abs().max()) / 127)
            weight = conv.weight.detach()
            scale = weight.flatten(1).abs().amax(1).double() / 127
            q = quantize(weight, scale, axis=0)
            self.layers.append({"weight": q, "weight_scale": scale, "shift": shift})
            y = float_bench.conv_forward(conv, x, bias=shift)
            self.last = float(y.features.abs().max()) / 127
            return y

        return run

    def prepare(self) -> None:
        """Biases and multipliers, which need the scales of both sides."""
        self.ready = []
        for number, layer in enumerate(self.layers):
            s_x, s_y, s_w = self.scales[number], layer["scale"], layer["weight_scale"]
            bias = quantize_bias(layer["shift"], s_x, s_w)
            self.ready.append((layer["weight"], bias, s_x * s_w / s_y))

    def __call__(self, q: Tensor, indices: Tensor, backend: str) -> Tensor:
        """Coordinates and int8 features in, the dense int8 map out."""
        order = sort_order(indices)
        q, indices = q[order], indices[order]
        shape, book, layers = self.shape, None, iter(zip(self.ready, self.kinds, strict=True))

        def conv(x: Tensor, residual: Tensor | None = None, relu: bool = True) -> Tensor:
            nonlocal indices, shape, book
            (weight, bias, multiplier), kind = next(layers)
            if book is None or not (kind["subm"] and book.subm):
                book = plan_rulebook(indices, shape, batch_size=1, **kind)
                indices, shape = book.out_indices, list(book.out_shape)
            return int8_sparse_conv(
                x, weight, bias, book, layout=WeightLayout.KRSC, multiplier=multiplier,
                residual=residual, relu=relu, backend=backend,
            )  # fmt: skip

        q = conv(q)
        for stage in range(4):
            for _ in range(2):
                h = conv(q)
                q = conv(h, residual=q)
            if stage < 3:
                q = conv(q)
        q = conv(q)
        return int8_to_dense(q, indices, shape, 1).permute(0, 1, 4, 2, 3).flatten(1, 2)


def sort_order(indices: Tensor) -> Tensor:
    """Rows in the order of their voxels, which the kernels then find side by side."""
    b, x, y, z = indices.long().unbind(1)
    key = ((b * float_bench.GRID[0] + x) * float_bench.GRID[1] + y) * float_bench.GRID[2] + z
    bits = len(key).bit_length()
    packed = torch.from_numpy(np.sort(((key << bits) | torch.arange(len(key))).numpy()))
    return packed & ((1 << bits) - 1)


def build_encoder() -> tuple[Any, Tensor, Tensor]:
    import spconv.pytorch as spconv

    features, indices = float_bench.load_frame()
    torch.manual_seed(0)
    encoder = float_bench.Encoder(spconv).eval()
    for unit in encoder.units:
        unit.fold()
    return encoder, features, indices


def encoder_table(rounds: int) -> None:
    import spconv.pytorch as spconv

    encoder, features, indices = build_encoder()
    gmac = float_bench.count_gmac(encoder, indices)
    integer = IntegerEncoder(encoder, features, indices)
    integer.prepare()
    q = quantize(features, integer.scales[0])
    reference = integer(q, indices, "torch")
    backends = [s.name for s in backend_report() if s.available]
    equal = {name: torch.equal(integer(q, indices, name), reference) for name in backends}

    def forward(engine: Any) -> Callable[[], Any]:
        def run() -> Tensor:
            x = spconv.SparseConvTensor(features, indices, list(float_bench.GRID), 1)
            return float_bench.dense(encoder(x, engine))

        return run

    runs: Runs = {
        "spconv fp32, 2 threads": (2, forward(float_bench.spconv_engine)),
        "spconv fp32, 1 thread": (1, forward(float_bench.spconv_engine)),
        "ours fp32, 2 threads": (2, forward(float_bench.our_engine("auto"))),
    }
    for name in backends:
        for threads in (2, 1) if name != "torch" else (2,):
            label = f"int8 {name}, {threads} thread{'s' if threads > 1 else ''}"
            runs[label] = (threads, lambda n=name: integer(q, indices, n))
    kernel = backends[0]
    if kernel != "torch":
        at_peak = peak(kernel)
        work = at_peak()
        runs[f"{kernel} peak, 2 threads"] = (2, at_peak)
    times = interleave(runs, rounds)
    print(f"LiDAR encoder, {len(indices):,} voxels, {gmac:.2f} GMAC, BN folded\n")
    print("| run | ms | best | against spconv, 2 threads | equal to torch's integers |")
    print("|---|---:|---:|---:|---|")
    bar = times["spconv fp32, 2 threads"]
    for name, (ms, best) in times.items():
        if "peak" in name:
            continue
        same = next((str(v) for k, v in equal.items() if f"int8 {k}," in name), "–")
        print(f"| {name} | {ms:.1f} | {best:.1f} | {bar[0] / ms:.2f}× | {same} |")
    if kernel != "torch":
        rate = work / times[f"{kernel} peak, 2 threads"][1] * 1e3
        bound = gmac / rate * 1e3
        ours = times[f"int8 {kernel}, 2 threads"]
        print(
            f"\n{kernel} peak {rate:.0f} GMAC/s: {bound:.1f} ms for {gmac:.2f} GMAC; the whole "
            f"encoder takes {ours[1] / bound:.2f} times that at its best, {ours[0] / bound:.2f} "
            "times in the median"
        )
    print()


def other_cpus(rounds: int) -> None:
    """The encoder on kernels compiled for a CPU without VNNI, in a process of its own."""
    environment = os.environ | {
        "NUMBA_CPU_NAME": "x86-64",
        "NUMBA_CPU_FEATURES": "+avx,+avx2,+fma,+sse4.2,+popcnt,+bmi,+bmi2",
    }
    print("The same with kernels compiled for AVX2 alone (spconv uses what it likes):\n")
    command = [sys.executable, __file__, "encoder", "--rounds", str(rounds), "--plain"]
    subprocess.run(command, env=environment, check=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("tables", nargs="*", default=[])
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--plain", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    tables = options.tables or ["encoder"]
    warnings.simplefilter("ignore")
    print(f"load average {os.getloadavg()[0]:.1f} on {os.cpu_count()} cores")
    for status in backend_report():
        print(f"{status.name}: {status.detail}")
    print()
    if "encoder" in tables:
        if importlib.util.find_spec("spconv") is None:
            print("encoder skipped: spconv is not installed")
        else:
            encoder_table(options.rounds)
            if not options.plain:
                other_cpus(options.rounds)


if __name__ == "__main__":
    with torch.no_grad():
        main()
