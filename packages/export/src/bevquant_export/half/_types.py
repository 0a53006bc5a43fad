r"""Types for a strongly typed engine: float16 where the values of every frame fit, else float32.

TensorRT 11 takes the type of every tensor from the file. Inputs, outputs and float arithmetic are
float16 where that is safe. The parts of an int8 kernel stay float32:

* QuantizeLinear and DequantizeLinear: float16 would round their scales to 11 bits (other integers),
  or to fewer below 2⁻¹⁴, and gives NaN in front of a Gemm in TensorRT 10;
* layers between them, with their float32 biases, and layout operators, sums and clamps between
  them.

Between a DequantizeLinear and the next QuantizeLinear the engine has no float tensor, so their type
costs nothing. A Cast separates the two types. `single_nodes` decides on the other nodes.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from typing import Any

import numpy as np
import onnx_ir as ir

from bevquant_export.half._intervals import RENAMED
from bevquant_export.half._limits import LARGEST_HALF, SINGLE_INPUTS, is_single
from bevquant_export.half._single import Known, Measure, Singles

_HALF, _SINGLE = ir.DataType.FLOAT16, ir.DataType.FLOAT


@dataclass(frozen=True)
class Typed:
    """A model with its types."""

    proto: Any
    # float32 parts other than pairs, by node or port, with the reason.
    reasons: tuple[str, ...]
    halves: int


def half_typed(
    proto: Any,
    known: Known,
    measure: Measure | None = None,
    keep: Collection[str] = (),
    *,
    whole: bool = False,
) -> Typed:
    """The model with half types, checked in full and with strict shape inference.

    Arguments are those of `Singles`.
    """
    import onnx

    inferred = onnx.shape_inference.infer_shapes(proto, check_type=True, strict_mode=True)
    model = ir.from_proto(inferred)
    for node in model.graph:
        if any(a.type in _GRAPHS for a in node.attributes.values()):
            raise ValueError(
                f"{node.name or node.op_type}: it holds a graph of its own, whose types are not "
                "followed; export the model without control flow"
            )
    singles = Singles(model.graph, known, measure, keep, whole=whole)
    halves = _Writer(model.graph, singles).run()
    made = ir.to_proto(model)
    del made.graph.value_info[:]
    onnx.checker.check_model(made, full_check=True)
    onnx.shape_inference.infer_shapes(made, check_type=True, strict_mode=True, data_prop=True)
    if singles.reasons:
        made.metadata_props.add(key="float32", value="\n".join(singles.reasons))
    return Typed(made, tuple(singles.reasons), halves)


class _Writer:
    """Writes the types that `Singles` chose."""

    def __init__(self, graph: ir.Graph, singles: Singles) -> None:
        self.graph, self.single, self.ports = graph, singles.single, singles.ports
        self.halves = self.ports.intersection(graph.inputs)
        self.made: dict[tuple[ir.Value, bool], ir.Value] = {}
        values = (*graph.inputs, *graph.initializers.values())
        self.taken = {v.name for v in (*values, *(o for node in graph for o in node.outputs))}

    def run(self) -> int:
        """Write the types; returns how many operations compute in float16."""
        count = 0
        for node in self.graph:
            half = node not in self.single
            count += half and is_single(node.outputs[0]) and node.op_type not in RENAMED
            self._read(node, half)
            if half:
                _retype(node)
                self.halves.update(filter(is_single, node.outputs))
        for slot, value in enumerate(self.graph.outputs):
            if value in self.ports and value not in self.halves:
                self._half_output(slot, value)
        # Float32 constants that only their float16 copies replace: nothing reads them.
        for value in [v for v in self.graph.initializers.values() if not v.uses()]:
            del self.graph.initializers[value.name or ""]
        for value in self.ports:
            value.dtype = _HALF
        return count

    def _read(self, node: ir.Node, half: bool) -> None:
        """Give a node its inputs in its own type, behind Casts where needed."""
        single = SINGLE_INPUTS.get(node.op_type, ())
        for slot, value in enumerate(node.inputs):
            if not is_single(value):
                continue
            wanted = half and slot not in single
            if value.is_initializer():
                if wanted:
                    node.replace_input_with(slot, self._constant(value))
            elif wanted != (value in self.halves):
                node.replace_input_with(slot, self._cast(value, wanted, node))

    def _cast(self, value: ir.Value, half: bool, reader: ir.Node) -> ir.Value:
        if (value, half) not in self.made:
            name = self._unique(f"{value.name}.{'half' if half else 'single'}")
            made = ir.Value(name=name, type=ir.TensorType(_HALF if half else _SINGLE))
            self.graph.insert_before(reader, _cast_node(value, made, name))
            self.made[value, half] = made
        return self.made[value, half]

    def _constant(self, value: ir.Value) -> ir.Value:
        if (value, True) not in self.made:
            assert value.const_value is not None
            name = self._unique(f"{value.name}.half")
            tensor = ir.tensor(_in_half(value.const_value.numpy()), name=name)
            self.made[value, True] = made = ir.Value(name=name, const_value=tensor)
            self.graph.register_initializer(made)
        return self.made[value, True]

    def _half_output(self, slot: int, value: ir.Value) -> None:
        """A Cast in front of a float16 output whose producer is float32."""
        made = ir.Value(name=value.name, type=ir.TensorType(_HALF), shape=value.shape)
        value.name = self._unique(f"{value.name}.single")
        self.graph.append(_cast_node(value, made, value.name))
        self.graph.outputs[slot] = made
        self.ports.remove(value)

    def _unique(self, name: str) -> str:
        while name in self.taken:
            name += "_"
        self.taken.add(name)
        return name


_GRAPHS = (ir.AttributeType.GRAPH, ir.AttributeType.GRAPHS)


def _cast_node(value: ir.Value, made: ir.Value, name: str) -> ir.Node:
    to = {"to": int(made.dtype or _HALF)}
    return ir.node("Cast", [value], to, outputs=[made], name=f"{name}.Cast")


def _retype(node: ir.Node) -> None:
    """Types in a node's attributes."""
    attributes = node.attributes
    if node.op_type == "ConstantOfShape" and not attributes and is_single(node.outputs[0]):
        # What it means by nothing.
        attributes.add(ir.AttrTensor("value", ir.tensor(np.zeros(1, np.float32), name="")))
    if node.op_type == "Cast" and attributes["to"].value == _SINGLE:
        attributes.add(ir.AttrInt64("to", int(_HALF)))
    for held in [*attributes.values()]:
        if held.type == ir.AttributeType.TENSOR and held.value.dtype == _SINGLE:
            half = ir.tensor(_in_half(held.value.numpy()), name=held.value.name)
            attributes.add(ir.AttrTensor(held.name, half))


def _in_half(values: Any) -> Any:
    """float16, half to even, finite values within ±65,504."""
    finite = np.clip(values, -LARGEST_HALF, LARGEST_HALF)
    return np.where(np.isfinite(values), finite, values).astype(np.float16)
