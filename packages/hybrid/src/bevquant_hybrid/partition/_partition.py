"""Split a graph between BPU and CPU: places first, then boundaries, then segments."""

from __future__ import annotations

import difflib
import warnings
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from torch import fx, nn

from bevquant_hybrid.operators import load_support_table

from ._placement import place_operator
from ._plan import Plan, PlanNode
from ._read_graph import GraphNode, read_graph
from ._segments import number_segments
from ._wishes import read_wishes

__all__ = ["partition"]

# The value of these is that of their input, seen otherwise; where the march has them at all.
_PASSING = (
    *("torch.nn.Identity", "torch.nn.Dropout", "torch.nn.Dropout2d", "torch.Tensor.reshape"),
    *("torch.Tensor.transpose", "torch.Tensor.getitem"),
)


def partition(
    graph_module: fx.GraphModule,
    march: str,
    hybrid_dict: Mapping[str, Iterable[Any]] | None = None,
    *,
    example_inputs: Any = None,
) -> Plan:
    """Plan where each node of a float graph runs, and where values are quantized and dequantized.

    A node runs on the CPU if the mapper's list has no BPU form of it for the march, if
    ``hybrid_dict`` names it or a module around it, or if its module's ``qconfig`` is None. Behind a
    CPU node whose result a BPU node reads, directly or through nodes that pass it on, stands a
    quantize boundary ``<node>_activation_post_process``; before a CPU node that reads an integer, a
    dequantize boundary ``<node>_input_dequant_<i>``. Readers on the CPU keep the float value.

    Args:
        graph_module: Traced with its QuantStubs and DeQuantStubs as leaves; or one that is prepared
            or converted already, whose modules then say where they run. It is not changed.
        march: ``"bernoulli2"``, ``"bayes"`` or ``"bayes-e"``.
        hybrid_dict: ``{"module_name": ["a.b", …], "module_type": [nn.Conv2d, …]}``: what is to run
            on the CPU, with everything inside it.
        example_inputs: One tensor, or a tuple or list of arguments, for the shapes and so the bytes
            that cross boundaries; without them from the nodes' ``tensor_meta``, if they have it.
            The integers of a prepared or converted graph are counted with their own width, those
            of a float one as int8.

    Returns:
        The plan. Names and classes of ``hybrid_dict`` that match nothing, and operators that read
        an input which no stub has quantized, are among its warnings, and warned of.

    Raises:
        ValueError: If the march or a key of ``hybrid_dict`` is unknown, or its value is no list.
    """
    names, types = read_wishes(hybrid_dict)
    inputs = example_inputs
    if inputs is not None and not isinstance(inputs, tuple):
        inputs = tuple(inputs) if isinstance(inputs, list) else (inputs,)
    records = read_graph(graph_module, inputs)
    notes = _unmatched(records, graph_module, names, types)
    state = _State(load_support_table().march(march).name)
    for record in records:
        state.place(record, names, types)
    for record in records:
        if record.kind == "operator" and state.kinds[record.name] == "CPU":
            state.quantize_behind(record.name)
            state.dequantize_before(record.name)
    notes += state.unquantized()
    for note in notes:
        warnings.warn(note, stacklevel=2)
    return Plan(state.march, number_segments(state.finish()), tuple(notes))


def _unmatched(
    records: list[GraphNode],
    graph_module: fx.GraphModule,
    names: tuple[str, ...],
    types: tuple[type[nn.Module], ...],
) -> list[str]:
    paths = {path for record in records for path, _ in record.around}
    modules = {path for path, _ in graph_module.named_modules(remove_duplicate=False)}
    classes = {cls for record in records for _, cls in record.around}
    notes = []
    for name in names:
        if name not in paths:
            near = difflib.get_close_matches(name, sorted(paths), n=3, cutoff=0.4)
            hint = f"; names near it: {', '.join(near)}" if near else ""
            what = "no module is called" if name not in modules else "no node is in the module"
            notes.append(f"hybrid_dict: {what} {name!r}{hint}")
    for cls in types:
        if cls not in classes:
            notes.append(f"hybrid_dict: no module of class {cls.__name__} is called")
    return notes


