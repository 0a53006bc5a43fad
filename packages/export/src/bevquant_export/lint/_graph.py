"""A graph with the queries of the rules: producers, consumers, constants.

Also the rules that hold for any graph: every target reads nodes in order, by name.
"""

from __future__ import annotations

from collections import ChainMap, deque
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any, Literal

if TYPE_CHECKING:
    import onnx

# Rules of a linter, and their findings.

Severity = Literal["error", "warning"]

# What a rule holds for: every target, or every dense one (`Target.labels`).
ANY = ("any",)
DENSE = ("dense",)


@dataclass(frozen=True)
class Finding:
    """One place where a file breaks a rule.

    Attributes:
        id: The rule, such as ``SPC011``; ``bevquant-lint --rules`` explains it.
        severity: ``"error"``: the target refuses the file, computes other values or crashes;
            ``"warning"``: it is slower, less accurate or reads unnecessary data.
        node: Name of the node or tensor, or ``"file"``.
        reason: What was expected and what came.
        remedy: What to do.
    """

    id: str
    severity: Severity
    node: str
    reason: str
    remedy: str

    def __str__(self) -> str:
        return f"{self.id} {self.severity} at {self.node}: {self.reason}; {self.remedy}"


@dataclass(frozen=True)
class Rule:
    """A requirement of a target on a file.

    Attributes:
        id: Three letters for the origin, three digits.
        severity: See `Finding`.
        means: The requirement.
        remedy: What to do about a file that breaks it.
        targets: Names, families or kinds of the targets of the rule.
    """

    id: str
    severity: Severity
    means: str
    remedy: str
    targets: tuple[str, ...] = ANY

    def found(self, node: str, reason: str) -> Finding:
        """A finding of this rule."""
        return Finding(self.id, self.severity, quoted(node, plain=True), reason, self.remedy)


class Rules(list[Rule]):
    """Rules of one target in their order; a call adds one, whose id starts with `letters`."""

    def __init__(self, letters: str, target: str, severity: Severity = "error") -> None:
        super().__init__()
        self._letters, self._target, self._severity = letters, target, severity

    def __call__(
        self, number: int, means: str, remedy: str, severity: Severity | None = None
    ) -> Rule:
        """Add a rule."""
        id_ = f"{self._letters}{number:03}"
        self.append(Rule(id_, severity or self._severity, means, remedy, (self._target,)))
        return self[-1]


def quoted(name: object, *, plain: bool = False) -> str:
    """A name out of a file, safe to print: control characters escaped, at most 80 characters.

    Example:
        >>> quoted("conv1")
        "'conv1'"
        >>> print(quoted("a" * 100, plain=True)[-5:])
        aaaa…
    """
    text = repr(str(name)[:81])
    text = text[1:-1] if plain else text
    return text if len(str(name)) <= 80 else text[:80] + "…"


_DEEPEST = 8
# fmt: off
TENSOR_NAMES = Rule("ONX003", "error",
    "a tensor is made once: by one node, one initializer or one graph input",
    "give every tensor a name of its own")
NODE_NAMES = Rule("ONX004", "error", "node names are unique", "give every node a name of its own")
MISSING = Rule("ONX005", "error",
    "every tensor that a node reads is an input, an initializer or made by a node",
    "write the initializer into the file, or correct the name")
# onnx.checker refuses both. ONNX Runtime and OpenVINO sort the nodes of the main graph themselves;
# ONNX Runtime refuses subgraphs and functions.
ORDER = Rule("ONX006", "warning",
    "nodes of the main graph stand in the order in which they can run",
    "sort the nodes topologically: the standard asks for it, and not every engine sorts them")
INNER_ORDER = Rule("ONX025", "error",
    "nodes of subgraphs and functions stand in the order in which they can run",
    "sort the nodes topologically")
CYCLE = Rule("ONX007", "error",
    "no tensor depends on itself",
    "correct the names: a network has no cycle")
NOT_MADE = Rule("ONX008", "error",
    "every graph output is made by a node",
    "correct the name of the output, or delete it")
DEEP = Rule("ONX012", "error",
    "subgraphs are nested at most 8 deep",
    "export the model without loops inside loops")
REPEATED_ATTRIBUTE = Rule("ONX013", "error",
    "a node has each attribute once",
    "write each attribute once: readers disagree about which of two counts")
# fmt: on


