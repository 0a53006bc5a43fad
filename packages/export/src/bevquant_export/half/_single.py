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

from collections.abc import Callable, Collection, Iterable, Mapping
from typing import TYPE_CHECKING

from bevquant_export.half._bounds import Bounds
from bevquant_export.half._intervals import RENAMED, producer
from bevquant_export.half._limits import (
    LARGEST_HALF,
    UNKNOWN_RANGE,
    Size,
    argument,
    beyond,
    few_digits,
    is_single,
    is_small,
    lower_masks,
    overflow,
    takes_halves,
)
from bevquant_export.lint._model import FP4_QUANTIZE

if TYPE_CHECKING:
    import onnx_ir as ir

Known = Mapping[str, tuple[float, bool]]
Measure = Callable[[Collection[str]], Mapping[str, Size]]

_PAIRS = {"QuantizeLinear", "DequantizeLinear", FP4_QUANTIZE}
_LAYERS = {"Conv", "ConvTranspose", "Gemm", "MatMul"}
# What an engine fuses into the layer or the pair beside it.
_BETWEEN = set(
    "Relu Clip LeakyRelu Add Concat MaxPool AveragePool GlobalAveragePool ReduceMean Resize "
    "Reshape Transpose Slice Pad DepthToSpace Expand Tile Identity Flatten Squeeze "
    "Unsqueeze".split()
)
# What computes nothing: before a pair and something in half precision it stays float32 for both.
_LAYOUT = set("Reshape Transpose Slice Squeeze Unsqueeze Flatten Identity".split())
CHOICES = set("TopK ArgMax ArgMin Greater GreaterOrEqual Less LessOrEqual Equal".split())
_PLACES = {"Floor", "Ceil", "Round", "Mod"}
_ARGUMENTS = _BETWEEN | set(
    "Sigmoid Softmax LogSoftmax Log Exp Mul Sub Div Max Min Neg Abs Where ReduceMax Gather "
    "GatherElements GatherND ScatterElements ScatterND Sqrt Reciprocal Pow Sin Cos Tanh Sum Mean "
    "CumSum ReduceSum ReduceMin ReduceL1 ReduceL2 ReduceSumSquare ReduceProd Floor Ceil "
    "Round Mod Cast".split()
)
_INTEGERS = {2, 3, 4, 5, 6, 7, 12, 13}
_EPILOGUE = {"Add", "Relu", "Clip", "LeakyRelu"}


