"""A node as a module of torch, and what its messages, attributes and constants say."""

from __future__ import annotations

import re
from typing import Any

import numpy as np
from torch import Tensor, nn

from bevquant_export.qdq_reader._constants import Array
from bevquant_export.qdq_reader._operators import OPERATORS

OWN = frozenset({"QuantizeLinear", "DequantizeLinear", "Constant", "ConvTranspose"})
"""Operators without a function in the table."""


class Operator(nn.Module):
    """One node.

    Args:
        function: What it computes.
        slots: For each input the place among the call's arguments, a constant, or None.
        settings: Attributes.
        where: The node, for messages.
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
        except (ValueError, TypeError, KeyError, RuntimeError) as error:
            if type(error) not in (ValueError, TypeError, KeyError, RuntimeError):
                raise  # of torch's own, which a capture reads
            raise ValueError(f"{self.where}: {error}") from error


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


def item(values: Any, index: int) -> Any:
    """One of several outputs."""
    return values[index]


def identifier(name: str) -> str:
    """A name of the file as one of Python."""
    text = re.sub(r"\W+", "_", name, flags=re.ASCII).strip("_") or "value"
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
    """The values, floats as float32."""
    floats = value.dtype.kind == "f" or str(value.dtype) == "bfloat16"
    return value.astype(np.float32) if floats else value
