"""Constants, quantization parameters and attributes of a file's nodes, and a node as a module."""

from __future__ import annotations

import re
from dataclasses import dataclass
from functools import cached_property
from keyword import iskeyword
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from bevquant_export.qdq_reader._operators import OPERATORS
from bevquant_quantizers import AffineQuantizer, format_of

Array = Any  # numpy array of any type
STORED = {"int2": 2, "uint2": 2, "int4": 4, "uint4": 4, "int8": 8, "uint8": 8, "int16": 16,
           "uint16": 16, "int32": 32}  # fmt: skip
FLOAT8 = {"float8_e4m3fn": (4, 3), "float8_e5m2": (5, 2)}


@dataclass(frozen=True, eq=False)
class Grid:
    """Settings of a QuantizeLinear or DequantizeLinear."""

    scale: Array  # float32, with one value or one axis
    zero: Array  # Zero points, likewise
    dtype: str  # Stored type, such as ``"uint8"``
    axis: int  # Axis of several scales
    block: int = 0  # Values along `axis` that share a scale; 0 for all
    clip: tuple[int, int] | None = None  # Bounds by a Clip of the integers, within those of `dtype`

    @property
    def float_bits(self) -> tuple[int, int] | None:
        """Exponent and mantissa bits of FP8; None of integers."""
        return FLOAT8.get(self.dtype)

    @property
    def bounds(self) -> tuple[int, int]:
        """Smallest and largest stored number."""
        if self.clip is not None:
            return self.clip
        if self.float_bits is not None:
            high = int(format_of(self.float_bits).high)
            return -high, high
        bits, signed = STORED[self.dtype], not self.dtype.startswith("u")
        return (-(2 ** (bits - 1)), 2 ** (bits - 1) - 1) if signed else (0, 2**bits - 1)

    @property
    def single(self) -> bool:
        """Whether there is one scale."""
        return int(self.scale.size) == 1

    @property
    def non_negative(self) -> bool:
        """Whether no stored integer stands for a negative value."""
        return bool(np.all(self.zero == self.bounds[0]))

    def within(self, low: Array | None, high: Array | None) -> list[Array] | None:
        """Bounds of a Clip that changes no integer; None where the integers reach further.

        A tool rounds the zero point, which moves both ends by up to half a step, and the bounds
        with them.
        """
        ends = [(n - self.zero) * self.scale.astype(np.float64) for n in self.bounds]
        bottom, top, slack = ends[0].min(), ends[1].max(), 0.51 * self.scale.max()
        low, high = bottom if low is None else low, top if high is None else high
        if low > bottom + slack or high < top - slack:
            return None
        return [np.float32(min(low, bottom)), np.float32(max(high, top))]

    def same(self, other: Grid) -> bool:
        """Whether the integers of both stand for the same values."""
        axes = self.single or (self.axis, self.block) == (other.axis, other.block)
        pairs = ((self.scale, other.scale), (self.zero, other.zero))
        alike = (self.dtype, self.clip) == (other.dtype, other.clip)
        return bool(axes and alike and all(np.array_equal(a, b) for a, b in pairs))

    def spread(self, values: Array, shape: tuple[int, ...]) -> Array:
        """Scales or zero points in a shape that broadcasts to `shape`."""
        if self.single:
            return values.reshape(())
        axis = self.axis % len(shape) if -len(shape) <= self.axis < len(shape) else None
        if self.block and axis is not None:
            return np.repeat(values, self.block, axis)[
                tuple(slice(n) if i == axis else slice(None) for i, n in enumerate(shape))
            ]
        if axis is None or values.shape != (shape[axis],):
            raise ValueError(
                f"{values.size} scales along axis {self.axis} of a tensor of shape {shape}; "
                "expected one, or one per entry of the axis"
            )
        return values.reshape([-1 if i == axis else 1 for i in range(len(shape))])

    @property
    def tensors(self) -> list[Tensor]:
        """Scale and zero point as tensors."""
        return [torch.from_numpy(values) for values in (self.scale, self.zero)]

    def quantizer(self, ndim: int) -> AffineQuantizer:
        """Fake quantization by this grid of a tensor of that many axes."""
        shape = [1] * ndim
        if not self.single and self.block:
            raise ValueError("an activation has scales per block; expected per tensor or channel")
        if not self.single:
            shape[self.axis] = self.scale.size
        step, zero = (v.reshape(() if self.single else shape) for v in self.tensors)
        return AffineQuantizer(step, zero, *self.bounds, self.float_bits)


@dataclass(frozen=True, eq=False)
class Stored:
    """A constant behind DequantizeLinear: (q − z)·s."""

    integers: Array  # q, int32; float32 of FP8
    grid: Grid  # s, z and their axis

    @cached_property
    def centred(self) -> Array:
        """The int32 values q − z."""
        shape = self.integers.shape
        zero = self.grid.zero.astype(self.integers.dtype)
        return np.asarray(self.integers - self.grid.spread(zero, shape))

    @cached_property
    def value(self) -> Array:
        """The floats."""
        scale = self.grid.spread(self.grid.scale, self.integers.shape)
        return np.asarray(self.centred.astype(np.float32) * scale, np.float32)

    def transposed(self, perm: list[int]) -> Stored | None:
        """With permuted axes; None of scales per block."""
        grid = self.grid
        if grid.block:
            return None
        axis = 0 if grid.single else perm.index(grid.axis % self.integers.ndim)
        moved = Grid(grid.scale, grid.zero, grid.dtype, axis)
        return Stored(self.integers.transpose(perm), moved)