class Singles:
    """The choice for one graph, all floats float32; constants of masks may change.

    Args:
        graph: The graph.
        known: Tensors to the largest value of any calibration frame, and whether all were whole.
        measure: Sizes of given tensors in several frames; None where nothing runs the file.
        keep: Float32 tensors, with their producers back to layers and pairs.
        whole: Whether these include layers.
    """

    def __init__(
        self,
        graph: ir.Graph,
        known: Known,
        measure: Measure | None,
        keep: Collection[str],
        *,
        whole: bool,
    ) -> None:
        self._graph, self.reasons = graph, list[str]()
        self._exact: set[ir.Value] = set()
        self._bounds = Bounds(graph, known)
        if lower_masks(graph, self._bounds):
            self._bounds = Bounds(graph, known)
        self.single = self._of_integers()
        self._by_ranges(measure)
        self._kept(keep, whole=whole)
        self.ports = {value for value in graph.inputs if self._fits_input(value)}
        self.ports |= {value for value in graph.outputs if self._fits(value, "output")}

    def _of_integers(self) -> set[ir.Node]:
        """Pairs, layers between them, and operations that an engine fuses into these."""
        opset = self._graph.opset_imports[""]
        found = {node for node in self._graph if node.op_type in _PAIRS}
        for node in self._graph:
            if node.op_type in _LAYERS and producer(node, 0) in found:
                weight = producer(node, 1)
                if weight is not None and weight.op_type == "DequantizeLinear":
                    found.add(node)
            elif node.op_type in _BETWEEN and _between(node, found):
                found.add(node)
            elif not takes_halves(node, opset):
                found.add(node)
        # What lies between must end in a pair, or be part of the layer in front: the last of a
        # chain first.
        for node in reversed(self._graph):
            between = node.op_type in _BETWEEN and node in found
            if between and not _ends(node, found) and not _is_epilogue(node):
                found.discard(node)
        return found

    def _by_ranges(self, measure: Measure | None) -> None:
        bounds = self._bounds
        left = [n for n in self._graph if n not in self.single]
        left = [n for n in left if any(map(is_single, (*n.inputs, *n.outputs)))]
        asked = {v.name or "" for node in left for v in _floats((*node.inputs, *node.outputs))}
        sizes = measure(asked) if measure and asked else {}
        arguments, digits = [], []
        for node in left:
            why, small = argument(bounds, node)
            if not why and (why := few_digits(bounds, sizes, node)):
                digits.append(node)
            why = why or overflow(bounds, node)
            if why:
                self.single.add(node)
                self.reasons.append(f"{node.name or node.op_type}: float32: {why}")
            if small:
                arguments.append(node)
        choices = [n for n in self._graph if n.op_type in CHOICES | _PLACES or _counts(n)]
        self._widen([*arguments, *choices], self._is_argument)
        self._exact |= self._widen(digits, lambda maker: maker.op_type not in _PAIRS)

    def _kept(self, keep: Collection[str], *, whole: bool) -> None:
        made = {value.name: node for node in self._graph for value in node.outputs}
        kept = [node for name, node in made.items() if name in keep]
        self.reasons += [
            f"{node.name or node.op_type}: computed in float32: in float16 it departs from the "
            "model on the example, on zeros or on the largest calibrated values"
            for node in kept
        ]
        stops = _PAIRS if whole else _PAIRS | _LAYERS
        self._widen(kept, lambda maker: maker.op_type not in stops)

    def _widen(self, nodes: list[ir.Node], goes_on: Callable[[ir.Node], bool]) -> set[ir.Value]:
        """Make nodes and the producers of their operands float32; returns all operands."""
        nodes = list(nodes)
        reached: set[ir.Node] = set()
        read: set[ir.Value] = set()
        while nodes:
            node = nodes.pop()
            reached.add(node)
            read.update(value for value in node.inputs if value is not None)
            makers = (value.producer() for value in node.inputs if is_single(value))
            nodes += [m for m in makers if m is not None and m not in reached and goes_on(m)]
        self.single |= reached
        return read

    def _is_argument(self, node: ir.Node) -> bool:
        product = node.op_type in ("MatMul", "Gemm")
        return node.op_type in _ARGUMENTS or (product and is_small(self._bounds, node))

    def _fits_input(self, value: ir.Value) -> bool:
        """Whether an input is float16; one that only a pair reads may overflow and saturate."""
        if is_single(value) and all(map(self._saturates, value.consumers())):
            return True
        return self._fits(value, "input")

    def _fits(self, port: ir.Value, kind: str) -> bool:
        if not is_single(port):
            return False
        why = beyond(self._bounds[port])
        if kind == "input" and why is UNKNOWN_RANGE:
            why = (
                f"{why}; calibrate(model, frames) records it, and load_ranges has it from a file "
                "of save_ranges"
            )
        elif kind == "input" and port in self._exact and not why:
            why = "an operation in float32 needs all its digits"
        if why:
            self.reasons.append(f"{kind} {port.name}: float32: {why}")
        return not why

    def _saturates(self, node: ir.Node) -> bool:
        readers = node.outputs[0].consumers()
        if node.op_type in RENAMED:
            return all(map(self._saturates, readers))
        if node.op_type != "QuantizeLinear":
            return False
        return all(self._bounds[reader.outputs[0]].largest <= LARGEST_HALF for reader in readers)


def _floats(values: Iterable[ir.Value | None]) -> list[ir.Value]:
    """Those of float32 that are computed."""
    return [value for value in values if is_single(value) and not value.is_initializer()]


def _counts(node: ir.Node) -> bool:
    """Whether it converts floats to integers."""
    to = node.attributes.get_int("to", 0)
    return node.op_type == "Cast" and to in _INTEGERS and is_single(node.inputs[0])


def _is_epilogue(node: ir.Node) -> bool:
    """Whether the kernel of the layer in front of it computes this sum or activation."""
    return node.op_type in _EPILOGUE and any(
        maker.op_type in _LAYERS or _is_epilogue(maker)
        for maker in node.predecessors()
        if len(maker.outputs[0].uses()) == 1
    )


def _between(node: ir.Node, found: Collection[ir.Node]) -> bool:
    read = _floats(node.inputs)
    return bool(read) and all(value.producer() in found for value in read)


def _ends(node: ir.Node, found: Collection[ir.Node]) -> bool:
    single = [reader in found for reader in node.outputs[0].consumers()]
    return any(single) if node.op_type in _LAYOUT else bool(single) and all(single)
