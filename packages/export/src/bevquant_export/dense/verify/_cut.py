"""A file cut at its quantized tensors: each piece reads the model's integers.

So a difference is found at its cause and not downstream.
"""

from __future__ import annotations

from collections import Counter, defaultdict, deque
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from concurrent.futures import Executor, Future
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import numpy as np
from torch import Tensor

from bevquant_export._differences import TensorDifference
from bevquant_export.dense._written import QdqFile
from bevquant_export.dense.nodes._blocks import product_shape
from bevquant_export.dense.nodes._graph import Array
from bevquant_export.dense.nodes._profile import profile_of
from bevquant_export.dense.nodes._weighted import float8_steps_apart, rounds_within
from bevquant_export.dense.verify._float_errors import FloatErrors
from bevquant_export.dense.verify._rounding_boundary import RoundingBoundary
from bevquant_export.runtime._session import upgraded_opset
from bevquant_int8sim.program import Program, Step

if TYPE_CHECKING:
    import onnx_ir as ir

AT_ONCE = 2
"""Pieces that run at once, each on its share of the threads: what lies between their nodes is held
twice, so more would cost more memory than time. The model goes no further ahead of its file."""
_FEW = 0.01  # of a tensor's values


@dataclass(eq=False)
class _Piece:
    """Nodes between cut tensors."""

    proto: Any
    reads: list[str]
    # Its outputs to the tensors that they are.
    makes: dict[str, str]
    # Those tensors that the model has not computed yet.
    missing: set[str]
    # These tensors, and values of the program from which the outputs are computed again.
    needs: tuple[str, ...]


