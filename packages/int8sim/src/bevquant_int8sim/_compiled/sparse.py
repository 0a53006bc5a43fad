"""Convolutions over lists of pairs, through the compiled kernels."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from bevquant_int8sim._compiled.launch import Call, kernel_calls, layer_calls, run_calls
from bevquant_int8sim._compiled.packed import PackedWeight
from bevquant_int8sim._compiled.parameters import P
from bevquant_int8sim._output import Output
from bevquant_int8sim._tile_output import Requantization, full_rows
from bevquant_sparse import Rulebook
from bevquant_sparse.runtime import workspace
from bevquant_sparse.tiles import SparsePlan, plan_for


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
    """The kernel calls that convolve readable `rows`, ``[num_in, padded inputs]``, into `out`.

    `plan` has the pairs in tiles of ``packed.rows``; `out` is int32, or int8 where `output` is
    given.
    """
    init = first_sums(packed, bias)
    return kernel_calls("sparse", *_walk(plan), rows, packed, init, out, output)


def _walk(plan: SparsePlan) -> tuple[dict[P, npt.NDArray[Any]], int, int]:
    """The tables of a plan, its number of tiles and of input rows that these see."""
    tables: dict[P, npt.NDArray[Any]] = {
        P.BOUNDS: plan.bounds,
        P.OFFSETS: plan.offsets,
        P.ROWS: plan.rows,
        P.OUT_ROWS: plan.out_rows,
    }
    return tables, plan.num_tiles, int(plan.bounds[-1]) * plan.tile_rows


class SparseLayer:
    """A convolution made ready for any rulebook of its kernel."""

    def __init__(
        self, packed: PackedWeight, bias: npt.NDArray[np.int32] | None, output: Output
    ) -> None:
        fused = output.fused(packed.padded_outputs)
        self._packed = packed
        self._calls = layer_calls("sparse", packed, first_sums(packed, bias), fused)
        self._fused, self._output = fused is not None, replace(output, residual=None)

    def __call__(self, features: Tensor, rulebook: Rulebook, residual: Tensor | None) -> Tensor:
        """Convolve checked features, and add `residual`."""
        packed = self._packed
        plan = plan_for(rulebook, packed.rows)
        rows = readable_rows(features.numpy(), packed)
        kind = np.int8 if self._fused else np.int32
        made = workspace.empty((rulebook.num_out, packed.padded_outputs), kind)
        added = None
        if self._fused and residual is not None:
            added = full_rows(residual, packed.padded_outputs)
        run_calls([call.on(*_walk(plan), rows, made, added) for call in self._calls])
        out = torch.from_numpy(made)
        if packed.padded_outputs != packed.out_channels:
            out = out[:, : packed.out_channels].contiguous()
        return out if self._fused else replace(self._output, residual=residual).finish(out)
