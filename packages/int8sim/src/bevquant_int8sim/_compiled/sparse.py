"""Convolutions over lists of pairs, through the compiled kernels."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from bevquant_int8sim._compiled.launch import Call, kernel_calls, run_calls
from bevquant_int8sim._compiled.packed import PackedWeight
from bevquant_int8sim._compiled.parameters import P
from bevquant_int8sim._tile_output import Requantization
from bevquant_sparse.runtime import workspace
from bevquant_sparse.tiles import SparsePlan


def readable_rows(rows: npt.NDArray[Any], packed: PackedWeight) -> npt.NDArray[Any]:
    """int8 or int16 ``[rows, channels]`` as the kernel of `packed` reads them.

    The rows themselves, where their channels lie side by side and fill the kernel's steps; else a
    copy. What then lies behind the last channel meets weights of zero.
    """
    channels = rows.shape[1]
    if rows.dtype == packed.input_dtype and channels == packed.padded_inputs:
        if rows.strides[1] == rows.itemsize:
            return rows
    copy = workspace.empty((len(rows), packed.padded_inputs), packed.input_dtype)
    copy[:, :channels] = rows
    readable: npt.NDArray[Any] = copy
    return readable


def first_sums(packed: PackedWeight, bias: npt.NDArray[np.int32] | None) -> npt.NDArray[np.int32]:
    """int32 ``[padded outputs]``: the bias, and zeros behind it."""
    init = np.zeros(packed.padded_outputs, np.int32)
    if bias is not None:
        init[: packed.out_channels] = bias
    return init


def sparse_calls(
    rows: npt.NDArray[Any],
    packed: PackedWeight,
    bias: npt.NDArray[np.int32] | None,
    plan: SparsePlan,
    out: npt.NDArray[Any],
    output: Requantization | None = None,
) -> list[Call]:
    """The kernel calls that convolve readable `rows` into `out`.

    Args:
        rows: ``[num_in, padded inputs]``.
        packed: The weight.
        bias: int32 ``[out_channels]``, or ``None``.
        plan: The pairs, in tiles of ``packed.rows``.
        out: ``[num_out, at least the padded outputs]``: int32, or int8 where `output` is given.
        output: How accumulators become int8.
    """
    tables = {
        P.BOUNDS: plan.bounds,
        P.OFFSETS: plan.offsets,
        P.ROWS: plan.rows,
        P.OUT_ROWS: plan.out_rows,
    }
    seen = int(plan.bounds[-1]) * packed.rows
    init = first_sums(packed, bias)
    return kernel_calls("sparse", tables, plan.num_tiles, seen, rows, packed, init, out, output)


def convolve(
    rows: npt.NDArray[Any],
    packed: PackedWeight,
    bias: npt.NDArray[np.int32] | None,
    plan: SparsePlan,
    out: npt.NDArray[Any],
    output: Requantization | None = None,
) -> None:
    """Convolve int8 or int16 `rows` into `out`; the arguments are those of `sparse_calls`."""
    run_calls(sparse_calls(readable_rows(rows, packed), packed, bias, plan, out, output))
