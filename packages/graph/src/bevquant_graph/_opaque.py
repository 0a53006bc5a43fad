"""Modules that cannot be followed, as one node each.

``bevquant_graph::opaque(tensors, key)`` calls a module in Python. In a graph it stands for a module
that could not be captured: its inputs and outputs are values, its inside is unknown. A second call
on half of the rows finds the open sizes of its outputs. A size that changes depends on the rows or
on the module; a size that stays is the example's.
"""

from __future__ import annotations

import itertools
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, fx, nn

from ._signature import Tree, flatten, rebuild


@dataclass(eq=False)
class Opaque:
    """A module that is one node of a graph.

    Attributes:
        path: The module.
        reason: Why it could not be captured, with file and line.
        calls: For each call in order: key, tree of the arguments, example outputs, tree of these.
        called: Paths of the modules that run in these calls, its own among them.
    """

    path: str
    reason: str
    calls: list[_Call] = field(default_factory=list)
    called: set[str] = field(default_factory=set)

    def has_own_sizes(self) -> bool:
        """Whether a size of an output is a number of the module's own making."""
        return any(n is None for c in self.calls for sizes in c.sizes for n in sizes)

    def fix_sizes(self) -> None:
        """Use the example's sizes for the module's outputs."""
        for call in self.calls:
            call.sizes = [list(t.shape) for t in call.outputs]


class _Rows(NamedTuple):
    """As many as a tensor has that the module is given."""

    place: int


@dataclass(eq=False)
class _Call:
    key: str
    module: nn.Module
    inputs: Tree
    outputs: list[Tensor]
    result: Tree
    sizes: list[list[int | _Rows | None]]  # of the outputs; None: a number of its own


_calls: dict[str, _Call] = {}
_numbers = itertools.count()


@torch.library.custom_op("bevquant_graph::opaque", mutates_args=())
def _opaque(tensors: list[Tensor], key: str) -> list[Tensor]:
    call = opaque_call(key)
    args, kwargs = rebuild(call.inputs, tensors)
    made, _ = flatten(call.module(*args, **kwargs))
    apart: list[Tensor] = []
    for result in made:  # an operator's results may share no memory with its operands, nor a pair
        shared = {t.untyped_storage().data_ptr() for t in (*tensors, *apart) if t.numel()}
        own = result.untyped_storage().data_ptr() not in shared
        apart.append(result if own else result.clone())
    return apart


@_opaque.register_fake
def _(tensors: list[Tensor], key: str) -> list[Tensor]:
    call = opaque_call(key)
    is_open = any(isinstance(n, torch.SymInt) for t in tensors for n in t.shape)

    def size(known: int | _Rows | None, example: int) -> Any:
        if isinstance(known, _Rows):
            return tensors[known.place].shape[0]
        return torch.library.get_ctx().new_dynamic_size() if known is None and is_open else example

    return [
        torch.empty(list(map(size, sizes, t.shape)), dtype=t.dtype, device=t.device)
        for t, sizes in zip(call.outputs, call.sizes, strict=True)
    ]


def fixed_sizes(node: fx.Node) -> list[dict[int, int]]:
    """Sizes of an opaque node's outputs that the graph may hold as constants: axis to size.

    For consumed outputs: the example's sizes that do not follow a number of rows.
    """
    call = opaque_call(str(node.args[1]))
    read = {u.args[1] for u in node.users if any(r.op != "output" for r in u.users)}
    return [
        {a: n for a, n in enumerate(sizes) if isinstance(n, int)} if place in read else {}
        for place, sizes in enumerate(call.sizes)
    ]


def refuse_other_sizes(
    path: str, fixed: Sequence[Mapping[int, int]], outputs: Sequence[Tensor]
) -> None:
    """Refuse a module's result where a size differs from the graph's constant.

    Raises:
        ValueError: It differs; the message names module, axis and sizes.
    """
    for sizes, made in zip(fixed, outputs, strict=False):
        for axis, size in sizes.items():
            if made.shape[axis : axis + 1] != (size,):
                raise ValueError(
                    f"{path}: expected an output of size {size} in axis {axis}, as in the "
                    f"example, got shape {tuple(made.shape)}; the module could not be followed, "
                    "and the forward depends on its output's size: capture again with such inputs"
                )


OPAQUE = torch.ops.bevquant_graph.opaque.default


def opaque_call(key: str) -> _Call:
    """The module that the node with this key calls."""
    if key not in _calls:
        raise ValueError(
            f"bevquant_graph::opaque: nothing is known under {key!r}; a graph with opaque nodes "
            "lives in the process that captured it: capture the model again"
        )
    return _calls[key]


