r"""Types for a strongly typed engine: float16, but float32 from pair to pair.

TensorRT 11 takes the type of every tensor from the file. Here inputs, outputs and all float
arithmetic become float16; what an int8 kernel computes stays float32:

* QuantizeLinear and DequantizeLinear, whose scales float16 would round to 11 bits (other integers),
  or below 2⁻¹⁴ to fewer, and of which float16 ones in front of a Gemm give NaN in TensorRT 10;
* layers between them, with their float32 biases, and what moves, adds or clamps between them;
* scores that something is chosen by (TopK, ArgMax, a comparison), back to the layer that made them:
  float16 has ties where the model has none, and other choices make other results altogether.

Between a DequantizeLinear and the next QuantizeLinear the engine holds no float tensor, so their
type costs nothing. A Cast stands where the two meet.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import torch
from torch import Tensor

from bevquant_graph import map_leaves

LARGEST_HALF = 65504.0
_FLOAT, _HALF = 1, 10
_PAIRS = {"QuantizeLinear", "DequantizeLinear"}
_LAYERS = {"Conv", "ConvTranspose", "Gemm", "MatMul"}
# What an engine fuses into the layer or the pair beside it.
_BETWEEN = set(
    "Relu Clip LeakyRelu Add Concat MaxPool AveragePool GlobalAveragePool Resize Reshape Transpose "
    "Slice Pad DepthToSpace Expand Tile Identity Flatten Squeeze Unsqueeze".split()
)
# What computes nothing: before a pair and something in half precision it stays float32 for both.
_LAYOUT = set("Reshape Transpose Slice Squeeze Unsqueeze Flatten Identity".split())
CHOICES = set("TopK ArgMax ArgMin Greater GreaterOrEqual Less LessOrEqual Equal".split())
_SCORES = _BETWEEN | set(
    "Sigmoid Softmax LogSoftmax Log Exp Mul Sub Div Max Min Neg Abs Where ReduceMax Gather "
    "GatherElements GatherND ScatterElements ScatterND".split()
)
_EPILOGUE = {"Add", "Relu", "Clip", "LeakyRelu"}
# Inputs that are float32 whatever the data are.
_SINGLE_INPUTS = {"Resize": (1, 2), "Upsample": (1,)}


def half_typed(proto: Any) -> Any:
    """The model with half types, checked in full and with strict shape inference.

    Args:
        proto: All floats float32; it is changed.

    Raises:
        ValueError: A constant overflows float16, or a node holds a graph of its own.
    """
    import onnx

    for node in proto.graph.node:
        if any(a.type in (5, 10) for a in node.attribute):
            raise ValueError(
                f"{node.name or node.op_type}: it holds a graph of its own, whose types are not "
                "followed; export the model without control flow"
            )
    _Typing(proto).run()
    onnx.checker.check_model(proto, full_check=True)
    onnx.shape_inference.infer_shapes(proto, check_type=True, strict_mode=True, data_prop=True)
    return proto


def in_half(args: Any) -> Any:
    """Inputs with every float tensor rounded to float16, in float32."""

    def rounded(value: Any) -> Any:
        is_float = isinstance(value, Tensor) and value.dtype == torch.float32
        return value.half().float() if is_float else value

    return map_leaves(rounded, args)


class _Typing:
    def __init__(self, proto: Any) -> None:
        import onnx

        self.graph = proto.graph
        inferred = onnx.shape_inference.infer_shapes(proto, check_type=True, strict_mode=True)
        values = (*inferred.graph.value_info, *inferred.graph.input, *inferred.graph.output)
        self.floats = {v.name for v in values if v.type.tensor_type.elem_type == _FLOAT}
        self.constants = {t.name: t for t in self.graph.initializer if t.data_type == _FLOAT}
        self.floats |= set(self.constants)
        self.opset = next(o.version for o in proto.opset_import if o.domain in ("", "ai.onnx"))
        self.makers = {name: node for node in self.graph.node for name in node.output}
        self.readers: dict[str, list[Any]] = {}
        for node in self.graph.node:
            for name in node.input:
                self.readers.setdefault(name, []).append(node)
        self.single = self._single_nodes()
        self.halves = {v.name for v in self.graph.input if v.name in self.floats}
        self.made: dict[str, str] = {}
        self.taken = {*self.makers, *(v.name for v in self.graph.input), *self.constants}

    def run(self) -> None:
        nodes = []
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
            if port.name in self.floats:
                port.type.tensor_type.elem_type = _HALF

    def _single_nodes(self) -> set[str]:
        """First outputs of the nodes that stay float32."""
        found = {n.output[0] for n in self.graph.node if n.op_type in _PAIRS}
        for node in self.graph.node:
            if node.op_type in _LAYERS and self._from_pair(node.input[0], found):
                weight = self.makers.get(node.input[1])
                if weight is not None and weight.op_type == "DequantizeLinear":
                    found.add(node.output[0])
            elif node.op_type in _BETWEEN and self._between(node, found):
                found.add(node.output[0])
            elif not self._takes_halves(node):
                found.add(node.output[0])
        # What lies between must end in a pair, or be part of the layer in front: the last of a
        # chain first.
        for node in reversed(self.graph.node):
            between = node.op_type in _BETWEEN and node.output[0] in found
            if between and not self._ends(node, found) and not self._is_epilogue(node):
                found.discard(node.output[0])
        choices = [node for node in self.graph.node if node.op_type in CHOICES]
        while choices:
            node = choices.pop()
            found.add(node.output[0])
            makers = [self.makers[name] for name in node.input if name in self.makers]
            choices += [m for m in makers if m.op_type in _SCORES and m.output[0] not in found]
        return found

    def _is_epilogue(self, node: Any) -> bool:
        """Whether a sum or an activation is computed by the kernel of the layer in front of it."""
        makers = [self.makers[name] for name in node.input if name in self.makers]
        return node.op_type in _EPILOGUE and any(
            maker.op_type in _LAYERS or self._is_epilogue(maker)
            for maker in makers
            if len(self.readers[maker.output[0]]) == 1
        )

    def _from_pair(self, name: str, found: set[str]) -> bool:
        maker = self.makers.get(name)
        return maker is not None and maker.output[0] in found

    def _between(self, node: Any, found: set[str]) -> bool:
        read = [name for name in node.input if name in self.floats and name not in self.constants]
        return bool(read) and all(self._from_pair(name, found) for name in read)

    def _ends(self, node: Any, found: set[str]) -> bool:
        readers = self.readers.get(node.output[0], [])
        single = [reader.output[0] in found for reader in readers]
        return any(single) if node.op_type in _LAYOUT else bool(single) and all(single)

    def _takes_halves(self, node: Any) -> bool:
        from onnx import defs

        if node.op_type == "Constant" or node.domain not in ("", "ai.onnx"):
            return True
        schema = defs.get_schema(node.op_type, self.opset, "")
        types = {c.type_param_str: c.allowed_type_strs for c in schema.type_constraints}
        ports = [(name, port) for name, port in zip(node.input, schema.inputs, strict=False)]
        ports += [(name, port) for name, port in zip(node.output, schema.outputs, strict=False)]
        return all(
            "tensor(float16)" in types.get(port.type_str, ["tensor(float16)"])
            for name, port in ports
            if name in self.floats
        )

    def _read(self, node: Any, half: bool) -> Iterator[Any]:
        """Give a node its inputs in its own type; yields the Casts."""
        from onnx import helper

        for slot, name in enumerate(node.input):
            if name not in self.floats or (
                half and slot in _SINGLE_INPUTS.get(node.op_type, ()) and name in self.constants
            ):
                continue
            wants_half = half and slot not in _SINGLE_INPUTS.get(node.op_type, ())
            if name in self.constants:
                node.input[slot] = self._constant(name) if wants_half else name
            elif wants_half != (name in self.halves):
                cast = f"{name}.{'half' if wants_half else 'single'}"
                if cast not in self.made:
                    self.made[cast] = self._unique(cast)
                    to = _HALF if wants_half else _FLOAT
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
                _in_half(numpy_helper.to_array(self.constants[name]), name), self.made[made]
            )
            self.graph.initializer.append(tensor)
        return self.made[made]

    def _retyped(self, node: Any) -> None:
        """Types that a node's attributes say."""
        from onnx import helper, numpy_helper

        made = node.output[0]
        if node.op_type == "ConstantOfShape" and not node.attribute and made in self.floats:
            zero = numpy_helper.from_array(np.zeros(1, np.float32))  # what it means by nothing
            node.attribute.append(helper.make_attribute("value", zero))
        for attribute in node.attribute:
            if node.op_type == "Cast" and attribute.name == "to" and attribute.i == _FLOAT:
                attribute.i = _HALF
            if attribute.type == 4 and attribute.t.data_type == _FLOAT:
                value = _in_half(numpy_helper.to_array(attribute.t), node.name or made)
                attribute.t.CopyFrom(numpy_helper.from_array(value, attribute.t.name))

    def _outputs(self, nodes: list[Any]) -> list[Any]:
        """Casts in front of outputs that were made in float32."""
        from onnx import helper

        made = []
        for port in self.graph.output:
            if port.name in self.floats and port.name not in self.halves:
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


def _in_half(values: Any, name: str) -> Any:
    """float16, half to even.

    Raises:
        ValueError: A finite value beyond ±65504.
    """
    finite = values[np.isfinite(values)]
    largest = float(np.abs(finite).max(initial=0.0))
    if largest > LARGEST_HALF:
        raise ValueError(
            f"{name}: the value {largest:g} overflows float16 (largest {LARGEST_HALF:g}), in which "
            "the engine computes; scale the layers around it, or quantize the layer"
        )
    return values.astype(np.float16)
