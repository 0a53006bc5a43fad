r"""Types for a strongly typed engine: float16 where every frame's values fit, else float32.

TensorRT 11 takes the type of every tensor from the file. Inputs, outputs and float arithmetic are
float16 where that is safe; what an int8 kernel computes stays float32:

* QuantizeLinear and DequantizeLinear, whose scales float16 would round to 11 bits (other integers),
  or below 2⁻¹⁴ to fewer, and of which float16 ones in front of a Gemm give NaN in TensorRT 10;
* layers between them, with their float32 biases, and what moves, adds or clamps between them.

Between a DequantizeLinear and the next QuantizeLinear the engine holds no float tensor, so their
type costs nothing. A Cast stands where the two meet. Float operations beyond these are decided by
`Bounds`, from constants, ranges of pairs and the ranges of all calibration frames; no verdict rests
on the example. float32 are, with a reason for each in `Typed.reasons`:

* values that may lie beyond ±65,504, or whose range is not known;
* whole numbers (ids, cells of a grid) that may lie beyond ±2,048, where float16 skips some;
* a quotient, a logarithm or a negative power whose argument may lie below 2⁻¹⁷, where float16 has
  too few digits (a guard of 1e-12 is 0), a constant below it, and what computes the argument;
* a sine or cosine of an argument that may lie beyond ±16, with what computes it;
* scores that something is chosen by (TopK, ArgMax, a comparison) and values that become places
  (Floor, Round, a Cast to integers), back to the layer that made them: float16 has ties where the
  model has none, and other choices make other results altogether.

A mask of large negative numbers in front of a softmax alone becomes −32,768, which has the same
softmax. Bounds of a clamp beyond the values' own range become ±65,504.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from bevquant_export.dense._bound import RENAMED
from bevquant_export.dense._bounds import Bounds
from bevquant_export.dense._half_limits import (
    LARGEST_HALF,
    SINGLE_INPUTS,
    UNKNOWN_RANGE,
    argument,
    beyond,
    overflow,
)
from bevquant_graph import map_leaves

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
_PLACES = {"Floor", "Ceil", "Round", "Mod"}
_ARGUMENTS = _SCORES | set(
    "Sqrt Reciprocal Pow Sin Cos Tanh Sum Mean CumSum ReduceSum ReduceMean ReduceMin ReduceL1 "
    "ReduceL2 ReduceSumSquare ReduceProd Floor Ceil Round Mod Cast".split()
)
_FEW_TERMS = 8  # a product with a matrix of coordinates
_MASK, _BESIDE_MASK = -32768.0, 16384.0
_INTEGERS = {2, 3, 4, 5, 6, 7, 12, 13}
_EPILOGUE = {"Add", "Relu", "Clip", "LeakyRelu"}


Known = Mapping[str, tuple[float, bool]]


@dataclass(frozen=True)
class Typed:
    """A model with its types.

    Attributes:
        proto: The model.
        reasons: What is float32 outside of the pairs, by node or port, and why.
        halves: How many operations compute in float16.
    """

    proto: Any
    reasons: tuple[str, ...]
    halves: int


def half_typed(proto: Any, known: Known, keep: Collection[str] = ()) -> Typed:
    """The model with half types, checked in full and with strict shape inference.

    Args:
        proto: All floats float32; it is changed.
        known: Tensors of the file to the largest value of any calibration frame, and whether all
            were whole numbers.
        keep: Tensors that are computed in float32, back to the layers and pairs before them.

    Raises:
        ValueError: A node holds a graph of its own.
    """
    import onnx

    for node in proto.graph.node:
        if any(a.type in (5, 10) for a in node.attribute):
            raise ValueError(
                f"{node.name or node.op_type}: it holds a graph of its own, whose types are not "
                "followed; export the model without control flow"
            )
    typing = _Typing(proto, known, keep)
    halves = typing.run()
    onnx.checker.check_model(proto, full_check=True)
    onnx.shape_inference.infer_shapes(proto, check_type=True, strict_mode=True, data_prop=True)
    if typing.reasons:
        proto.metadata_props.add(key="float32", value="\n".join(typing.reasons))
    return Typed(proto, tuple(typing.reasons), halves)


def half_inputs(proto: Any) -> set[str]:
    """Inputs of a model that are float16."""
    return {p.name for p in proto.graph.input if p.type.tensor_type.elem_type == _HALF}


def in_half(args: Any, names: Collection[str], halves: Collection[str]) -> Any:
    """Inputs, those of float16 rounded to it, in float32.

    Args:
        args: As a call takes them.
        names: Of the tensors among them, in order.
        halves: Names of those that are float16 in the file.
    """
    order = iter(names)

    def rounded(value: Any) -> Any:
        if not isinstance(value, Tensor):
            return value
        is_half = next(order) in halves and value.dtype == torch.float32
        return value.half().float() if is_half else value

    return map_leaves(rounded, args)


class _Typing:
    def __init__(self, proto: Any, known: Known, keep: Collection[str]) -> None:
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
        shapes = {
            v.name: [d.dim_value if d.HasField("dim_value") else None for d in dims]
            for v in values
            if (dims := v.type.tensor_type.shape.dim) or v.type.tensor_type.HasField("shape")
        }
        self.bounds = Bounds(self.graph, shapes, known)
        if self._lower_masks():
            self.bounds = Bounds(self.graph, shapes, known)
        self.reasons: list[str] = []
        self.single = self._single_nodes(keep)
        self.ports = {p.name for p in self.graph.input if self._fits_input(p.name)}
        self.ports |= {p.name for p in self.graph.output if self._fits_output(p.name)}
        self.halves = self.ports & {v.name for v in self.graph.input}
        self.made: dict[str, str] = {}
        self.taken = {*self.makers, *(v.name for v in self.graph.input), *self.constants}

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

    def _lower_masks(self) -> bool:
        """Make −32,768 of masks' large negative numbers; whether there were any."""
        from onnx import numpy_helper

        found = False
        for name, tensor in self.constants.items():
            value = numpy_helper.to_array(tensor)
            large = np.isfinite(value) & (value <= -LARGEST_HALF)
            others = np.abs(value[~large & np.isfinite(value)]).max(initial=0.0)
            readers = self.readers.get(name, [])
            if not large.any() or others > _BESIDE_MASK:
                continue
            if readers and all(self._is_mask(node, name) for node in readers):
                lowered = np.where(large, np.float32(_MASK), value)
                tensor.CopyFrom(numpy_helper.from_array(lowered, name))
                found = True
        return found

    def _is_mask(self, node: Any, name: str) -> bool:
        if node.op_type not in ("Add", "Where") or not self._is_softmax_only(node.output[0]):
            return False
        others = [n for n in node.input if n != name and n in self.floats]
        return all(self.bounds[n].largest <= _BESIDE_MASK for n in others)

    def _is_softmax_only(self, name: str) -> bool:
        readers = self.readers.get(name, [])
        return bool(readers) and all(
            reader.op_type == "Softmax"
            or (reader.op_type in RENAMED and self._is_softmax_only(reader.output[0]))
            for reader in readers
        )

    def _fits_input(self, name: str) -> bool:
        """Whether an input is float16; what a pair alone reads may overflow, and saturates."""
        if name not in self.floats:
            return False
        readers = self.readers.get(name, [])
        if all(self._saturates(node) for node in readers):
            return True
        why = beyond(self.bounds[name])
        if why and why is not UNKNOWN_RANGE:
            self.reasons.append(f"input {name}: float32: {why}")
        elif why:
            self.reasons.append(
                f"input {name}: float32: {why}; calibrate(model, frames) records it, and "
                "load_ranges has it from a file of save_ranges"
            )
        return not why

    def _saturates(self, node: Any) -> bool:
        if node.op_type in RENAMED:
            return all(map(self._saturates, self.readers.get(node.output[0], [])))
        if node.op_type != "QuantizeLinear":
            return False
        made = self.readers.get(node.output[0], [])
        return all(self.bounds[reader.output[0]].largest <= LARGEST_HALF for reader in made)

    def _fits_output(self, name: str) -> bool:
        if name not in self.floats:
            return False
        why = beyond(self.bounds[name])
        if why:
            self.reasons.append(f"output {name}: float32: {why}")
        return not why

    def _single_nodes(self, keep: Collection[str]) -> set[str]:
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
        wide = []
        for node in self.graph.node:
            if node.output[0] in found or not self._is_float(node):
                continue
            why, whole = argument(self.bounds, node)
            why = why or overflow(self.bounds, self.floats, node)
            if why:
                found.add(node.output[0])
                self.reasons.append(f"{node.name or node.op_type}: float32: {why}")
            if whole:
                wide.append(node)
        self._widen(wide, found, lambda m: m.op_type in _ARGUMENTS or self._is_small(m))
        choices = [n for n in self.graph.node if n.op_type in CHOICES | _PLACES or self._counts(n)]
        self._widen(choices, found, lambda m: m.op_type in _ARGUMENTS or self._is_small(m))
        kept = [self.makers[name] for name in keep if name in self.makers]
        self.reasons += [
            f"{node.name or node.op_type}: computed in float32: in float16 it departs from the "
            "model on the example, on zeros or on the largest calibrated values"
            for node in kept
        ]
        self._widen(kept, found, lambda m: m.op_type not in _PAIRS | _LAYERS)
        return found

    def _widen(self, nodes: list[Any], found: set[str], goes_on: Callable[[Any], bool]) -> None:
        """Nodes and what computes their inputs are float32."""
        reached = set()
        while nodes:
            node = nodes.pop()
            found.add(node.output[0])
            reached.add(node.output[0])
            makers = [self.makers[n] for n in node.input if n in self.makers and n in self.floats]
            nodes += [m for m in makers if m.output[0] not in reached and goes_on(m)]

    def _is_float(self, node: Any) -> bool:
        return any(name in self.floats for name in (*node.input, *node.output))

    def _is_small(self, node: Any) -> bool:
        """Whether it is a product with a few terms, as of coordinates."""
        if node.op_type not in ("MatMul", "Gemm"):
            return False
        weight = self.bounds.array(node.input[1])
        shape = None if weight is None else weight.shape
        return shape is not None and len(shape) > 1 and min(shape[-2:]) <= _FEW_TERMS

    def _counts(self, node: Any) -> bool:
        """Whether it makes integers of floats."""
        to = next((a.i for a in node.attribute if a.name == "to"), 0)
        return node.op_type == "Cast" and to in _INTEGERS and node.input[0] in self.floats

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
                _in_half(numpy_helper.to_array(self.constants[name])), self.made[made]
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
                value = _in_half(numpy_helper.to_array(attribute.t))
                attribute.t.CopyFrom(numpy_helper.from_array(value, attribute.t.name))

    def _outputs(self, nodes: list[Any]) -> list[Any]:
        """Casts in front of float16 outputs that were made in float32."""
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