class Node:
    """A node, its attributes by name, and a name for messages even where it has none."""

    def __init__(self, proto: onnx.NodeProto, index: int) -> None:
        self.index = index
        self.op: str = proto.op_type
        self.domain: str = "" if proto.domain == "ai.onnx" else proto.domain
        self.own_name: str = proto.name
        self.name: str = proto.name or f"{proto.op_type or 'node'} #{index}"
        self.inputs: list[str] = list(proto.input)
        self.outputs: list[str] = list(proto.output)
        self.attributes: dict[str, onnx.AttributeProto] = {}
        self.repeated: list[str] = []
        for attribute in proto.attribute:
            if attribute.name in self.attributes:
                self.repeated.append(attribute.name)
            else:
                self.attributes[attribute.name] = attribute

    def input(self, slot: int) -> str:
        """Name of an input, empty where it is omitted."""
        return self.inputs[slot] if slot < len(self.inputs) else ""

    def integer(self, name: str, default: int = 0) -> int:
        """An INT attribute."""
        attribute = self.attributes.get(name)
        return int(attribute.i) if attribute is not None and attribute.type == 2 else default

    def integers(self, name: str) -> list[int]:
        """An INTS attribute, empty where it is missing or of another type."""
        attribute = self.attributes.get(name)
        return list(attribute.ints) if attribute is not None and attribute.type == 7 else []

    def text(self, name: str) -> str | None:
        """A STRING attribute; bytes that are not UTF-8 are shown as escapes."""
        attribute = self.attributes.get(name)
        if attribute is None or attribute.type != 3:
            return None
        return str(attribute.s.decode("utf-8", "backslashreplace"))

    @property
    def reducing(self) -> str:
        """The operator, and its reduction if any: engines import these apart."""
        reduction = self.text("reduction")
        return self.op if reduction in (None, "none") else f"{self.op} with reduction {reduction}"

    def number(self, name: str) -> float | None:
        """A FLOAT attribute."""
        attribute = self.attributes.get(name)
        return float(attribute.f) if attribute is not None and attribute.type == 1 else None

    def numbers(self, name: str) -> list[float]:
        """A FLOATS attribute, empty where it is missing or of another type."""
        attribute = self.attributes.get(name)
        return list(attribute.floats) if attribute is not None and attribute.type == 6 else []


class Graph:
    """The main graph, a subgraph of a node, or the body of a function."""

    def __init__(
        self, proto: Any, opsets: Mapping[str, int], outer: Graph | None, where: str
    ) -> None:
        self.proto = proto
        self.opsets = opsets
        self.outer = outer
        self.where = where
        self.depth: int = 0 if outer is None else outer.depth + 1
        self.is_function = where.startswith("function ")
        self.nodes = [Node(node, i) for i, node in enumerate(proto.node)]
        if self.is_function:
            self.inputs, self.outputs = list(proto.input), list(proto.output)
            tensors: list[onnx.TensorProto] = []
        else:
            self.inputs = [value.name for value in proto.input]
            self.outputs = [value.name for value in proto.output]
            tensors = list(proto.initializer)
        self.given_away = set(self.outputs)
        self.tensors = tensors
        self.initializers = {tensor.name: tensor for tensor in tensors}
        self.producers: dict[str, Node] = {}
        self.readers: dict[str, list[tuple[Node, int]]] = {}
        for node in self.nodes:
            for name in node.outputs:
                self.producers.setdefault(name, node)
            for slot, name in enumerate(node.inputs):
                if name:
                    self.readers.setdefault(name, []).append((node, slot))

    @cached_property
    def given(self) -> set[str]:
        """Names that exist before the first node runs."""
        names = {*self.inputs, *self.initializers}
        if not self.is_function:
            names |= {tensor.values.name for tensor in self.proto.sparse_initializer}
        return names

    def sees(self, name: str) -> bool:
        """Whether a name is defined in this graph or in an enclosing one."""
        outer = self.outer
        return name in self.given or (
            outer is not None and (name in outer.producers or outer.sees(name))
        )

    def constant(self, name: str) -> onnx.TensorProto | None:
        """The tensor of an initializer or of a Constant node; None for computed values."""
        if name in self.initializers:
            return self.initializers[name]
        node = self.producers.get(name)
        if node is None:
            return self.outer.constant(name) if self.outer is not None else None
        if node.op != "Constant" or node.domain or len(node.attributes) != 1:
            return None
        (attribute,) = node.attributes.values()
        return _constant(attribute)

    def producer(self, name: str, *ops: str) -> Node | None:
        """The producer of a tensor, if it is one of these operators."""
        node = self.producers.get(name) if name else None
        return node if node is not None and node.op in ops else None

    def users(self, node: Node) -> list[Node]:
        """The consumers of a node's outputs in this graph."""
        # Where two nodes make one name, which is a finding, its readers count for the first alone:
        # the work stays within the number of edges.
        return [
            user
            for name in dict.fromkeys(node.outputs)
            if name and self.producers[name] is node
            for user, _ in self.readers.get(name, ())
        ]


def _constant(attribute: onnx.AttributeProto) -> onnx.TensorProto | None:
    import onnx

    if attribute.ref_attr_name:
        return None
    if attribute.name == "value" and attribute.type == onnx.AttributeProto.TENSOR:
        return attribute.t
    if attribute.name == "value_float":
        return onnx.TensorProto(data_type=onnx.TensorProto.FLOAT, float_data=[attribute.f])
    if attribute.name == "value_floats":
        values = attribute.floats
        return onnx.TensorProto(
            data_type=onnx.TensorProto.FLOAT, dims=[len(values)], float_data=values
        )
    return None


