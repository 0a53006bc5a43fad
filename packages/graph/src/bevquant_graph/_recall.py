"""A cache of captured graphs.

Fusing, quantizing, lowering, each exporter and each comparison capture their model, which takes
most of their time on a small one. A script passes the same model to several of them; a search or a
test suite passes many models of one structure.

A model's structure is all that its modules hold, serialized, except the values of parameters
and buffers, which a graph reads from the model. `recalled` returns the graph of an earlier capture
while it is in use and the tensors are the same. Otherwise it binds a program of this structure, of
the last captures, to this model's tensors, replays it and requires the model's bits. A model that
cannot be serialized is captured anew.
"""

from __future__ import annotations

import copy
import hashlib
import io
import pickle
import re
import types
from collections import OrderedDict
from collections.abc import Iterable
from dataclasses import dataclass
from itertools import chain
from time import perf_counter
from typing import Any
from weakref import WeakKeyDictionary, ref

from torch import Tensor, nn
from torch.export import ExportedProgram

from ._conditions import Condition
from ._frames import is_input
from ._graph import Graph, bound
from ._read_members import ReadMembers
from ._signature import Arguments, Tree, flatten

_KEPT = 128  # captures
_HOOKS = re.compile(r"_\w*hooks\w*")  # attributes of a module: number to hook
_SMALL = 1 << 16  # bytes of a tensor that is serialized
_NAMED = (type, types.BuiltinFunctionType, types.ModuleType, types.CodeType)


@dataclass(frozen=True)
class State:
    """Key of a capture."""

    # Digest of everything but tensors, which count by their order.
    structure: bytes
    # The tensors: identity and count of writes.
    tensors: tuple[tuple[int, int], ...]
    # Whether one of them is neither parameter nor buffer, and not serialized.
    alone: bool
    # Objects that the digest holds by address, kept alive so that the address stays unique.
    named: tuple[Any, ...]


@dataclass(frozen=True)
class _Followed:
    """A model's capture without its tensors, and its time."""

    state: State
    program: ExportedProgram
    inputs: Tree
    result: Tree
    conditions: tuple[Condition, ...]
    members: ReadMembers
    seconds: float


_LAST: WeakKeyDictionary[nn.Module, tuple[State, ref[Graph]]] = WeakKeyDictionary()
_PROGRAMS: OrderedDict[bytes, _Followed] = OrderedDict()


def recalled(model: nn.Module, given: Arguments, state: State | None) -> Graph | None:
    """A graph of this model as it is, and of such inputs, if one is in use or can be bound.

    It gives the model's bits.
    """
    if state is None:
        return None
    known = _PROGRAMS.get(state.structure)
    start = perf_counter()
    try:
        graph = _in_use(model, state) or _bound(known, model, state)
        if graph is not None:
            graph.check(given[1] or given[0])
    except Exception:  # it does not fit, or the model does not run: captured anew
        return None
    # A replay takes two runs of the model: of a large one with fixed sizes, a capture is faster.
    if known is not None and perf_counter() - start > known.seconds:
        del _PROGRAMS[state.structure]
    return graph


def remember(
    model: nn.Module, state: State | None, graph: Graph, seconds: float, *, by_values: bool
) -> None:
    """Let `recalled` return `graph` while it is in use, and its program for a while.

    `seconds` is the time of the capture; `by_values`: the graph holds numbers out of tensors.
    """
    if state is None:
        _LAST.pop(model, None)
        return
    _LAST[model] = state, ref(graph)
    # Nodes of modules, numbers and unserialized tensors belong to this model.
    if state.alone or graph.opaque or by_values:
        return
    program: Any = copy.copy(graph.program)
    # Each model binds its own tensors, so these are not kept alive.
    program._state_dict = dict.fromkeys(program._state_dict)
    buffers = program.graph_signature.buffers  # some of which are among its constants
    program._constants = {
        name: None if name in buffers else value.clone() if isinstance(value, Tensor) else value
        for name, value in program._constants.items()
    }
    program._example_inputs = None
    _PROGRAMS[state.structure] = _Followed(
        state, program, graph.inputs, graph.result, graph.conditions, graph.members, seconds
    )
    if len(_PROGRAMS) > _KEPT:
        _PROGRAMS.popitem(last=False)


def _in_use(model: nn.Module, state: State) -> Graph | None:
    """The model's own graph, if it is in use and the model is unchanged."""
    if model not in _LAST:
        return None
    last, graph = _LAST[model]
    same = (last.structure, last.tensors) == (state.structure, state.tensors)
    return graph() if same else None


