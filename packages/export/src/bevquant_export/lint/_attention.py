"""Attentions in a file, and what keeps TensorRT from running each as one kernel.

By NVIDIA's documentation (TensorRT, Multi-Head Attention Fusion): the two products take FP16, BF16
or INT8; head sizes are 16 to 256 in multiples of 8, for INT8 16, 32 or 64 with at most 512 queries
and keys; INT8 needs pairs in front of the first product, behind the softmax and behind the second
product; the scale stands on the queries or keys, in front of the first product.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial

from bevquant_export.lint._graph import Finding, Graph, Node, Rules
from bevquant_export.lint._shapes import Value
from bevquant_export.lint._tensors import Pairs

_rule = Rules("TRT", "tensorrt")
# fmt: off
PLACES = _rule(22, "an attention has pairs in front of its first product, behind its Softmax and "
    "behind its second product, or none",
    "quantize both products (QuantConfig(quantize_matmul=True)), or leave both in float16: then "
    "TensorRT can run the attention as one kernel", "warning")
# fmt: on
RULES = tuple(_rule)
_PASSED = {"Cast", "Identity", "QuantizeLinear", "DequantizeLinear", "Dropout", "Mul", "Div", "Add",
           "Where", "Reshape", "Unsqueeze", "Squeeze"}  # fmt: skip
_PAIRS = {"Cast", "Identity", "QuantizeLinear", "DequantizeLinear"}
_MOVES = {"Cast", "Identity", "Transpose", "Reshape", "Squeeze", "Unsqueeze", "Flatten"}
_OPERANDS = 4
_NEAR = 64  # nodes around a Softmax that are searched for the products of its attention
_HEADS, _INT8_HEADS, _INT8_ROWS = range(16, 257, 8), (16, 32, 64), 512


@dataclass(frozen=True, eq=False)
class Attention:
    """Nodes of softmax(q·kᵀ + mask)·v."""

    first: Node  # q·kᵀ
    second: Node  # the product with v
    between: tuple[Node, ...]  # scale, mask, Softmax, pairs, casts

    def bare(self, pairs: Pairs) -> list[str]:
        """Operands of both products without a pair."""
        operands = {
            "the queries": self.first.input(0), "the keys": self.first.input(1),
            "the Softmax": self.second.input(0), "the values": self.second.input(1),
        }  # fmt: skip
        return [what for what, name in operands.items() if pairs.dequantized(name) is None]

    def partly(self, pairs: Pairs) -> str:
        """What lacks a pair where something has one, in words; else empty."""
        bare = self.bare(pairs)
        some = 0 < len(bare) < _OPERANDS
        return f"it has some pairs, and none behind {', '.join(bare)}" if some else ""

    def obstacle(self, pairs: Pairs, shapes: Mapping[str, Value], runs: str) -> str:
        """Why TensorRT does not run it as one kernel; empty where nothing is known against it.

        Args:
            pairs: Of the file's main graph.
            shapes: Inferred shapes by name.
            runs: Type of its products.
        """
        if runs == "float32":
            return "its products are float32"
        late = any(n.op in ("Mul", "Div") and _by_number(pairs.graph, n) for n in self._scores())
        if late:
            return "its scale stands behind the first product: multiply the queries instead"
        weights = self.between[len(list(self._scores())) + 1 :]
        changed = next((node.op for node in weights if node.op not in _PAIRS), None)
        if changed is not None:
            return f"{changed} stands between Softmax and the second product"
        if partly := self.partly(pairs):
            return partly
        if not self.bare(pairs) and not _is_quantized(pairs, self.second):
            return "it has no pair behind the second product"
        if runs == "fp8":
            return ""  # the conditions of FP8 are not documented
        int8 = runs == "int8"
        query, key = (_shape(shapes, name) for name in self.first.inputs[:2])
        if not query or not key:
            return ""
        head = query[-1]
        if head is not None and head not in (_INT8_HEADS if int8 else _HEADS):
            allowed = "16, 32 or 64" if int8 else "16 to 256 in multiples of 8"
            return f"its heads have {head} channels, not {allowed}"
        rows = max(query[-2] or 0, key[-1] or 0)
        if int8 and rows > _INT8_ROWS:
            return f"it has {rows} queries or keys, above {_INT8_ROWS} in int8"
        return ""

    def _scores(self) -> Iterator[Node]:
        """Nodes between the first product and Softmax."""
        for node in self.between:
            if node.op == "Softmax":
                return
            yield node


def find_attentions(graph: Graph) -> Iterator[Attention]:
    """Every Softmax between two products of activations."""
    for node in graph.nodes:
        if node.op != "Softmax":
            continue
        above = _way(node, partial(_makers, graph))
        below = _way(node, partial(_readers, graph))
        held = [] if not above else [graph.constant(name) for name in above[-1].inputs]
        if above and below and all(tensor is None for tensor in held):
            between = (*reversed(above[:-1]), node, *below[:-1])
            yield Attention(above[-1], below[-1], between)


def check_attentions(pairs: Pairs) -> Iterator[Finding]:
    """Report partly quantized attentions."""
    for attention in find_attentions(pairs.graph):
        if partly := attention.partly(pairs):
            yield PLACES.found(attention.first.name, partly)


def _way(node: Node, onward: Callable[[Node], Iterable[Node | None]]) -> list[Node]:
    """Nodes behind `node` up to the first product that `onward` leads to; empty without one."""
    came: dict[Node, Node] = {}
    pending = [node]
    while pending and len(came) < _NEAR:
        at = pending.pop()
        if at.op == "MatMul":
            way = [at]
            while came[way[0]] is not node:
                way.insert(0, came[way[0]])
            return way
        # The first of them is followed to its end before the next.
        for found in reversed(list(onward(at))):
            if found is not None and found not in came and found.op in ("MatMul", *_PASSED):
                came[found] = at
                pending.append(found)
    return []


def _makers(graph: Graph, node: Node) -> Iterator[Node | None]:
    """Producers of a node's inputs, of a Where the condition's last."""
    names = [*node.inputs[1:], *node.inputs[:1]] if node.op == "Where" else node.inputs
    yield from map(graph.producers.get, names)


def _readers(graph: Graph, node: Node) -> Iterator[Node]:
    """Consumers, of products those whose first operand it is."""
    for user in graph.users(node):
        if user.op != "MatMul" or user.input(0) in node.outputs:
            yield user


def _is_quantized(pairs: Pairs, node: Node) -> bool:
    """Whether a node's result is quantized, directly or moved first."""
    pending, moved = [node], {node}
    while pending:
        users = pairs.graph.users(pending.pop())
        others = {user for user in users if user.op != "QuantizeLinear"} - moved
        if not users or not all(user.op in _MOVES for user in others):
            return False
        moved |= others
        pending += others
    return True


def _by_number(graph: Graph, node: Node) -> bool:
    tensors = (graph.constant(name) for name in node.inputs)
    return any(tensor is not None and not any(d > 1 for d in tensor.dims) for tensor in tensors)


def _shape(shapes: Mapping[str, Value], name: str) -> tuple[int | None, ...]:
    value = shapes.get(name)
    shape = None if value is None else value.shape
    return shape if shape is not None and len(shape) > 1 else ()
