"""Plans: placed nodes, segments that run without interruption, and composition of plans."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from math import prod
from typing import Any

import msgspec

from bevquant_hybrid._documented import tool
from bevquant_quantizers.documents import DocumentError, JsonDocument, Size, parse_json

_SCHEMA = "bevquant_hybrid.partition"
_VERSION = 2  # 1 had no dtypes
_KINDS = ("input", "output", "attribute", "operator", "pass", "quantize", "dequantize")
_PLACES = ("BPU", "CPU", "")
_BYTES = {"": 1, "qint8": 1, "qint16": 2, "qint32": 4}


@dataclass(frozen=True)
class PlanNode:
    """One node of the partitioned graph."""

    name: str  # the graph node's name; of an inserted boundary, the name that prepare gives it
    # Input, output, attribute, operator, pass (its value is its input's), quantize or
    # dequantize
    kind: str
    place: str = ""  # BPU, CPU, or "" for neither
    reason: str = ""  # reason of the placement
    operator: str = ""  # the row of the support table, or the plain name
    path: str = ""  # the module, or the module whose forward makes the call
    inputs: tuple[str, ...] = ()  # names of its producers
    shape: tuple[int, ...] | None = None  # of its result, where known
    segment: int | None = None  # its segment; None for boundaries, inputs and outputs
    inserted: bool = False  # whether the partition added it
    dtype: str = ""  # type of its integer result, qint8, qint16 or qint32; "" if unknown or float


@dataclass(frozen=True)
class Segment:
    """Nodes of one place that run without interruption."""

    index: int  # segments run in this order
    place: str  # BPU or CPU
    nodes: tuple[str, ...]  # their names, in order


@dataclass(frozen=True)
class Boundary:
    """A crossing between float and integer."""

    name: str  # the node
    kind: str  # quantize or dequantize
    source: str  # producer of its input
    readers: tuple[str, ...]  # consumers of its result
    # Bytes of the integers that cross: 1, 2 or 4 each for qint8, qint16 and qint32, 1 for an
    # unknown type; 0 for a DeQuantStub with a float input; None for an unknown shape
    transfer_bytes: int | None
    inserted: bool  # whether the partition added it


@dataclass(frozen=True)
class Plan(JsonDocument):
    """Placement of all nodes."""

    march: str  # the BPU architecture
    nodes: tuple[PlanNode, ...]  # in the order of execution
    warnings: tuple[str, ...] = ()  # warnings for the user

    def __post_init__(self) -> None:
        """Refuse plans that contradict themselves."""
        known: dict[str, PlanNode] = {}
        for node in self.nodes:
            if node.kind not in _KINDS or node.place not in _PLACES:
                raise ValueError(
                    f"{node.name}: kind {node.kind!r} at {node.place!r}; expected one of {_KINDS} "
                    f"at one of {_PLACES}"
                )
            if node.name in known:
                raise ValueError(f"two nodes are called {node.name!r}")
            missing = [source for source in node.inputs if source not in known]
            if missing:
                raise ValueError(f"{node.name} reads {missing[0]!r}, which no earlier node is")
            if node.dtype not in _BYTES:
                raise ValueError(f"{node.name}: dtype {node.dtype!r}; expected one of {[*_BYTES]}")
            if node.shape is not None and any(size < 0 for size in node.shape):
                raise ValueError(f"{node.name}: shape {node.shape} has a size below zero")
            known[node.name] = node
        for segment in self.segments:
            places = {known[name].place for name in segment.nodes}
            if places not in ({"BPU"}, {"CPU"}):
                raise ValueError(
                    f"segment {segment.index} ({', '.join(segment.nodes)}): its nodes run at "
                    f"{sorted(places)}; expected all on the BPU or all on the CPU"
                )

    def node(self, name: str) -> PlanNode:
        """The node called ``name``."""
        for node in self.nodes:
            if node.name == name:
                return node
        raise KeyError(f"no node {name!r} in the plan")

    @property
    def segments(self) -> tuple[Segment, ...]:
        """The segments, in order."""
        groups: dict[int, list[PlanNode]] = {}
        for node in self.nodes:
            if node.segment is not None:
                groups.setdefault(node.segment, []).append(node)
        return tuple(
            Segment(index, group[0].place, tuple(node.name for node in group))
            for index, group in sorted(groups.items())
        )

    @property
    def boundaries(self) -> tuple[Boundary, ...]:
        """All crossings between float and integer, in order."""
        readers: dict[str, list[str]] = {}
        for node in self.nodes:
            for source in node.inputs:
                readers.setdefault(source, []).append(node.name)
        integers = {n.name for n in self.nodes if n.place == "BPU" or n.kind == "quantize"}
        dtypes = {node.name: node.dtype for node in self.nodes}
        found = []
        for node in self.nodes:
            if node.kind not in ("quantize", "dequantize"):
                continue
            source = node.inputs[0] if node.inputs else ""
            crosses = node.dtype if node.kind == "quantize" else dtypes.get(source, "")
            size = None if node.shape is None else prod(node.shape) * _BYTES[crosses]
            # A stub that reads floats moves nothing across.
            if node.kind == "dequantize" and not integers.intersection(node.inputs):
                size = 0
            to = tuple(readers.get(node.name, ()))
            found.append(Boundary(node.name, node.kind, source, to, size, node.inserted))
        return tuple(found)

    @property
    def transfer_bytes(self) -> int | None:
        """Bytes that cross all boundaries in one run; None for an unknown shape."""
        sizes = [boundary.transfer_bytes for boundary in self.boundaries]
        known = [size for size in sizes if size is not None]
        return sum(known) if len(known) == len(sizes) else None

    def to_json(self) -> str:
        """The plan as JSON, including segments and boundaries for other readers."""
        data = {
            **{"schema": _SCHEMA, "version": _VERSION, "march": self.march},
            "nodes": [asdict(node) for node in self.nodes],
            "segments": [asdict(segment) for segment in self.segments],
            "boundaries": [asdict(boundary) for boundary in self.boundaries],
            "warnings": list(self.warnings),
        }
        return json.dumps(data, indent=1) + "\n"

    @classmethod
    def from_json(cls, text: str) -> Plan:
        """Read and check what `to_json` wrote.

        Raises:
            ValueError: If it is not a plan, has another version, or is inconsistent.
        """
        head = {"schema": _SCHEMA, "version": tuple(range(1, _VERSION + 1))}
        what, remedy = "partition plan", "make the plan again"
        data = parse_json(text, _Document, what=what, head=head, remedy=remedy)
        if data.version > 1 and any(node.dtype is None for node in data.nodes):
            raise DocumentError("not a partition plan: a node has no dtype")
        nodes = tuple(
            PlanNode(**{**msgspec.structs.asdict(node), "dtype": node.dtype or ""})
            for node in data.nodes
        )
        plan = cls(data.march, nodes, data.warnings)
        # Segments and boundaries are written for other readers: the nodes say them.
        written = json.loads(plan.to_json())
        for key in ("segments", "boundaries"):
            given = getattr(data, key)
            if given is not None and given != written[key]:
                raise DocumentError(f"not a partition plan: its {key} are not those of its nodes")
        return plan

    def draw(self, *, title: str | None = None) -> str:
        """The plan as SVG text, by `bevquant_hybrid_tools.drawing.draw_plan`."""
        return str(tool("drawing").draw_plan(self, title=title))


class _Node(msgspec.Struct, forbid_unknown_fields=True):
    """A `PlanNode` as a file has it; plans of version 1 have no dtypes."""

    name: str
    kind: str
    place: str
    reason: str
    operator: str
    path: str
    inputs: tuple[str, ...]
    shape: tuple[Size, ...] | None
    segment: int | None
    inserted: bool
    dtype: str | None = None


class _Document(msgspec.Struct):
    version: int
    march: str
    nodes: list[_Node]
    warnings: tuple[str, ...] = ()
    segments: Any = None
    boundaries: Any = None


def number_segments(nodes: Sequence[PlanNode]) -> tuple[PlanNode, ...]:
    """Number the segments in an executable order.

    A node's stage is the number of changes of place on the way to it, at most. Nodes of one place
    and one stage that read one another are a segment: no path leaves it and comes back, since a
    way through another place leads to a later stage.
    """
    stages: dict[str, int] = {}
    places: dict[str, str] = {}
    parents: dict[str, str] = {}

    def root(name: str) -> str:
        while parents[name] != name:
            name = parents[name]
        return name

    for node in nodes:
        inner = node.kind in ("operator", "pass")
        place, stage = node.place, 0
        # A stage counts the changes of place on the way there; connected nodes of one stage and
        # place are a segment.
        for source in node.inputs:
            changes = bool(places[source]) and bool(place) and places[source] != place
            stage = max(stage, stages[source] + changes)
        stages[node.name], places[node.name] = stage, place
        parents[node.name] = node.name
        for source in node.inputs if inner else ():
            if source in parents and (stages[source], places[source]) == (stage, place):
                parents[root(source)] = root(node.name)
    numbers: dict[str, int] = {}
    inner_nodes = [node for node in nodes if node.kind in ("operator", "pass")]
    # A segment reads from its own stage and lower ones, so that it can run in this order.
    for node in sorted(inner_nodes, key=lambda node: stages[node.name]):
        numbers.setdefault(root(node.name), len(numbers))
    inner_names = {node.name for node in inner_nodes}
    return tuple(
        replace(node, segment=numbers[root(node.name)]) if node.name in inner_names else node
        for node in nodes
    )


class PlanComposer:
    """Builds a plan in the order of execution; every method returns names for `inputs`.

    Args:
        march: The BPU of all of it.

    Example:
        >>> unit = Plan("bayes", number_segments([
        ...     PlanNode("x", "input"),
        ...     PlanNode("conv", "operator", "BPU", inputs=("x",)),
        ...     PlanNode("output", "output", inputs=("conv",)),
        ... ]))
        >>> whole = PlanComposer("bayes")
        >>> (x,) = whole.unit(unit, whole.source("images"))
        >>> plan = whole.plan(whole.on_cpu("head", x, reason="attention"))
        >>> [(node.name, node.inputs) for node in plan.nodes]
        [('images', ()), ('conv', ('images',)), ('head', ('conv',)), ('output', ('head',))]
        >>> [segment.place for segment in plan.segments]
        ['BPU', 'CPU']
    """

    def __init__(self, march: str) -> None:
        self._march = march
        self._nodes: list[PlanNode] = []
        self._warnings: list[str] = []

    def source(self, name: str, shape: tuple[int, ...] | None = None) -> str:
        """An input of the whole model."""
        self._nodes.append(PlanNode(name, "input", shape=shape))
        return name

    def on_cpu(
        self,
        name: str,
        *inputs: str,
        reason: str,
        operator: str = "",
        path: str = "",
        shape: tuple[int, ...] | None = None,
    ) -> str:
        """A part that runs on the CPU as a whole, as one node; see `PlanNode`."""
        node = PlanNode(name, "operator", "CPU", reason, operator, path, inputs, shape)
        self._nodes.append(node)
        return name

    def unit(self, plan: Plan, *inputs: str) -> tuple[str, ...]:
        """A part with a plan of its own, reading `inputs` in its inputs' order; its outputs.

        Raises:
            ValueError: Other than one input for each of the plan's.
        """
        placeholders = [node.name for node in plan.nodes if node.kind == "input"]
        given = dict(zip(placeholders, inputs, strict=True))
        outputs: tuple[str, ...] = ()
        for node in plan.nodes:
            sources = tuple(given.get(source, source) for source in node.inputs)
            if node.kind == "output":
                outputs = sources
            elif node.kind != "input":
                self._nodes.append(replace(node, inputs=sources))
        self._warnings += plan.warnings
        return outputs

    def plan(self, *outputs: str) -> Plan:
        """All of it, ending with `outputs`, its segments numbered anew."""
        nodes = [*self._nodes, PlanNode("output", "output", inputs=outputs)]
        return Plan(self._march, number_segments(nodes), tuple(self._warnings))
