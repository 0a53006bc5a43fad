"""The LiDAR encoder in integers against spconv in float, on a real frame.

Part of `python benchmarks/int8sim.py`.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import sparse_conv as float_bench
import torch
from _int8_timing import Runs, interleave, peak
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

Layer = tuple[Tensor, Tensor, Any]  # int8 weight, int32 bias, multiplier


@dataclass(frozen=True)
class IntegerEncoder:
    """The encoder's folded convolutions in int8; `scale` is that of its input."""

    layers: list[Layer]
    scale: float

    def __call__(self, q: Tensor, indices: Tensor, backend: str, batch: int = 1) -> Tensor:
        """Coordinates and int8 features in, the dense int8 map out."""
        order = sort_order(indices)
        q, indices = q[order], indices[order]
        shape, book = list(float_bench.GRID), None
        layers = iter(zip(self.layers, kinds(), strict=True))

        def conv(x: Tensor, residual: Tensor | None = None, relu: bool = True) -> Tensor:
            nonlocal indices, shape, book
            (weight, bias, multiplier), kind = next(layers)
            if book is None or not (kind["subm"] and book.subm):
                book = plan_rulebook(indices, shape, batch_size=batch, **kind)
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
        return int8_to_dense(q, indices, shape, batch).permute(0, 1, 4, 2, 3).flatten(1, 2)


def kinds() -> list[dict[str, Any]]:
    """Geometry of each of the 21 convolutions."""
    counts = [5, 1, 4, 1, 4, 1, 4, 1]
    return [k for k, n in zip(float_bench.geometries(), counts, strict=True) for _ in range(n)]


def sort_order(indices: Tensor) -> Tensor:
    """Rows in the order of their voxels, which the kernels then find side by side."""
    b, x, y, z = indices.long().unbind(1)
    key = ((b * float_bench.GRID[0] + x) * float_bench.GRID[1] + y) * float_bench.GRID[2] + z
    if key.is_cuda:
        return key.argsort()
    bits = len(key).bit_length()
    packed = torch.from_numpy(np.sort(((key << bits) | torch.arange(len(key))).numpy()))
    return packed & ((1 << bits) - 1)


def random_encoder() -> IntegerEncoder:
    """Random integers whose outputs neither vanish nor saturate much."""
    generator = torch.Generator().manual_seed(0)
    layers: list[Layer] = []
    width = 5
    for number, kind in enumerate(kinds()):
        out = float_bench.CHANNELS[min(number // 5, 3)]
        kernel = float_bench.triple(kind["kernel_size"])
        weight = torch.randint(
            -127, 128, (out, *kernel, width), dtype=torch.int8, generator=generator
        )
        layers.append((weight, torch.zeros(out, dtype=torch.int32), 1 / (73 * (9 * width) ** 0.5)))
        width = out
    return IntegerEncoder(layers, 1.0)


def from_float(encoder: Any, features: Tensor, indices: Tensor) -> IntegerEncoder:
    """The float encoder's convolutions, ranges from one pass."""
    import spconv.pytorch as spconv

    seen: list[tuple[float, Any, Any, float]] = []  # range of the input, conv, shift, of the output

    def run(conv: Any, x: Any, shift: Tensor | None) -> Any:
        y = float_bench.conv_forward(conv, x, bias=shift)
        seen.append((float(x.features.abs().max()), conv, shift, float(y.features.abs().max())))
        return y

    encoder(spconv.SparseConvTensor(features, indices, list(float_bench.GRID), 1), run)
    ranges = [s[0] / 127 for s in seen] + [seen[-1][3] / 127]
    layers = []
    for number, (_, conv, shift, _) in enumerate(seen):
        weight = conv.weight.detach()
        scale = weight.flatten(1).abs().amax(1).double() / 127
        s_x, s_y = ranges[number], ranges[number + 1]
        bias = quantize_bias(shift, s_x, scale)
        layers.append((quantize(weight, scale, axis=0), bias, s_x * scale / s_y))
    return IntegerEncoder(layers, ranges[0])


def build_encoder() -> tuple[Any, Tensor, Tensor]:
    import spconv.pytorch as spconv

    features, indices = float_bench.load_frame()
    torch.manual_seed(0)
    encoder = float_bench.Encoder(spconv).eval()
    for unit in encoder.units:
        unit.fold()
    return encoder, features, indices


def print_table(rounds: int) -> None:
    import spconv.pytorch as spconv

    encoder, features, indices = build_encoder()
    gmac = float_bench.count_gmac(encoder, indices)
    integer = from_float(encoder, features, indices)
    q = quantize(features, integer.scale)
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


def print_other_cpu(rounds: int) -> None:
    """The same on kernels compiled for a CPU without VNNI, in a process of its own."""
    environment = os.environ | {
        "NUMBA_CPU_NAME": "x86-64",
        "NUMBA_CPU_FEATURES": "+avx,+avx2,+fma,+sse4.2,+popcnt,+bmi,+bmi2",
    }
    print("The same with kernels compiled for AVX2 alone (spconv uses what it likes):\n")
    script = str(Path(__file__).with_name("int8sim.py"))
    command = [sys.executable, script, "encoder", "--rounds", str(rounds), "--plain"]
    subprocess.run(command, env=environment, check=True)