def graphs_of(model: onnx.ModelProto) -> Iterator[Graph | Finding]:
    """Every graph of a model, and a finding for those nested too deep."""
    opsets = _opsets(model.opset_import)
    waiting = deque([Graph(model.graph, opsets, None, "")])
    for function in model.functions:
        own = ChainMap(_opsets(function.opset_import), opsets)
        waiting.append(Graph(function, own, None, f"function {quoted(function.name)}"))
    while waiting:
        graph = waiting.popleft()
        yield graph
        for node in graph.nodes:
            inside = [
                sub
                for attribute in node.attributes.values()
                for sub in (
                    ([attribute.g] if attribute.type == 5 else [])
                    + (list(attribute.graphs) if attribute.type == 10 else [])
                )
            ]
            if inside and graph.depth >= _DEEPEST:
                yield DEEP.found(node.name, f"it holds a graph at depth {graph.depth + 1}")
                continue
            where = f"inside {quoted(node.name)}"
            waiting.extend(Graph(sub, graph.opsets, graph, where) for sub in inside)


def passed(name: str, graph: Graph, graphs: Sequence[Graph]) -> list[onnx.TensorProto | None]:
    """The constant that a name stands for; for a function's input, its value in each call."""
    if not graph.is_function or name not in graph.inputs:
        return [graph.constant(name)]
    slot, function = graph.inputs.index(name), graph.proto
    return [
        caller.constant(node.input(slot))
        for caller in graphs
        for node in caller.nodes
        if (node.op, node.domain) == (function.name, function.domain)
    ]


def _opsets(imports: Any) -> dict[str, int]:
    return {("" if o.domain == "ai.onnx" else o.domain): int(o.version) for o in imports}


def check_structure(graph: Graph) -> Iterator[Finding]:
    """Check names, order and cycles of one graph."""
    yield from _names(graph)
    yield from _reads(graph)
    for name in graph.outputs:
        if name not in graph.producers and not graph.sees(name):
            yield NOT_MADE.found(name or "graph output", "no node makes this graph output")


def _names(graph: Graph) -> Iterator[Finding]:
    seen: set[str] = set()
    for tensor in graph.tensors:
        if tensor.name in seen:
            yield TENSOR_NAMES.found(tensor.name, "two initializers have this name")
        seen.add(tensor.name)
    seen = set()
    for name in graph.inputs:
        if name in seen:
            yield TENSOR_NAMES.found(name, "two graph inputs have this name")
        seen.add(name)
    made: set[str] = set()
    names: set[str] = set()
    for node in graph.nodes:
        if node.own_name and node.own_name in names:
            yield NODE_NAMES.found(node.name, f"node {node.index} has a name that was given before")
        names.add(node.own_name)
        for attribute in dict.fromkeys(node.repeated):
            yield REPEATED_ATTRIBUTE.found(node.name, f"attribute {quoted(attribute)} comes twice")
        for name in node.outputs:
            if name and (name in made or name in graph.given):
                yield TENSOR_NAMES.found(node.name, f"tensor {quoted(name)} is there already")
            made.add(name)


def _reads(graph: Graph) -> Iterator[Finding]:
    stuck = _on_cycles(graph)
    if stuck:
        shown = ", ".join(quoted(node.name) for node in stuck[:4])
        more = f" and {len(stuck) - 4} more" if len(stuck) > 4 else ""
        yield CYCLE.found(stuck[0].name, f"a cycle runs through {shown}{more}")
    indices = {node.index for node in stuck}
    for node in graph.nodes:
        for name in dict.fromkeys(node.inputs):
            if not name or graph.sees(name):
                continue
            maker = graph.producers.get(name)
            if maker is None:
                yield MISSING.found(node.name, f"nothing gives its input {quoted(name)}")
            elif maker.index >= node.index and not {maker.index, node.index} <= indices:
                rule = INNER_ORDER if graph.outer or graph.is_function else ORDER
                yield rule.found(
                    node.name, f"its input {quoted(name)} is made later, by {quoted(maker.name)}"
                )


def _on_cycles(graph: Graph) -> list[Node]:
    """Nodes on a cycle or between two of them (Kahn, from both ends)."""
    after: dict[int, list[int]] = {node.index: [] for node in graph.nodes}
    before: dict[int, list[int]] = {node.index: [] for node in graph.nodes}
    for node in graph.nodes:
        for name in set(node.inputs):
            maker = graph.producers.get(name) if name and not graph.sees(name) else None
            if maker is not None:
                after[maker.index].append(node.index)
                before[node.index].append(maker.index)
    left = set(after)
    for ahead, behind in ((after, before), (before, after)):
        waiting = {i: sum(j in left for j in behind[i]) for i in left}
        ready = [i for i, count in waiting.items() if count == 0]
        while ready:
            index = ready.pop()
            left.discard(index)
            for follower in ahead[index]:
                if follower in waiting:
                    waiting[follower] -= 1
                    if waiting[follower] == 0:
                        ready.append(follower)
    return [graph.nodes[i] for i in sorted(left)]
