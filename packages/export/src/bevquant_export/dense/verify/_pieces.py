"""A file cut at its quantized tensors into models of connected nodes."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from hashlib import sha256
from typing import TYPE_CHECKING, Any

import numpy as np

from bevquant_export.dense._source import tuple_of
from bevquant_export.dense._written import QdqFile
from bevquant_export.dense.nodes._graph import Array
from bevquant_export.dense.nodes._profile import profile_of
from bevquant_export.dense.verify._rounding_boundary import RoundingBoundary
from bevquant_export.runtime._session import computes_in_half, half_inputs, upgraded_opset
from bevquant_int8sim.program import Program

if TYPE_CHECKING:
    import onnx_ir as ir


@dataclass(frozen=True, eq=False)
class Piece:
    """Connected nodes of a file, as a model."""

    proto: Any
    # Quantized tensors that are its inputs.
    reads: list[str]
    # Its outputs to the quantized tensors that they are.
    makes: dict[str, str]
    # Its other outputs, which are the file's.
    own: list[str]
    # These tensors, and values of the program from which the outputs are computed again.
    needs: tuple[str, ...]

    @cached_property
    def key(self) -> bytes:
        """Equal for pieces that compute the same."""
        # Its metadata are the file's.
        return sha256(self.proto.graph.SerializeToString(deterministic=True)).digest()

    @cached_property
    def in_half(self) -> bool:
        return computes_in_half(self.proto)


class Pieces:
    """A file cut at its quantized tensors.

    What depends on no input is found once, so that several frames can run on the same pieces.
    """

    def __init__(self, file: QdqFile, content: bytes, program: Program) -> None:
        import onnx

        self.file, self.program, self.profile = file, program, profile_of(file.profile)
        self.float8 = set(file.float8.values())
        self.tensors = {**file.integers, **file.float8}
        # Each tensor to the values of the program that it is.
        self.names: dict[str, list[str]] = defaultdict(list)
        for value, tensor in self.tensors.items():
            if not {value, tuple_of(value)} & program.values.keys():
                raise self.absent(tensor)
            self.names[tensor].append(value)
        proto = onnx.load_model_from_string(content)
        self.halves = half_inputs(proto) if self.profile.half else set()
        kinds = {tensor: self._kind(tensor) for tensor in self.names}
        model, made = forced(upgraded_opset(proto), kinds)
        boundary = RoundingBoundary(program, {}, {}, self.profile)
        self.pieces = [self._piece(part, made, boundary) for part in pieces_of(model)]

    def _piece(self, part: Any, made: Mapping[str, str], boundary: RoundingBoundary) -> Piece:
        ports = {port.name for port in (*part.graph.input, *part.graph.output)}
        reads = [name for name in self.names if name in ports]
        makes = {made[name]: name for name in self.names if made[name] in ports}
        own = [port.name for port in part.graph.output if port.name not in makes]
        values = {v for t in makes.values() for n in self.names[t] for v in boundary.reads(n)}
        return Piece(part, reads, makes, own, (*{*reads, *makes.values()}, *values))

    def absent(self, tensor: str) -> ValueError:
        return ValueError(
            f"compare_qdq_onnx: {self.file.path.name} has {tensor!r}, which the model does not "
            "make; compare it with the model that it was written from. If that was written from a "
            "list of frames, give the integer model: simulate(model, frames)"
        )

    def form(self, tensor: str) -> Any:
        """Form of its values in the program; members of a tuple have the tuple's."""
        name, values = self.names[tensor][0], self.program.values
        return (values.get(name) or values[tuple_of(name)]).form

    def stored(self, value: Array, tensor: str) -> Array:
        """Integers as the file has them."""
        # A tensor without axes comes out of numpy's arithmetic as a number, which is no input.
        dtype, zero = self.profile.stored(self.form(tensor))
        moved = np.asarray(value.astype(np.int16) + np.int16(zero)) if zero else value
        return moved.astype(dtype, copy=False)

    def _kind(self, tensor: str) -> Any:
        """Type of a cut tensor: float32 of FP8, else that of its integers."""
        return np.float32 if tensor in self.float8 else self.profile.stored(self.form(tensor))[0]


