"""Rules about the graph as a graph, and about layers with numbers that contradict each other.

Every target reads nodes in order, by name; layers of dense files have weights and windows.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from bevquant_export.lint._graph import Graph, Node
from bevquant_export.lint._rule import Finding, Rule, quoted
from bevquant_export.lint._tensors import check_tensor, shape_of

TENSOR_NAMES = Rule(
    "ONX003",
    "error",
    "a tensor is made once: by one node, one initializer or one graph input",
    "give every tensor a name of its own",
)
NODE_NAMES = Rule("ONX004", "error", "node names are unique", "give every node a name of its own")
MISSING = Rule(
    "ONX005",
    "error",
    "every tensor that a node reads is an input, an initializer or made by a node",
    "write the initializer into the file, or correct the name",
)
ORDER = Rule(
    "ONX006",
    "error",
    "nodes stand in the order in which they can run",
    "sort the nodes topologically",
)
CYCLE = Rule(
    "ONX007", "error", "no tensor depends on itself", "correct the names: a network has no cycle"
)
NOT_MADE = Rule(
    "ONX008",
    "error",
    "every graph output is made by a node",
    "correct the name of the output, or delete it",
)
DEEP = Rule(
    "ONX012",
    "error",
    "subgraphs are nested at most 8 deep",
    "export the model without loops inside loops",
)
REPEATED_ATTRIBUTE = Rule(
    "ONX013",
    "error",
    "a node has each attribute once",
    "write each attribute once: readers disagree about which of two counts",
)
WINDOWS = Rule(
    "ONX018",
    "error",
    "windows have sizes, strides, dilations and groups from 1 and pads from 0, as many as their "
    "weight's kernel has axes, and no stride or dilation beyond any grid",
    "write the numbers of the layer that the node stands for",
)
CHANNELS = Rule(
    "ONX019",
    "error",
    "a layer's weight has the channels of what it reads",
    "write the weight of this layer, in ONNX's order of axes, or correct what it reads",
)
_WEIGHTED = {"Conv": 1, "ConvTranspose": 1, "ConvInteger": 1, "QLinearConv": 3}
_POOLS = ("MaxPool", "AveragePool", "LpPool")
_LEAST = {"kernel_shape": 1, "strides": 1, "dilations": 1, "pads": 0}
_MOST = 2**31 - 1
_WIDEST = 2**16  # of strides and dilations
# What hands on the channels of its first input; these keep axis 1 wherever they stand.
_KEEPS = frozenset(
    "Relu LeakyRelu PRelu Elu Selu Celu Sigmoid HardSigmoid HardSwish Tanh Clip Softplus Mish "
    "BatchNormalization InstanceNormalization Dropout Identity QuantizeLinear DequantizeLinear "
    "MaxPool AveragePool LpPool GlobalAveragePool GlobalMaxPool Cast Abs Neg Exp Sqrt Erf "
    "HzQuantize HzDequantize".split()
)


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
                yield ORDER.found(
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


def check_windows(graph: Graph, folder: Path) -> Iterator[Finding]:
    """Check convolutions, pooling and linear layers of the standard operators."""
    for node in graph.nodes:
        if node.domain:
            continue
        if node.op in _WEIGHTED or node.op in _POOLS:
            wrong = next(_wrong(node), None) or next(_of_weight(graph, node), None)
            if wrong is not None:
                yield WINDOWS.found(node.name, wrong)
                continue
        if node.op in ("Conv", "ConvTranspose", "Gemm"):
            wrong = _channels(graph, node, folder)
            if wrong is not None:
                yield CHANNELS.found(node.name, wrong)


def _wrong(node: Node) -> Iterator[str]:
    for name, least in _LEAST.items():
        most = _WIDEST if name in ("strides", "dilations") else _MOST
        for value in node.integers(name):
            if not least <= value <= most:
                yield f"{name} has {value}"
    if node.op in _WEIGHTED and not 1 <= node.integer("group", 1) <= _MOST:
        yield f"group is {node.integer('group', 1)}"


def _of_weight(graph: Graph, node: Node) -> Iterator[str]:
    kernel = node.integers("kernel_shape")
    shape = _weight(graph, node.input(_WEIGHTED[node.op])) if node.op in _WEIGHTED else None
    if shape is not None and len(shape) >= 3:
        if kernel and kernel != shape[2:]:
            yield f"kernel_shape {kernel}, but its weight's kernel is {shape[2:]}"
        # A transposed convolution's weight starts with the input channels.
        if shape[0] % node.integer("group", 1):
            yield f"its {shape[0]} channels are not a multiple of group {node.integer('group', 1)}"
        kernel = shape[2:]
    if not kernel:
        return
    for name, times in (("strides", 1), ("dilations", 1), ("pads", 2), ("output_padding", 1)):
        given = node.integers(name)
        if given and len(given) != times * len(kernel):
            yield f"{name} has {len(given)} entries for {len(kernel)} axes"


def _weight(graph: Graph, name: str) -> list[int] | None:
    """Dimensions of a constant weight, behind its pair too."""
    for _ in range(4):
        tensor = graph.constant(name)
        if tensor is not None:
            return shape_of(tensor)
        maker = graph.producers.get(name)
        if maker is None or maker.op not in ("QuantizeLinear", "DequantizeLinear", "Identity"):
            return None
        name = maker.input(0)
    return None


def _channels(graph: Graph, node: Node, folder: Path) -> str | None:
    shape = _weight(graph, node.input(1))
    reads = _made(graph, node.input(0))
    if shape is None or reads is None or len(shape) < 2:
        return None
    if any(next(check_tensor(t, folder), None) for t in graph.tensors if shape_of(t) == shape):
        return None  # what it says of itself is wrong
    if node.op == "Gemm":
        if node.integer("transA"):
            return None
        wants = shape[1] if node.integer("transB") else shape[0]
    else:
        wants = shape[0] if node.op == "ConvTranspose" else shape[1] * node.integer("group", 1)
    if wants == reads:
        return None
    return f"its weight {shape[:6]} is for {wants} channels, and what it reads has {reads}"


def _made(graph: Graph, name: str) -> int | None:
    """Channels (axis 1) of a tensor; None where the file alone does not tell."""
    for _ in range(len(graph.nodes) + 1):
        maker = graph.producers.get(name)
        if maker is None:
            return _given(graph, name)
        if maker.domain and maker.domain != "horizon":
            return None
        if maker.op in ("Conv", "ConvTranspose", "Gemm"):
            shape = _weight(graph, maker.input(1))
            if shape is None or len(shape) < 2:
                return None
            if maker.op == "Conv":
                return shape[0]
            if maker.op == "ConvTranspose":
                return shape[1] * maker.integer("group", 1)
            return shape[0] if maker.integer("transB") else shape[1]
        if maker.op not in _KEEPS:
            return None
        name = maker.input(0)
    return None


def _given(graph: Graph, name: str) -> int | None:
    if graph.is_function:
        return None
    for value in graph.proto.input:
        if value.name == name and value.type.HasField("tensor_type"):
            dims = value.type.tensor_type.shape.dim
            if len(dims) > 1 and dims[1].HasField("dim_value") and dims[1].dim_value > 0:
                return int(dims[1].dim_value)
    return None
