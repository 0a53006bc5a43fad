r"""Float32 nodes, inputs and outputs of a strongly typed file, with reasons.

Besides pairs and the parts of an int8 kernel, these are float32. `Bounds` decides from constants,
ranges of pairs and ranges of all calibration frames:

* values that may exceed ±65,504, or whose range is unknown;
* whole numbers (ids, cells of a grid) that may exceed ±2,048, where float16 skips some;
* a quotient, a logarithm or a negative power whose argument may be below 2⁻¹⁷, where float16 has
  too few digits (a guard of 1e-12 is 0), a constant below it, and the argument's producers;
* operations that lose digits (`few_digits`), with the producers of their operands, file inputs
  included;
* scores for a choice (TopK, ArgMax, a comparison) and values that become positions (Floor, Round, a
  Cast to integers), back to the layer that computes them: float16 has ties where the model has
  none, and another choice gives another result.

A mask of large negative numbers in front of a softmax becomes −32,768, which has the same softmax.
Bounds of a clamp beyond the values' own range become ±65,504.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from typing import Any

from bevquant_export.dense.half._bounds import Bounds
from bevquant_export.dense.half._intervals import RENAMED
from bevquant_export.dense.half._limits import (
    LARGEST_HALF,
    UNKNOWN_RANGE,
    FloatGraph,
    Size,
    argument,
    beyond,
    few_digits,
    is_small,
    lower_masks,
    overflow,
)

Known = Mapping[str, tuple[float, bool]]
Measure = Callable[[Collection[str]], Mapping[str, Size]]

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
_PLACES = {"Floor", "Ceil", "Round", "Mod"}
_ARGUMENTS = _BETWEEN | set(
    "Sigmoid Softmax LogSoftmax Log Exp Mul Sub Div Max Min Neg Abs Where ReduceMax Gather "
    "GatherElements GatherND ScatterElements ScatterND Sqrt Reciprocal Pow Sin Cos Tanh Sum Mean "
    "CumSum ReduceSum ReduceMean ReduceMin ReduceL1 ReduceL2 ReduceSumSquare ReduceProd Floor Ceil "
    "Round Mod Cast".split()
)
_INTEGERS = {2, 3, 4, 5, 6, 7, 12, 13}
_EPILOGUE = {"Add", "Relu", "Clip", "LeakyRelu"}
_GOES_ON = Callable[[Any], bool]


class Singles:
    """The choice for one graph.

    Args:
        graph: The graph; constants of masks may change.
        known: Tensors to the largest value of any calibration frame, and whether all were whole.
        measure: Sizes of given tensors in several frames; None where nothing runs the file.
        keep: Float32 tensors, with their producers back to layers and pairs.
        whole: Whether these include layers.

    Attributes:
        single: First outputs of the float32 nodes.
        ports: Float16 inputs and outputs.
        reasons: Node or port, and why it is float32.
    """

    def __init__(
        self,
        graph: FloatGraph,
        known: Known,
        measure: Measure | None,
        keep: Collection[str],
        *,
        whole: bool,
    ) -> None:
        self._graph, self.reasons = graph, list[str]()
        self._exact: set[str] = set()
        self._bounds = Bounds(graph.graph, graph.shapes, known)
        if lower_masks(graph, self._bounds):
            self._bounds = Bounds(graph.graph, graph.shapes, known)
        self.single = self._of_integers()
        self._by_ranges(measure)
        self._kept(keep, whole=whole)
        self.ports = {p.name for p in graph.graph.input if self._fits_input(p.name)}
        self.ports |= {p.name for p in graph.graph.output if self._fits_output(p.name)}

    def _of_integers(self) -> set[str]:
        """Pairs, layers between them, and operations that an engine fuses into these."""
        graph, found = self._graph, set[str]()
        nodes = graph.graph.node
        found.update(n.output[0] for n in nodes if n.op_type in _PAIRS)
        for node in nodes:
            if node.op_type in _LAYERS and self._from(node.input[0], found):
                weight = graph.makers.get(node.input[1])
                if weight is not None and weight.op_type == "DequantizeLinear":
                    found.add(node.output[0])
            elif node.op_type in _BETWEEN and self._between(node, found):
                found.add(node.output[0])
            elif not graph.takes_halves(node):
                found.add(node.output[0])
        # What lies between must end in a pair, or be part of the layer in front: the last of a
        # chain first.
        for node in reversed(nodes):
            between = node.op_type in _BETWEEN and node.output[0] in found
            if between and not self._ends(node, found) and not self._is_epilogue(node):
                found.discard(node.output[0])
        return found

    def _by_ranges(self, measure: Measure | None) -> None:
        graph, bounds = self._graph, self._bounds
        left = [n for n in graph.graph.node if n.output[0] not in self.single and graph.is_float(n)]
        asked = {n for node in left for n in (*node.input, *node.output) if n in graph.floats}
        sizes = measure(asked - graph.constants.keys()) if measure and asked else {}
        arguments, digits = [], []
        for node in left:
            why, small = argument(bounds, node)
            if not why and (why := few_digits(bounds, sizes, node)):
                digits.append(node)
            why = why or overflow(bounds, graph.floats, node)
            if why:
                self.single.add(node.output[0])
                self.reasons.append(f"{node.name or node.op_type}: float32: {why}")
            if small:
                arguments.append(node)
        choices = [n for n in graph.graph.node if n.op_type in CHOICES | _PLACES or self._counts(n)]
        self._widen([*arguments, *choices], self._is_argument)
        self._exact |= self._widen(digits, lambda maker: maker.op_type not in _PAIRS)

    def _kept(self, keep: Collection[str], *, whole: bool) -> None:
        kept = [self._graph.makers[name] for name in keep if name in self._graph.makers]
        self.reasons += [
            f"{node.name or node.op_type}: computed in float32: in float16 it departs from the "
            "model on the example, on zeros or on the largest calibrated values"
            for node in kept
        ]
        stops = _PAIRS if whole else _PAIRS | _LAYERS
        self._widen(kept, lambda maker: maker.op_type not in stops)

    def _widen(self, nodes: list[Any], goes_on: _GOES_ON) -> set[str]:
        """Make nodes and the producers of their operands float32; returns all operands."""
        nodes, reached, read = list(nodes), set[str](), set[str]()
        while nodes:
            node = nodes.pop()
            reached.add(node.output[0])
            read.update(node.input)
            nodes += [
                m for m in self._graph.makers_of(node)
                if m.output[0] not in reached and goes_on(m)
            ]  # fmt: skip
        self.single |= reached
        return read

    def _is_argument(self, node: Any) -> bool:
        product = node.op_type in ("MatMul", "Gemm")
        return node.op_type in _ARGUMENTS or (product and is_small(self._bounds, node))

    def _counts(self, node: Any) -> bool:
        """Whether it converts floats to integers."""
        to = next((a.i for a in node.attribute if a.name == "to"), 0)
        return node.op_type == "Cast" and to in _INTEGERS and node.input[0] in self._graph.floats

    def _fits_input(self, name: str) -> bool:
        """Whether an input is float16; one that only a pair reads may overflow and saturate."""
        if name not in self._graph.floats:
            return False
        readers = self._graph.readers.get(name, [])
        if all(self._saturates(node) for node in readers):
            return True
        why = beyond(self._bounds[name])
        if why is UNKNOWN_RANGE:
            why = (
                f"{why}; calibrate(model, frames) records it, and load_ranges has it from a file "
                "of save_ranges"
            )
        elif name in self._exact and not why:
            why = "an operation in float32 needs all its digits"
        if why:
            self.reasons.append(f"input {name}: float32: {why}")
        return not why

    def _saturates(self, node: Any) -> bool:
        readers = self._graph.readers.get(node.output[0], [])
        if node.op_type in RENAMED:
            return all(map(self._saturates, readers))
        if node.op_type != "QuantizeLinear":
            return False
        return all(self._bounds[reader.output[0]].largest <= LARGEST_HALF for reader in readers)

    def _fits_output(self, name: str) -> bool:
        if name not in self._graph.floats:
            return False
        why = beyond(self._bounds[name])
        if why:
            self.reasons.append(f"output {name}: float32: {why}")
        return not why

    def _is_epilogue(self, node: Any) -> bool:
        """Whether the kernel of the layer in front of it computes this sum or activation."""
        makers = [self._graph.makers[name] for name in node.input if name in self._graph.makers]
        return node.op_type in _EPILOGUE and any(
            maker.op_type in _LAYERS or self._is_epilogue(maker)
            for maker in makers
            if len(self._graph.readers[maker.output[0]]) == 1
        )

    def _from(self, name: str, found: set[str]) -> bool:
        maker = self._graph.makers.get(name)
        return maker is not None and maker.output[0] in found

    def _between(self, node: Any, found: set[str]) -> bool:
        graph = self._graph
        read = [n for n in node.input if n in graph.floats and n not in graph.constants]
        return bool(read) and all(self._from(name, found) for name in read)

    def _ends(self, node: Any, found: set[str]) -> bool:
        readers = self._graph.readers.get(node.output[0], [])
        single = [reader.output[0] in found for reader in readers]
        return any(single) if node.op_type in _LAYOUT else bool(single) and all(single)
