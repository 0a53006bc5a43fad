"""What a layer's weights tell: how many, of which dtype, and how large a sum can grow."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor, nn

from ._call import DTYPES, Value

__all__ = ["count", "parameter_counts", "weight_attributes"]

_STORED = {torch.int8: "qint8", torch.int16: "qint16"}


def count(value: Any) -> int:
    """Number of elements of a tensor, 0 of anything else."""
    return value.numel() if isinstance(value, Tensor) else 0


def parameter_counts(module: nn.Module) -> tuple[int, int]:
    """Weights and bias values of a layer, by the names of its parameters or tensors."""
    if hasattr(module, "weight"):
        return count(module.weight), count(getattr(module, "bias", None))
    biases = sum(p.numel() for name, p in module.named_parameters() if "bias" in name)
    return sum(p.numel() for p in module.parameters()) - biases, biases


def weight_attributes(module: nn.Module, part: nn.Module, input_dtype: str) -> dict[str, Value]:
    """Attributes ``weight_dtype`` and, for qint16 inputs, ``weight_l1``.

    ``weight_l1`` is the largest Σ|w| of a filter in integer steps of amax / 127.5, rounded up: the
    accumulator cannot exceed it times 32768. Weights that are integers already are summed as they
    are; vectors, as of a batch norm, have none.
    """
    found: dict[str, Value] = {}
    for holder in (module, part):
        dtype = getattr(getattr(holder, "weight_fake_quant", None), "dtype", None)
        if isinstance(dtype, str) and dtype in DTYPES:
            found["weight_dtype"] = str(dtype)
    weight = getattr(part, "weight", None)
    if isinstance(weight, Tensor) and weight.dtype in _STORED:
        found["weight_dtype"] = _STORED[weight.dtype]
    if input_dtype == "qint16" and isinstance(weight, Tensor) and weight.ndim > 1:
        filters = weight.detach().to(torch.float64).flatten(1).abs()
        if not weight.is_floating_point():
            found["weight_l1"] = int(filters.sum(1).max())
        else:
            steps = filters.amax(1).clamp(min=torch.finfo(torch.float64).tiny) / 127.5
            found["weight_l1"] = math.ceil(float((filters.sum(1) / steps).max()))
    return found
