"""Weights of a portable file: matrices ``[kernel · in, out]`` of uint8, int8 or float16."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from bevquant_export._cpu import stored_weights
from bevquant_export.sparse._graph import Conv
from bevquant_int8sim import quantize

if TYPE_CHECKING:
    from onnx import TensorProto

_LIMIT = 2**31
_STEPS = 127
_TYPES = {2: (np.uint8, 128), 3: (np.int8, 0)}  # by the number that onnx.TensorProto gives them


def float_matrix(node: Conv) -> np.ndarray[Any, Any]:
    """float16."""
    matrix: np.ndarray[Any, Any] = _matrix(node.weight).numpy()
    return matrix


def integer_matrix(node: Conv, weights: str) -> np.ndarray[Any, Any]:
    """uint8 with zero point 128, or int8 with zero point 0: see `Graph.weights`."""
    (q, bias), (_, scale) = node.integers, node.scales
    largest = q.long().abs().flatten(1).sum(1) * 128 + bias.long().abs()
    if int(largest.max()) >= _LIMIT:
        channel = int(largest.argmax())
        raise ValueError(
            f"{node.name}: sums of output channel {channel} may reach {int(largest[channel])}, "
            "beyond int32, mostly by its bias; scale the layers around it, or disable() its "
            "quantizers"
        )
    if not torch.equal(quantize(_as_half(q, scale).float(), scale, axis=0), q):
        raise ValueError(
            f"{node.name}: float16 does not hold the integers of its weight: a channel's range is "
            "too small; scale the layers around it, or disable() its quantizers"
        )
    return stored_weights(_matrix(q).numpy(), weights)[0]


def read_weight(
    name: str, attributes: Mapping[str, Any], tensors: Mapping[str, TensorProto]
) -> Tensor:
    """float16 KRSC of a convolution; integers become the values that they stand for."""
    key = f"{name}.weight"
    tensor = tensors.get(key)
    shape = (int(attributes["out_channels"]), *attributes["kernel_size"], -1)
    if tensor is None or len(tensor.dims) != 2:
        raise ValueError(f"initializer {key} is missing, or no matrix")
    if attributes["precision"] != "int8":
        return _krsc(read_half(key, tensors), shape, name)
    if tensor.data_type not in _TYPES or len(tensor.raw_data) != math.prod(tensor.dims):
        raise ValueError(f"initializer {key} is not UINT8 or INT8 of its shape")
    dtype, zero = _TYPES[tensor.data_type]
    raw = np.frombuffer(tensor.raw_data, dtype)
    q = _krsc(torch.from_numpy(raw.reshape(list(tensor.dims)).astype(np.int16)), shape, name)
    ranges = torch.tensor(attributes["weight_dynamic_ranges"], dtype=torch.float64)
    if tuple(ranges.shape) != (len(q),):
        raise ValueError(f"{name}: {ranges.numel()} weight ranges for {len(q)} channels")
    return _as_half(q - zero, ranges / _STEPS)


def read_half(name: str, tensors: Mapping[str, TensorProto]) -> Tensor:
    """A float16 initializer."""
    tensor = tensors.get(name)
    if tensor is None:
        raise ValueError(f"initializer {name} is missing")
    if tensor.data_type != 10 or len(tensor.raw_data) != 2 * math.prod(tensor.dims):
        raise ValueError(f"initializer {name} is not FLOAT16 of its shape")
    values = np.frombuffer(tensor.raw_data, "<f2").reshape(list(tensor.dims)).astype(np.float16)
    if not np.isfinite(values).all():
        raise ValueError(f"initializer {name} holds NaN or infinity")
    return torch.from_numpy(values)


def _matrix(weight: Tensor) -> Tensor:
    return weight.reshape(len(weight), -1).t().contiguous()


def _krsc(matrix: Tensor, shape: tuple[int, ...], name: str) -> Tensor:
    try:
        return matrix.t().reshape(shape).contiguous()
    except RuntimeError as error:
        raise ValueError(f"{name}: a weight of shape {list(matrix.shape)} for {shape}") from error


def _as_half(q: Tensor, scale: Tensor) -> Tensor:
    return (q.double() * scale.view(-1, 1, 1, 1, 1)).half()