@contextmanager
def opaque_modules(model: nn.Module, opaque: Mapping[str, Opaque]) -> Iterator[None]:
    """While it is entered, each module at a path of `opaque` is one operator call."""

    def forward(calls: Iterator[_Call], *args: Any, **kwargs: Any) -> Any:
        return called_as_operator(next(calls), args, kwargs)

    given = {path: partial(forward, iter(entry.calls)) for path, entry in opaque.items()}
    with forwards_replaced(model, given):
        yield


@contextmanager
def forwards_replaced(model: nn.Module, forwards: Mapping[str, Any]) -> Iterator[None]:
    """While it is entered, the modules at these paths have other forwards."""
    held = [(vars(model.get_submodule(p)), forward) for p, forward in forwards.items()]
    before = [(own, own.get("forward")) for own, _ in held]
    for own, forward in held:
        own["forward"] = forward
    try:
        yield
    finally:
        for own, forward in before:
            own.pop("forward") if forward is None else own.update(forward=forward)


def called_as_operator(call: _Call, args: Any, kwargs: Any) -> Any:
    """Result of calling a module that is one node."""
    leaves, call.inputs = flatten((args, kwargs))
    return rebuild(call.result, OPAQUE(leaves, call.key))


@dataclass(eq=False)
class Recorded:
    """The calls of a module in one run of the model, and the tensors that they were given."""

    entry: Opaque
    given: list[list[Tensor]] = field(default_factory=list)

    def opaque(self, reason: str) -> Opaque:
        """The module as one node."""
        self.entry.reason = reason
        for call, leaves in zip(self.entry.calls, self.given, strict=True):
            # Other traces of the same model may hold the call already.
            if call.key not in _calls:
                _calls[call.key] = call
                _find_open_sizes(call, leaves)
        # Free the inputs.
        self.given = [[] for _ in self.given]
        return self.entry


def recorded(model: nn.Module, paths: Iterable[str], run: Any) -> dict[str, Recorded]:
    """The calls of the modules at `paths` in one run of the model."""
    found: dict[str, Recorded] = {}

    def record(path: str, module: nn.Module, args: Any, kwargs: Any, output: Any) -> None:
        leaves, result = flatten(output)
        taken, inputs = flatten((args, kwargs))
        call = _Call(
            f"{path}:{next(_numbers)}", module, inputs,
            # Clones, as the model may write to its results later.
            [leaf.detach().clone() for leaf in leaves], result,
            [list(leaf.shape) for leaf in leaves],
        )  # fmt: skip
        found[path].entry.calls.append(call)
        found[path].given.append([leaf.detach().clone() for leaf in taken])

    with ExitStack() as hooks:
        for path in paths:
            module, entry = model.get_submodule(path), Opaque(path, "")
            found[path] = Recorded(entry)
            hook = module.register_forward_hook(partial(record, path), with_kwargs=True)
            hooks.callback(hook.remove)
            for name, inside in module.named_modules(prefix=path, remove_duplicate=False):
                note = partial(_noted, entry.called, name)
                hooks.callback(inside.register_forward_pre_hook(note).remove)
        run()
    return found


def _find_open_sizes(call: _Call, leaves: list[Tensor]) -> None:
    """Call the module again on half of the rows of all tensors that have as many, in turn."""
    alike: dict[int, list[int]] = defaultdict(list)
    for place, leaf in enumerate(leaves):
        # One row has no half.
        if leaf.dim() and len(leaf) > 1:
            alike[len(leaf)].append(place)
    for rows, places in alike.items():
        half = [t[: rows // 2] if i in places else t for i, t in enumerate(leaves)]
        args, kwargs = rebuild(call.inputs, [t.clone() for t in half])
        try:
            with torch.no_grad():
                made, _ = flatten(call.module(*args, **kwargs))
        except Exception:  # whatever a forward says to fewer rows: its sizes stay
            continue
        if [t.dim() for t in made] != [t.dim() for t in call.outputs]:
            continue
        for before, now, sizes in zip(call.outputs, made, call.sizes, strict=True):
            for axis, (long, short) in enumerate(zip(before.shape, now.shape, strict=True)):
                if long != short:
                    # Sizes that change otherwise are numbers of the module's own making.
                    follows = (long, short) == (rows, rows // 2) and sizes[axis] is not None
                    sizes[axis] = _Rows(places[0]) if follows else None


def _noted(called: set[str], path: str, module: nn.Module, args: Any) -> None:
    called.add(path)