def value_of(constant: Array | Stored) -> Array:
    """A constant's floats (or integers, of one that is not quantized)."""
    return constant.value if isinstance(constant, Stored) else constant


def raw(constant: Array | Stored) -> Array:
    """A constant as it lies in the file."""
    return constant.integers if isinstance(constant, Stored) else constant


def stored(values: Array, grid: Grid) -> Array:
    """QuantizeLinear of a constant: clamp(round(x / s) + z), half to even, in float32, or FP8."""
    scale, zero = (grid.spread(v, values.shape) for v in (grid.scale, grid.zero))
    if grid.float_bits is not None:
        return format_of(grid.float_bits).rounded(torch.from_numpy(values / scale)).numpy()
    rounded = np.rint(values.astype(np.float32) / scale) + zero
    return np.asarray(np.clip(rounded, *grid.bounds)).astype(np.int32)


def dequantized(x: Tensor, step: Tensor, zero: Tensor) -> Tensor:
    """DequantizeLinear of integers that a model is given: (q − z)·s."""
    return (x.float() - zero) * step


def quantized(x: Tensor, step: Tensor, zero: Tensor, dtype: torch.dtype) -> Tensor:
    """The stored integers of values that lie on a grid: round(x / s) + z; FP8(x / s)."""
    q = x / step
    return (q if dtype.is_floating_point else torch.round(q) + zero).to(dtype)


OWN = frozenset({"QuantizeLinear", "DequantizeLinear", "Constant", "ConvTranspose"})
"""Operators without a function in the table."""


_REFUSALS = (ValueError, TypeError, KeyError, IndexError, AttributeError, RuntimeError)


class NodeError(ValueError):
    """An error whose message names its node."""


class Operator(nn.Module):
    """One node: its function, and for each input its position in the call or a constant.

    `where` is the node, for messages.
    """

    def __init__(
        self, function: Any, slots: list[Any], settings: dict[str, Any], where: str
    ) -> None:
        super().__init__()
        self.function, self.settings, self.where = function, settings, where
        self.slots: list[Any] = []
        for number, slot in enumerate(slots):
            if isinstance(slot, Tensor):
                self.register_buffer(f"constant{number}", slot)
                slot = f"constant{number}"
            self.slots.append(slot)

    def forward(self, *values: Any) -> Any:
        """The function of the values."""
        known: dict[Any, Any] = {**self._buffers, **dict(enumerate(values))}
        inputs = [known[s] if isinstance(s, int | str) else s for s in self.slots]
        try:
            return self.function(*inputs, **self.settings)
        except _REFUSALS as error:
            if type(error) not in _REFUSALS:
                raise  # of torch's own, which a capture reads
            raise NodeError(f"{self.where}: {error}") from error


def activations(proto: Any) -> dict[str, tuple[str, list[Any]]]:
    """Tensors that a Relu or Clip of a float file makes, with its operator and bounds."""
    from onnx import numpy_helper

    known = {entry.name: numpy_helper.to_array(entry) for entry in proto.graph.initializer}
    found = {}
    for node in proto.graph.node:
        if node.op_type == "Constant":
            known[node.output[0]] = constant_of(attributes_of(node))
        elif node.op_type in ("Relu", "Clip") and all(n in known for n in node.input[1:] if n):
            bounds = [known[n] if n else None for n in node.input[1:]]
            found[node.output[0]] = (node.op_type, [0, *bounds])
    return found


def attributes_of(node: Any) -> dict[str, Any]:
    """Attributes by name, texts as such and tensors as arrays."""
    from onnx import TensorProto, helper, numpy_helper

    found = {a.name: helper.get_attribute_value(a) for a in node.attribute}
    for name, value in found.items():
        if isinstance(value, bytes):
            found[name] = value.decode()
        elif isinstance(value, TensorProto):
            found[name] = as_float32(numpy_helper.to_array(value))
    return found


def identifier(name: str) -> str:
    """A name of the file as one of Python."""
    text = re.sub(r"\W+", "_", name, flags=re.ASCII).strip("_") or "value"
    text = f"{text}_" if iskeyword(text) or text == "self" else text
    return text if not text[0].isdigit() else f"n{text}"


def where_of(node: Any, number: int) -> str:
    """A node, as messages name it."""
    return f"node {node.name or number} ({node.op_type})"


def refusal(node: Any, where: str) -> str:
    """The message for an operator that is not supported."""
    op = node.op_type
    if op.startswith("QLinear") or op in ("ConvInteger", "MatMulInteger", "DynamicQuantizeLinear"):
        return (
            f"{where}: an operator of integers; expected QuantizeLinear and DequantizeLinear "
            "around float operators. Quantize with quant_format=QuantFormat.QDQ and static ranges"
        )
    domain = f" of domain {node.domain}" if node.domain else ""
    return (
        f"{where}: operator {op}{domain}; expected one of ONNX's "
        f"{', '.join(sorted(OPERATORS.keys() | OWN))}. Cut the model before it, or write it "
        "with these"
    )


def constant_of(attributes: dict[str, Any]) -> Array:
    """The value of a Constant node."""
    kind, value = next(iter(attributes.items()))
    types = {"value_int": np.int64, "value_ints": np.int64}
    return value if kind == "value" else np.array(value, types.get(kind, np.float32))


def as_float32(value: Array) -> Array:
    """The values, floats as float32, but for FP8."""
    floats = value.dtype.kind == "f" or str(value.dtype) == "bfloat16"
    return value.astype(np.float32) if floats and str(value.dtype) not in FLOAT8 else value