def forced(proto: Any, tensors: Mapping[str, Any]) -> tuple[ir.Model, dict[str, str]]:
    """The model with these tensors cut: their consumers read inputs of the same name.

    Returns the model with these tensors' producers as extra outputs, followed by the file's own
    outputs; and for each tensor the output that holds it.
    """
    import onnx_ir as ir

    model = ir.from_proto(proto)
    graph, known = model.graph, ir.convenience.create_value_mapping(model.graph)
    cut = {name: known[name] for name in tensors}
    own = [value for value in graph.outputs if value.name not in cut]
    graph.outputs.clear()
    for name, value in cut.items():
        kind = ir.TensorType(ir.DataType.from_numpy(np.dtype(tensors[name])))
        port = ir.Value(name=name, type=kind)
        value.replace_all_uses_with(port)
        value.name, value.type, value.shape = f"{name}.made", kind, None
        graph.inputs.extend([port] if port.uses() else [])
    graph.outputs.extend([*cut.values(), *own])
    return model, {name: f"{name}.made" for name in tensors}


def pieces_of(model: ir.Model) -> Iterator[Any]:
    """Models of connected nodes, each with its inputs, in the order of their nodes."""
    constant: set[ir.Node | None] = set()
    groups: dict[ir.Node | None, list[Any]] = {}
    for node in model.graph:
        read = _read(node)
        # Constants connect no nodes: each piece has those that it reads.
        if all(v.is_initializer() or v.producer() in constant for v in read):
            constant.add(node)
            continue
        groups[node] = [node]
        for maker in (value.producer() for value in read):
            if maker in groups and groups[maker] is not groups[node]:
                # The smaller group joins the larger one, so that few nodes change theirs.
                less, more = sorted((groups[node], groups[maker]), key=len)
                more += less
                groups |= dict.fromkeys(less, more)
    places = {node: place for place, node in enumerate(model.graph)}
    outputs: dict[int, list[ir.Value]] = {}
    for value in model.graph.outputs:
        maker = value.producer()
        alone = maker is None or maker in constant
        outputs.setdefault(id(value if alone else groups[maker]), []).append(value)
    parts = {id(group): group for group in groups.values()}
    parts |= {key: [] for key in outputs if key not in parts}
    for key, nodes in parts.items():
        if key in outputs:
            every = _with_constants(nodes, outputs[key], constant)
            yield _piece(model, sorted(every, key=places.__getitem__), outputs[key])


def _piece(model: ir.Model, nodes: list[ir.Node], outputs: list[ir.Value]) -> Any:
    import onnx_ir as ir

    read = dict.fromkeys([*(value for node in nodes for value in _read(node)), *outputs])
    view: Any = ir.GraphView(
        [value for value in read if value.is_graph_input()], outputs, nodes=nodes,
        initializers=[value for value in read if value.is_initializer()],
        opset_imports=model.graph.opset_imports, name=model.graph.name,
    )  # fmt: skip
    piece = ir.Model(
        view, ir_version=model.ir_version, producer_name=model.producer_name,
        functions=[*model.functions.values()], metadata_props=model.metadata_props,
    )  # fmt: skip
    return ir.to_proto(piece)


def _read(node: ir.Node) -> list[ir.Value]:
    """Inputs of a node, with those of its subgraphs."""
    held = (attribute.value for attribute in node.attributes.values())
    inner = [n for graph in held if hasattr(graph, "all_nodes") for n in graph.all_nodes()]
    values = [value for n in (node, *inner) for value in n.inputs]
    return [value for value in values if value is not None and value.graph is node.graph]


def _with_constants(
    nodes: list[ir.Node], outputs: list[ir.Value], constant: Collection[ir.Node | None]
) -> set[ir.Node]:
    """The nodes, and those that compute the constants that they read."""
    found, pending = set(nodes), [*outputs, *(value for node in nodes for value in _read(node))]
    while pending:
        maker = pending.pop().producer()
        if maker is not None and maker in constant and maker not in found:
            found.add(maker)
            pending += _read(maker)
    return found
