"""Weights of a file: raw float16 only."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor

if TYPE_CHECKING:
    from onnx import GraphProto

__all__ = ["read_tensors"]


def read_tensors(proto: GraphProto) -> Mapping[str, Tensor]:
    """Name to float16 tensor.

    Raises:
        ValueError: One is of another type, not stored as raw bytes in the file, of another length
            than its shape says, not finite, or named twice.
    """
    from onnx import TensorProto

    found: dict[str, Tensor] = {}
    for tensor in proto.initializer:
        name, dims = tensor.name, [int(d) for d in tensor.dims]
        if tensor.data_type != TensorProto.FLOAT16:
            kind = TensorProto.DataType.Name(tensor.data_type)
            raise ValueError(f"initializer {name} is {kind}; the engine reads FLOAT16")
        if tensor.data_location == TensorProto.EXTERNAL or not tensor.HasField("raw_data"):
            raise ValueError(f"initializer {name} is not in raw_data, where the engine reads it")
        if min(dims, default=1) < 1 or len(tensor.raw_data) != 2 * math.prod(dims):
            raise ValueError(f"initializer {name} of shape {dims} has {len(tensor.raw_data)} bytes")
        if name in found:
            raise ValueError(f"two initializers are called {name}")
        values = np.frombuffer(tensor.raw_data, "<f2").reshape(dims)
        if not np.isfinite(values).all():
            raise ValueError(f"initializer {name} holds NaN or infinity")
        found[name] = torch.from_numpy(values.astype(np.float16))
    return found
