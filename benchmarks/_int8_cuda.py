"""The integer LiDAR encoder on a GPU against spconv there, in single and half precision.

Part of `python benchmarks/int8sim.py`. On CUDA the integer kernels are torch's own matrix products
on gathered rows. spconv's int8 kernels want modules of its own quantization flow and are left out.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import sparse_conv as float_bench
import torch
from _int8_encoder import build_encoder, from_float
from _int8_timing import Runs, interleave

from bevquant_int8sim import quantize


def print_table(rounds: int) -> None:
    if not torch.cuda.is_available():
        print("cuda skipped: torch finds no CUDA device\n")
        return
    import spconv.pytorch as spconv

    encoder, features, indices = build_encoder()
    integer = from_float(encoder, features, indices)
    q = quantize(features, integer.scale)
    expected = integer(q, indices, "auto")
    on_gpu = [tuple(t.cuda() for t in layer[:2]) + layer[2:] for layer in integer.layers]
    integer = type(integer)(on_gpu, integer.scale)
    q, places = q.cuda(), indices.cuda()
    same = torch.equal(integer(q, places, "torch").cpu(), expected)

    def synchronised(run: Callable[[], Any]) -> Callable[[], None]:
        def act() -> None:
            run()
            torch.cuda.synchronize()

        return act

    def forward(dtype: torch.dtype) -> Callable[[], Any]:
        net, x = build_encoder()[0].to("cuda", dtype), features.to("cuda", dtype)
        grid = list(float_bench.GRID)
        return lambda: float_bench.dense(
            net(spconv.SparseConvTensor(x, places, grid, 1), float_bench.spconv_engine)
        )

    runs: Runs = {
        "spconv fp32": (2, synchronised(forward(torch.float32))),
        "spconv fp16": (2, synchronised(forward(torch.float16))),
        "int8": (2, synchronised(lambda: integer(q, places, "torch"))),
    }
    times = interleave(runs, rounds)
    print(f"LiDAR encoder on {torch.cuda.get_device_name()}, {len(indices):,} voxels; ", end="")
    print(f"integers equal to the CPU's: {same}\n")
    print("| run | ms | best | against spconv fp16 |\n|---|---:|---:|---:|")
    bar = times["spconv fp16"][0]
    for name, (ms, best) in times.items():
        print(f"| {name} | {ms:.1f} | {best:.1f} | {bar / ms:.2f}× |")
    print()
