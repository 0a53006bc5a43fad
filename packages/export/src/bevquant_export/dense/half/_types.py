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

from collections.abc import Collection, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np

from bevquant_export.dense.half._intervals import RENAMED
from bevquant_export.dense.half._limits import FLOAT, LARGEST_HALF, SINGLE_INPUTS, FloatGraph
from bevquant_export.dense.half._single import Known, Measure, Singles

_HALF = 10


@dataclass(frozen=True)
class Typed:
    """A model with its types.

    Attributes:
        proto: The model.
        reasons: Float32 parts other than pairs, by node or port, with the reason.
        halves: Number of float16 operations.
    """

    proto: Any
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

    Args:
        proto: All floats float32; it is changed.
        known: Tensors of the file to the largest value of any calibration frame, and whether all
            were whole numbers.
        measure: Sizes of tensors in several frames, see `Singles`.
        keep: Tensors that are float32, with their producers up to the nearest layers and pairs.
        whole: Up to inputs and pairs, layers included.

    Raises:
        ValueError: A node has a subgraph.
    """
    import onnx

    for node in proto.graph.node:
        if any(a.type in (5, 10) for a in node.attribute):
            raise ValueError(
                f"{node.name or node.op_type}: it holds a graph of its own, whose types are not "
                "followed; export the model without control flow"
            )
    graph = FloatGraph(proto)
    singles = Singles(graph, known, measure, keep, whole=whole)
    halves = _Writer(graph, singles).run()
    onnx.checker.check_model(proto, full_check=True)
    onnx.shape_inference.infer_shapes(proto, check_type=True, strict_mode=True, data_prop=True)
    if singles.reasons:
        proto.metadata_props.add(key="float32", value="\n".join(singles.reasons))
    return Typed(proto, tuple(singles.reasons), halves)


class _Writer:
    """Writes the types that `Singles` chose."""

    def __init__(self, graph: FloatGraph, singles: Singles) -> None:
        self.graph, self.floats, self.constants = graph.graph, graph.floats, graph.constants
        self.single, self.ports = singles.single, singles.ports
        self.halves = self.ports & {v.name for v in self.graph.input}
        self.made: dict[str, str] = {}
        self.taken = {*graph.makers, *(v.name for v in self.graph.input), *self.constants}

    def run(self) -> int:
        """Write the types; returns how many operations compute in float16."""
        nodes = []
        halves = sum(
            n.output[0] not in self.single and n.output[0] in self.floats
            and n.op_type not in RENAMED
            for n in self.graph.node
        )  # fmt: skip
        for node in self.graph.node:
            half = node.output[0] not in self.single
            before = [*self._read(node, half)]
            if half:
                self._retyped(node)
                self.halves.update(name for name in node.output if name in self.floats)
            nodes += [*before, node]
        nodes += self._outputs(nodes)
        used = {name for node in nodes for name in node.input}
        kept = [t for t in self.graph.initializer if t.name in used]
        del self.graph.node[:], self.graph.initializer[:], self.graph.value_info[:]
        self.graph.node.extend(nodes)
        self.graph.initializer.extend(kept)
        for port in (*self.graph.input, *self.graph.output):
            if port.name in self.ports:
                port.type.tensor_type.elem_type = _HALF
        return halves

    def _read(self, node: Any, half: bool) -> Iterator[Any]:
        """Give a node its inputs in its own type; yields the Casts."""
        from onnx import helper

        for slot, name in enumerate(node.input):
            if name not in self.floats or (
                half and slot in SINGLE_INPUTS.get(node.op_type, ()) and name in self.constants
            ):
                continue
            wants_half = half and slot not in SINGLE_INPUTS.get(node.op_type, ())
            if name in self.constants:
                node.input[slot] = self._constant(name) if wants_half else name
            elif wants_half != (name in self.halves):
                cast = f"{name}.{'half' if wants_half else 'single'}"
                if cast not in self.made:
                    self.made[cast] = self._unique(cast)
                    to = _HALF if wants_half else FLOAT
                    yield helper.make_node(
                        "Cast", [name], [self.made[cast]], name=f"{self.made[cast]}.Cast", to=to
                    )
                node.input[slot] = self.made[cast]

    def _constant(self, name: str) -> str:
        from onnx import numpy_helper

        made = f"{name}.half"
        if made not in self.made:
            self.made[made] = self._unique(made)
            tensor = numpy_helper.from_array(
                _in_half(numpy_helper.to_array(self.constants[name])), self.made[made]
            )
            self.graph.initializer.append(tensor)
        return self.made[made]

    def _retyped(self, node: Any) -> None:
        """Types in a node's attributes."""
        from onnx import helper, numpy_helper

        made = node.output[0]
        if node.op_type == "ConstantOfShape" and not node.attribute and made in self.floats:
            zero = numpy_helper.from_array(np.zeros(1, np.float32))  # what it means by nothing
            node.attribute.append(helper.make_attribute("value", zero))
        for attribute in node.attribute:
            if node.op_type == "Cast" and attribute.name == "to" and attribute.i == FLOAT:
                attribute.i = _HALF
            if attribute.type == 4 and attribute.t.data_type == FLOAT:
                value = _in_half(numpy_helper.to_array(attribute.t))
                attribute.t.CopyFrom(numpy_helper.from_array(value, attribute.t.name))

    def _outputs(self, nodes: list[Any]) -> list[Any]:
        """Casts in front of float16 outputs whose producers are float32."""
        from onnx import helper

        made = []
        for port in self.graph.output:
            if port.name in self.ports and port.name not in self.halves:
                inner = self._unique(f"{port.name}.single")
                for node in nodes:
                    for names in (node.input, node.output):
                        names[:] = [inner if name == port.name else name for name in names]
                made.append(
                    helper.make_node("Cast", [inner], [port.name], name=f"{inner}.Cast", to=_HALF)
                )
        return made

    def _unique(self, name: str) -> str:
        while name in self.taken:
            name += "_"
        self.taken.add(name)
        return name


def _in_half(values: Any) -> Any:
    """float16, half to even, finite values within ±65,504."""
    finite = np.clip(values, -LARGEST_HALF, LARGEST_HALF)
    return np.where(np.isfinite(values), finite, values).astype(np.float16)
