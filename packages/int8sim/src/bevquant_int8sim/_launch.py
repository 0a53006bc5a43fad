"""Run a kernel over all tiles of a layer, on all of torch's threads."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from bevquant_int8sim._kernels import kernel
from bevquant_int8sim._packed import PackedWeight
from bevquant_int8sim._parameters import P
from bevquant_int8sim._threads import share
from bevquant_int8sim._tile_output import Requantization

__all__ = ["launch"]

_TASK_PRODUCTS = 100_000_000  # 0.2 ms with VNNI: a late thread then costs little


def launch(
    job: str,
    tables: dict[P, int],
    num_tiles: int,
    products: int,
    inputs: npt.NDArray[Any],
    packed: PackedWeight,
    init: npt.NDArray[np.int32],
    out: npt.NDArray[Any],
    output: Requantization | None,
    flip: int,
) -> None:
    """Compute `out` in tasks of a few tiles each.

    Args:
        job: ``"sparse"`` or ``"grid"``.
        tables: The parameters that say which inputs meet which outputs.
        num_tiles: Number of tiles.
        products: Multiplications in all, by which the work is cut.
        inputs: ``[rows, padded inputs]`` as the kernel reads them.
        packed: The weight.
        init: int32 ``[padded outputs]``: what accumulators begin with.
        out: ``[rows, at least the padded outputs]``: int32, or int8 where `output` is given.
        output: How accumulators become int8, or ``None``.
        flip: 128 to store int8 with 128 added, else 0.
    """
    limits = None if output is None else output.limits()
    calls = []
    for group in packed.groups:
        p = np.zeros(len(P), np.int64)
        for place, value in tables.items():
            p[place] = value
        p[P.INPUT], p[P.INPUT_STRIDE] = inputs.ctypes.data, inputs.strides[0]
        p[P.STEPS], p[P.WEIGHT] = packed.steps, group.weight.ctypes.data
        p[P.INIT] = init[group.first :].ctypes.data
        if job == "sparse" and group.offset_init is not None:
            p[P.OFFSET_INIT] = group.offset_init.ctypes.data
        p[P.OUT], p[P.OUT_STRIDE] = out[:, group.first :].ctypes.data, out.strides[0]
        p[P.OUT_FLIP] = flip
        if output is not None and limits is not None:
            p[P.MULTIPLIER] = output.multiplier[group.first :].ctypes.data
            p[P.LIMITS] = limits.ctypes.data
            if output.residual is not None:
                other = output.residual.rows
                p[P.RESIDUAL] = other[:, group.first :].ctypes.data
                p[P.RESIDUAL_STRIDE] = other.strides[0]
                p[P.RESIDUAL_FLIP] = output.residual.flip
        calls.append((kernel(packed.kind, job, packed.rows, group.vectors), p, p.ctypes.data))
    parts = max(1, min(num_tiles, products // len(calls) // _TASK_PRODUCTS))

    def task(number: int) -> None:
        group, part = divmod(number, parts)
        run, _, address = calls[group]
        run(num_tiles * part // parts, num_tiles * (part + 1) // parts, address)

    share(task, parts * len(calls))