def _bound(known: _Followed | None, model: nn.Module, state: State) -> Graph | None:
    """The graph of another model of a structure that was followed."""
    if known is None or state.alone:
        return None
    _PROGRAMS.move_to_end(state.structure)
    program = bound(known.program, model)
    graph = Graph(
        model, program, known.inputs, known.result, {}, known.conditions, members=known.members
    )
    _LAST[model] = state, ref(graph)
    return graph


def state_of(model: nn.Module, given: Arguments, *settings: bool) -> State | None:
    """Key of a capture with these settings; None if the model cannot be serialized."""
    # A forward that was replaced makes another structure.
    forwards: list[Any] = [getattr(type(module), "forward", None) for module in model.modules()]
    try:
        leaves, tree = flatten(given, arrays=lambda value, _: is_input(value))
        sizes = [(leaf.shape, leaf.stride(), str(leaf.dtype), str(leaf.device)) for leaf in leaves]
        writer = _Writer(chain(model.parameters(), model.buffers()))
        writer.dump((model, [id(f) for f in forwards], tree, sizes, settings))
    except Exception:  # a lock, a generator: objects without a serialized form
        return None
    # Inference tensors have no version.
    return State(
        writer.digest(),
        tuple((id(t), 0 if t.is_inference() else t._version) for t in writer.tensors),
        writer.alone,
        (*forwards, *writer.named),
    )


class _Writer(pickle.Pickler):
    """Serializes objects; tensors by their order, classes and functions by identity."""

    def __init__(self, registered: Iterable[Tensor]) -> None:
        self._written = io.BytesIO()
        super().__init__(self._written, protocol=5)
        self.tensors: list[Tensor] = []
        self.named: list[Any] = []
        self.alone = False
        self._places: dict[int, int] = {}
        self._strings: dict[str, int] = {}
        self._registered = list(registered)
        self._ids = {id(t) for t in self._registered}
        self._memory = {t.untyped_storage().data_ptr() for t in self._registered if t.numel()}

    def digest(self) -> bytes:
        """Digest of the serialized objects."""
        found = hashlib.sha256(self._written.getbuffer())
        found.update(repr(list(self._strings)).encode())
        return found.digest()

    def persistent_id(self, obj: Any) -> Any:
        """Replacement of an object; None: its content is serialized."""
        # Equal strings may be one object or two, which pickle's memo would tell apart.
        if type(obj) is str:
            return self._strings.setdefault(obj, len(self._strings))
        if isinstance(obj, Tensor):
            if id(obj) not in self._places:
                self._places[id(obj)] = len(self.tensors)
                self.tensors.append(obj)
            kind = type(obj).__qualname__, str(obj.dtype), str(obj.device), obj.requires_grad
            held = None if id(obj) in self._ids else self._content(obj)
            return "tensor", self._places[id(obj)], tuple(obj.shape), obj.stride(), kind, held
        if isinstance(obj, types.FunctionType):
            cells = [cell.cell_contents for cell in obj.__closure__ or ()]
            return "function", obj.__code__, cells, obj.__defaults__, obj.__kwdefaults__
        if isinstance(obj, _NAMED):
            self.named.append(obj)
            return "named", id(obj)
        # Such as calibrators.
        if getattr(type(obj), "is_read_by_forwards", True) is False:
            return "passed over"
        return None

    def reducer_override(self, obj: Any) -> Any:
        """Modules with their hooks in order: torch's numbers of hooks depend on the process."""
        if not isinstance(obj, nn.Module):
            return NotImplemented
        state: Any = obj.__getstate__()  # type: ignore[attr-defined,unused-ignore]
        hooks = {
            key: value
            for key, value in state.items()
            if _HOOKS.fullmatch(key) and isinstance(value, OrderedDict)
        }
        places = {
            number: place for place, number in enumerate(sorted(set().union(*hooks.values())))
        }
        ordered = {
            key: [(places[number], hook) for number, hook in value.items()]
            for key, value in hooks.items()
        }
        return object.__new__, (type(obj),), {**state, **ordered}

    def _content(self, tensor: Tensor) -> Any:
        """Values of a tensor beside parameters and buffers; None for large ones and views."""
        memory = tensor.untyped_storage()
        if memory.nbytes() > _SMALL or memory.data_ptr() in self._memory:
            self.alone = True
            return None
        return tensor.tolist()
