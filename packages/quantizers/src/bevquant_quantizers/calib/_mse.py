"""The range of least squared quantization error."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from bevquant_quantizers._fake_quant import fake_quantize

__all__ = ["mse_amax"]


def mse_amax(
    counts: npt.NDArray[np.int64],
    edges: npt.NDArray[np.float32],
    num_bits: int,
    unsigned: bool,
    stride: int,
    start_bin: int,
    largest: float,
) -> float:
    low, high = torch.from_numpy(edges[:-1].copy()), torch.from_numpy(edges[1:].copy())
    centers = (high + low) / 2
    weights = torch.from_numpy(counts.astype(np.float32))
    candidates = [centers[i] for i in range(start_bin, len(centers), stride)]
    candidates.append(torch.tensor(largest, dtype=torch.float32))
    errors = [_error(centers, weights, amax, num_bits, unsigned) for amax in candidates]
    return float(candidates[int(np.argmin(errors))])


def _error(centers: Tensor, weights: Tensor, amax: Tensor, num_bits: int, unsigned: bool) -> float:
    quantized = fake_quantize(centers, amax, num_bits, unsigned)
    return float(((quantized - centers) ** 2 * weights).mean())
