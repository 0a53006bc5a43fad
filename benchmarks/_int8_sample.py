"""Deformable attention of integers against the float one.

Part of `python benchmarks/int8sim.py`. The sizes are those of BEVFormer's encoder: cameras that the
BEV attends to, and the BEV itself. The peer is the attention in torch's operators, as mmcv has it
for CPUs.
"""

from __future__ import annotations

from unittest import mock

import torch
from _int8_timing import interleave

from bevquant_graph import deformable_attention
from bevquant_int8sim import int8_deformable_attention

_HEADS, _DEPTH, _POINTS = 8, 32, 4
_CASES = {"6 cameras of 15 × 25": (6, 2500, (15, 25)), "BEV of 50 × 50": (1, 2500, (50, 50))}


def print_table(rounds: int) -> None:
    print("Deformable attention, 2,500 queries, 8 heads of 32, 4 points, 1 thread, ms (median)\n")
    print("| map | float32, torch | int8 | int8 without numba | float32 / int8 |")
    print("|---|---:|---:|---:|---:|")
    for name, (batch, queries, (height, width)) in _CASES.items():
        generator = torch.Generator().manual_seed(0)
        value = torch.randint(
            -128, 128, (batch, height * width, _HEADS, _DEPTH), generator=generator
        )
        places = torch.rand(batch, queries, _HEADS, 1, _POINTS, 2, generator=generator) * 1.2 - 0.1
        weights = torch.rand(batch, queries, _HEADS, 1, _POINTS, generator=generator).softmax(-1)
        rest = torch.tensor([[height, width]]), torch.tensor([0]), places, weights
        floats, integers = (value.float(), *rest), (value.to(torch.int8), *rest)

        def portable(integers: tuple[torch.Tensor, ...] = integers) -> None:
            with mock.patch("bevquant_int8sim._sample.compiled_module", return_value=None):
                int8_deformable_attention(*integers)

        times = interleave(
            {
                "float32": (1, lambda given=floats: deformable_attention(*given)),
                "int8": (1, lambda given=integers: int8_deformable_attention(*given)),
                "without": (1, portable),
            },
            rounds,
        )
        ms = [times[key][0] for key in ("float32", "int8", "without")]
        print(f"| {name} | {ms[0]:.0f} | {ms[1]:.0f} | {ms[2]:.0f} | {ms[0] / ms[1]:.1f} |")
    print()
