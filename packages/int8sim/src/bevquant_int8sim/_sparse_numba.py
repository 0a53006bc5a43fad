"""The sparse convolution through the compiled kernels."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from bevquant_int8sim import _workspace
from bevquant_int8sim._launch import launch
from bevquant_int8sim._packed import PackedWeight
from bevquant_int8sim._parameters import P
from bevquant_int8sim._sparse_plan import SparsePlan
from bevquant_int8sim._tile_output import Requantization

__all__ = ["convolve", "prepare_rows"]


def prepare_rows(features: npt.NDArray[Any], packed: PackedWeight) -> npt.NDArray[Any]:
    """int8 or int16 features as the kernel of `packed` reads them, a row of zeros before them."""
    rows, channels = features.shape
    absent, values = _workspace.with_absent_row(rows, packed.padded_inputs, packed.input_dtype)
    if packed.kind == "vnni":
        np.bitwise_xor(features.view(np.uint8), 128, out=values[:, :channels])
        absent[:] = 128
    else:
        values[:, :channels] = features
        absent[:] = 0
    # Whatever lies in the columns behind the last channel meets weights of zero.
    prepared: npt.NDArray[Any] = values
    return prepared


def convolve(
    rows: npt.NDArray[Any],
    packed: PackedWeight,
    bias: npt.NDArray[np.int32] | None,
    plan: SparsePlan,
    out: npt.NDArray[Any],
    output: Requantization | None = None,
    flip: int = 0,
) -> None:
    """Convolve prepared `rows` into `out`.

    Args:
        rows: ``[num_in, padded inputs]``; in memory a row of zeros lies before it.
        packed: The weight.
        bias: int32 ``[out_channels]``, or ``None``.
        plan: The pairs, in tiles of ``packed.rows``.
        out: ``[num_out, at least the padded outputs]``: int32, or int8 where `output` is given.
        output: How accumulators become int8.
        flip: 128 to store `out` with 128 added, for the next layer.
    """
    init = np.zeros(packed.padded_outputs, np.int32)
    if bias is not None:
        init[: packed.out_channels] = bias
    tables = {
        P.BOUNDS: plan.bounds.ctypes.data,
        P.OFFSETS: plan.offsets.ctypes.data,
        P.ROWS: plan.rows.ctypes.data,
        P.OUT_ROWS: plan.out_rows.ctypes.data,
    }
    products = int(plan.bounds[-1]) * packed.rows * packed.padded_inputs * packed.padded_outputs
    launch("sparse", tables, plan.num_tiles, products, rows, packed, init, out, output, flip)