class CutFile:
    """A file cut at its quantized tensors, run beside the model.

    A piece runs as soon as the model has computed its inputs and outputs, on another thread while
    the model continues. Values that no piece needs any more are released, so the tensors of a model
    are never all in memory. With `outputs`, the producers of float outputs run too (`floats`).
    Pieces to `leave`, by their model and what they make, do not run. Differences are explained in
    rows that `departs` without an explanation.
    """

    def __init__(
        self,
        file: QdqFile,
        content: bytes,
        program: Program,
        inputs: Mapping[str, Array],
        run_in: Callable[..., Any],
        pool: Executor,
        outputs: bool,
        departs: Callable[[TensorDifference], bool],
        leave: Callable[[Any, Collection[str]], bool],
    ) -> None:
        self._departs = departs
        self._file, self._inputs, self._run_in, self._pool = file, inputs, run_in, pool
        self._running: deque[Future[None]] = deque()
        self._profile = profile_of(file.profile)
        self._rows: dict[str, TensorDifference | None] = {}
        self._found: dict[str, tuple[Step, str, Array]] = {}
        self._values: dict[str, Array] = {}
        self._doubts: dict[str, tuple[str, Array, Array, tuple[int, ...]]] = {}
        self._float8_doubts: dict[str, tuple[Step, Array, Array, Array]] = {}
        self.floats: dict[str, Array] = {}
        self._program = program
        self._boundary = RoundingBoundary(program, self._values, {}, self._profile)
        names: dict[str, list[str]] = defaultdict(list)
        self._tensors = {**file.integers, **file.float8}
        self._float8 = set(file.float8.values())
        for value, tensor in self._tensors.items():
            if not {value, value.rpartition("[")[0]} & program.values.keys():
                raise self._absent(tensor)
            names[tensor].append(value)
        self._names = names
        proto, made = forced(content, {tensor: self._kind(tensor) for tensor in names})
        self._pieces = []
        for part in pieces_of(proto):
            ports = {port.name for port in (*part.graph.input, *part.graph.output)}
            reads = [name for name in names if name in ports]
            makes = {made[name]: name for name in names if made[name] in ports}
            own = [port.name for port in part.graph.output if port.name not in makes]
            if (makes or outputs) and not leave(part, [*makes.values(), *own]):
                values = {
                    v for t in makes.values() for n in names[t] for v in self._boundary.reads(n)
                }
                missing = {*reads, *makes.values()}
                needs = (*missing, *values)
                self._pieces.append(_Piece(part, reads, makes, missing, needs))
        self._needed = Counter(name for piece in self._pieces for name in piece.needs)

    def hold(self, values: Iterable[tuple[str, Any]]) -> None:
        """Keep values from which integers are computed again."""
        for name, value in values:
            if self._needed[name] and isinstance(value, Tensor):
                self._values[name] = value.cpu().numpy()

    def compare(self, step: Step, name: str, value: Array) -> None:
        """Take the model's value of a tensor, and run the pieces that waited for it."""
        tensor = self._tensors[name]
        # Of two values that are one tensor (a ReLU of non-negative values), the first counts.
        if tensor not in self._rows:
            self._rows[tensor] = None
            self._found[tensor] = step, name, value
            for piece in [piece for piece in self._pieces if tensor in piece.missing]:
                piece.missing.remove(tensor)
                if not piece.missing:
                    self._start(piece)

    def finish(self) -> None:
        """Run the pieces without a cut input."""
        for piece in list(self._pieces):
            if missing := sorted(piece.missing - set(self._rows)):
                raise self._absent(missing[0])
            self._start(piece)
        self._wait(0)

    def _absent(self, tensor: str) -> ValueError:
        return ValueError(
            f"compare_qdq_onnx: {self._file.path.name} has {tensor!r}, which the model does not "
            "make; compare it with the model that it was written from. If that was written from a "
            "list of frames, give the integer model: simulate(model, frames)"
        )

    def rows(self) -> tuple[TensorDifference, ...]:
        """Each tensor, in the order of the model."""
        return tuple(row for row in self._rows.values() if row is not None)

    def in_doubt(self) -> set[str]:
        """Floats whose errors may explain what is not explained; other doubts are dropped."""
        left = {row.tensor for row in self.rows() if row.unexplained and self._departs(row)}
        self._doubts = {name: doubt for name, doubt in self._doubts.items() if name in left}
        self._float8_doubts = {n: doubt for n, doubt in self._float8_doubts.items() if n in left}
        read = {read for doubt in self._doubts.values() for read in self._boundary.reads(doubt[0])}
        return read | {doubt[0].args[0].name for doubt in self._float8_doubts.values()}

    def count_again(self, floats: FloatErrors) -> None:
        """Count ties downstream of floats whose errors are known now."""
        ties = RoundingBoundary(self._program, floats.values, floats.errors, self._profile)
        for tensor, doubt in self._doubts.items():
            if row := self._rows[tensor]:
                self._rows[tensor] = replace(row, ties=max(row.ties, ties.count(*doubt)))
        for tensor, (step, places, x, got) in self._float8_doubts.items():
            error = floats.errors.get(step.args[0].name)
            if (row := self._rows[tensor]) and error is not None:
                within = rounds_within(step, x, error, got).reshape(-1)[places]
                self._rows[tensor] = replace(row, ties=int(np.count_nonzero(within)))

    def leaves_few(self) -> bool:
        """Whether values are unexplained, few of each tensor: not those of a wrong operation."""
        left = [row for row in self.rows() if row.tensor in self._doubts and row.unexplained]
        return bool(left) and all(row.unexplained <= _FEW * row.elements for row in left)

    def _start(self, piece: _Piece) -> None:
        self._pieces.remove(piece)
        self._running.append(self._pool.submit(self._run, piece))
        self._wait(AT_ONCE)

    def _wait(self, most: int) -> None:
        """Wait until at most `most` pieces are running; errors are raised in order."""
        while len(self._running) > most:
            self._running.popleft().result()

    def _run(self, piece: _Piece) -> None:
        running = self._run_in(piece.proto, self._profile.runner)
        taken = {port.name for port in running.get_inputs()}
        given = {name: value for name, value in self._inputs.items() if name in taken}
        for name in piece.reads:
            step, _, value = self._found[name]
            given[name] = (
                _as_read(step, value) if name in self._float8 else self._stored(value, name)
            )
        names = [port.name for port in piece.proto.graph.output]
        for name, got in zip(names, running.run(names, given), strict=True):
            if name in piece.makes:
                self._rows[piece.makes[name]] = self._row(piece.makes[name], got)
            else:
                self.floats[name] = got
        for name in piece.needs:
            self._needed[name] -= 1
            if not self._needed[name]:
                self._found.pop(name, None)
                self._values.pop(name, None)

    def _kind(self, tensor: str) -> Any:
        """Type of a cut tensor: float32 of FP8, else that of its integers."""
        return np.float32 if tensor in self._float8 else self._profile.stored(self._form(tensor))[0]

    def _form(self, tensor: str) -> Any:
        """Form of its values in the program; members of a tuple have the tuple's."""
        name, values = self._names[tensor][0], self._program.values
        return (values.get(name) or values[name.rpartition("[")[0]]).form

    def _stored(self, value: Array, tensor: str) -> Array:
        """Integers as the file has them."""
        # A tensor without axes comes out of numpy's arithmetic as a number, which is no input.
        dtype, zero = self._profile.stored(self._form(tensor))
        moved = np.asarray(value.astype(np.int16) + np.int16(zero)) if zero else value
        return moved.astype(dtype, copy=False)

    def _row(self, tensor: str, got: Array) -> TensorDifference:
        step, name, value = self._found[tensor]
        if tensor in self._float8:
            return self._float8_row(tensor, step, value, got)
        value = np.atleast_1d(value)
        # A linear layer's result has two axes in some files, and its own behind a Reshape.
        got = got.reshape(value.shape)
        index = np.unravel_index(np.flatnonzero(self._stored(value, tensor) != got), got.shape)
        places = np.stack(index, axis=1)
        zero = self._profile.stored(self._form(tensor))[1]
        want, made = value[index].astype(np.int32), got[index].astype(np.int32) - zero
        apart = np.abs(want - made)
        floats = self._boundary.rounds_floats(name)
        # Where rounding swaps two near-equal scores, the values of another row follow.
        near = (apart == 1) | (floats and self._form(tensor).bits == 8)
        where = places[near], (want + made)[near] * 0.5, value.shape
        largest = int(apart.max(initial=0))
        size = max(int(value.max(initial=0)), -int(value.min(initial=0)))
        row = TensorDifference(
            step.path, step.op, tensor, int(value.size), len(places), largest,
            form=str(self._form(tensor)), size=size,
        )  # fmt: skip
        if not self._departs(row):
            return row
        ties = self._boundary.count(name, *where)
        if ties < len(where[0]) and floats:
            self._doubts[tensor] = name, *where
        return replace(row, ties=ties)

    def _float8_row(self, tensor: str, step: Step, value: Array, got: Array) -> TensorDifference:
        """FP8 values of the file beside the model's; `count_again` counts ties."""
        want, got = value.reshape(-1), got.reshape(-1)
        places = np.flatnonzero(~((want == got) | (np.isnan(want) & np.isnan(got))))
        largest = float8_steps_apart(want[places], got[places], step)
        x = self._values.get(step.args[0].name)
        if len(places) and x is not None:
            self._float8_doubts[tensor] = step, places, x, got.reshape(x.shape)
        return TensorDifference(
            step.path, "quantize", tensor, value.size, len(places), largest, form=step.args[2]
        )


def _as_read(step: Step, value: Array) -> Array:
    """An FP8 tensor in the shape that its layer reads in the file."""
    if step.args[2] != "nvfp4":
        return np.asarray(value)
    return value.reshape(product_shape(value.shape, step.args[3]))


def forced(content: bytes, tensors: Mapping[str, Any]) -> tuple[ir.Model, dict[str, str]]:
    """The model with these tensors cut: their consumers read inputs of the same name.

    Returns the model with these tensors' producers as extra outputs, followed by the file's own
    outputs; and for each tensor the output that holds it.
    """
    import onnx
    import onnx_ir as ir

    model = ir.from_proto(upgraded_opset(onnx.load_model_from_string(content)))
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
