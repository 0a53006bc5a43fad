"""Rules about the graph as a graph: every target reads nodes in order, by name."""

from __future__ import annotations

from collections.abc import Iterator

from bevquant_export.lint._graph import Graph, Node
from bevquant_export.lint._rule import Finding, Rule, quoted

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