@dataclass
class _State:
    """The nodes under construction, in order."""

    march: str
    nodes: dict[str, PlanNode] = field(default_factory=dict)
    kinds: dict[str, str] = field(default_factory=dict)  # BPU, CPU, PASS, QUANT, DEQUANT, EDGE
    order: list[str] = field(default_factory=list)

    def place(
        self, record: GraphNode, names: tuple[str, ...], types: tuple[type[nn.Module], ...]
    ) -> None:
        """Decide the kind of one node, which stands after all that it reads."""
        kind, place, reason = self._decide(record, names, types)
        role = {"PASS": "pass", "BPU": "operator", "CPU": "operator"}.get(kind, record.kind)
        self.kinds[record.name] = kind
        self.nodes[record.name] = PlanNode(
            *(record.name, role, place, reason, record.operator, record.path),
            *(record.inputs, record.shape),
            dtype=record.dtype,
        )
        self.order.append(record.name)

    def _decide(
        self, record: GraphNode, names: tuple[str, ...], types: tuple[type[nn.Module], ...]
    ) -> tuple[str, str, str]:
        if record.kind in ("input", "output", "attribute"):
            return "EDGE", "", ""
        if record.kind == "quantize":
            return "QUANT", "CPU", "the model quantizes here"
        if record.kind == "dequantize":
            return "DEQUANT", "CPU", "the model dequantizes here"
        for path, cls in record.around:
            if path in names:
                return "CPU", "CPU", f"hybrid_dict names {path}"
            if cls in types:
                return "CPU", "CPU", f"hybrid_dict names the class {cls.__name__} of {path}"
        if record.switched_off:
            return "CPU", "CPU", f"the qconfig of {record.path} is None"
        if record.quantized:
            return "BPU", "BPU", "the prepared model quantizes it"
        if record.quantized is False and not self._reads_integers(record):
            return "CPU", "CPU", "the prepared model leaves it in float"
        listed = place_operator(record.operator, self.march)
        if listed.place == "CPU":
            return "CPU", "CPU", f"{record.operator}: {listed.because}"
        if record.operator in _PASSING and record.inputs:
            source = self.kinds[self.source(record.inputs[0])]
            place = "BPU" if source in ("BPU", "QUANT") else "CPU"
            return "PASS", place, "it passes on what it reads, where that is"
        return "BPU", "BPU", f"{record.operator}: {listed.because}"

    def _reads_integers(self, record: GraphNode) -> bool:
        return any(self.kinds[self.source(name)] in ("BPU", "QUANT") for name in record.inputs)

    def source(self, name: str) -> str:
        """The node whose value ``name`` has, beyond everything that passes it on."""
        while self.kinds[name] == "PASS":
            name = self.nodes[name].inputs[0]
        return name

    def _readers(self, name: str) -> list[str]:
        return [reader for reader in self.order if name in self.nodes[reader].inputs]

    def _feeds_bpu(self, name: str) -> bool:
        if self.kinds[name] == "PASS":
            return any(self._feeds_bpu(reader) for reader in self._readers(name))
        return self.kinds[name] == "BPU"

    def quantize_behind(self, name: str) -> None:
        """Insert a quantize boundary where a BPU node reads the CPU node's result."""
        readers = [reader for reader in self._readers(name) if self._feeds_bpu(reader)]
        if not readers:
            return
        boundary = f"{name}_activation_post_process"
        reason = f"{name} computes floats, {' and '.join(readers)} reads integers"
        self._insert(boundary, "quantize", name, reason, self.order.index(name) + 1)
        for reader in readers:
            self._redirect(reader, name, boundary)

    def dequantize_before(self, name: str) -> None:
        """Insert a dequantize boundary for each input of a CPU node that is an integer."""
        integers = [
            source
            for source in self.nodes[name].inputs
            if self.kinds[self.source(source)] in ("BPU", "QUANT")
        ]
        for index, source in enumerate(integers):
            boundary = f"{name}_input_dequant_{index}"
            reason = f"{source} is integers, {name} computes floats"
            self._insert(boundary, "dequantize", source, reason, self.order.index(name))
            self._redirect(name, source, boundary)

    def _insert(self, name: str, kind: str, source: str, reason: str, at: int) -> None:
        operator = "torch.quantization." + ("QuantStub" if kind == "quantize" else "DeQuantStub")
        shape = self.nodes[source].shape
        self.nodes[name] = PlanNode(
            *(name, kind, "CPU", reason, operator, name, (source,), shape),
            inserted=True,
            dtype=self.nodes[source].dtype if kind == "quantize" else "",
        )
        self.kinds[name] = "QUANT" if kind == "quantize" else "DEQUANT"
        self.order.insert(at, name)

    def _redirect(self, reader: str, old: str, new: str) -> None:
        node = self.nodes[reader]
        inputs = tuple(new if source == old else source for source in node.inputs)
        self.nodes[reader] = replace(node, inputs=inputs)

    def unquantized(self) -> list[str]:
        """A warning for each BPU node that reads floats from outside."""
        notes = []
        for name in self.order:
            if self.kinds[name] != "BPU":
                continue
            for source in self.nodes[name].inputs:
                origin = self.source(source)
                if self.kinds[origin] == "DEQUANT" or self.nodes[origin].kind == "input":
                    notes.append(
                        f"{name} runs on the BPU and reads {origin}, which is float; insert a "
                        "QuantStub between them"
                    )
        return notes

    def finish(self) -> list[PlanNode]:
        """All nodes in order; what passes a value on stands where the value now is."""
        nodes = []
        for name in self.order:
            node = self.nodes[name]
            if self.kinds[name] == "PASS":
                source = self.kinds[self.source(name)]
                node = replace(node, place="BPU" if source in ("BPU", "QUANT") else "CPU")
            nodes.append(node)
        return nodes
