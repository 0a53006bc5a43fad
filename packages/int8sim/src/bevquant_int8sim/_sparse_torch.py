"""The sparse convolution with torch alone: blocks of gathered rows, one matrix product each."""

from __future__ import annotations

import torch
from torch import Tensor

from bevquant_int8sim._matmul import exact_matmul
from bevquant_sparse import Rulebook

_BLOCK_VALUES = 2**24  # gathered values of a block


def accumulate(
    features: Tensor, weight: Tensor, bias: Tensor | None, rulebook: Rulebook, *, fits_int32: bool
) -> Tensor:
    """Accumulators ``[num_out, out_channels]``, int32 or (not `fits_int32`) int64.

    Args:
        features: int8 or int16 ``[num_in, in_channels]``.
        weight: int8 ``[volume, in_channels, out_channels]``.
        bias: int32 ``[out_channels]`` or ``None``.
        rulebook: The pairs, on the same device.
        fits_int32: Whether a bound shows that no sum leaves int32.
    """
    volume, in_channels, out_channels = weight.shape
    dtype = torch.int32 if fits_int32 else torch.int64
    acc = torch.zeros((rulebook.num_out, out_channels), dtype=dtype, device=features.device)
    if features.shape[0] and in_channels and out_channels:
        padded = torch.cat([features.new_zeros(1, in_channels), features])
        matrix = weight.reshape(volume * in_channels, out_channels)
        block = max(1, _BLOCK_VALUES // (volume * in_channels))
        for start in range(0, rulebook.num_out, block):
            rows = rulebook.neighbours[start : start + block].long() + 1  # row 0 holds zeros
            columns = padded.index_select(0, rows.view(-1)).view(rows.shape[0], -1)
            acc[start : start + block] = exact_matmul(columns, matrix, fits_int32=fits_int32)
    return acc if bias is None else acc.add_(bias.to(dtype))
