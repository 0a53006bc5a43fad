"""Writes in place become operations that make new values.

Tensors that share memory are views of its first one, the root, which the traced storages show. A
write makes a new value of the view that it writes to. Scattered into the view's source, and that
into its own (``x[:, 2:]`` by ``slice_scatter``, a permutation by the inverse one), it is the root's
new value, and a view that is read afterwards is taken of that again. This adds nodes for the writes
alone. New values of inputs and buffers are returned before the results. Writes through views
without such an inverse, and `torch.vmap`, take torch's functionalization, which traces the whole
graph twice more.
"""

from __future__ import annotations

import operator
import re
from typing import Any

import torch
from torch import SymInt, Tensor, fx
from torch.export import ExportedProgram
from torch.export.graph_signature import InputKind, OutputKind, OutputSpec, TensorArgument

from ._attributes import leaves
from ._normal import normalise
from ._operators import op_spec
from ._registrations import registered_once
from ._tidy import NUMBERS


def inline_regions(program: ExportedProgram) -> None:
    """Put the operations of autocast and no_grad regions into the program's own graph."""
    if _inline(program.graph_module):
        _rename_outputs(program)


def functional(program: ExportedProgram) -> ExportedProgram:
    """The same program, which has no regions, without in-place operations."""
    for node in program.graph.nodes:  # where a forward leaves no_grad, torch forgets some readers
        for read in node.all_input_nodes:
            read.users.setdefault(node)
    _view_reshaped(program.graph)
    mapped = any(map(_of_vmap, program.graph.nodes))
    if not mapped and not any(map(_written, program.graph.nodes)):
        return program
    try:
        # torch's second trace runs the map of a vmap and gives operations on whole tensors.
        if mapped:
            raise _NoForm("torch.vmap")
        rewriter = _Rewriter(program)
        program.graph_module.graph = rewriter.made()
        program.graph_signature.output_specs[:0] = rewriter.written
    except _NoForm:
        _copy_views(program.graph)
        with registered_once():
            whole: ExportedProgram = program.run_decompositions({})
        return whole
    _rename_outputs(program)
    return program


class _NoForm(Exception):
    """A write that only torch's functionalization resolves."""


class _Rewriter:
    """Copies a graph, with new values in place of writes.

    Keys are nodes of the old graph, values are nodes of the new one.
    """

    def __init__(self, program: ExportedProgram) -> None:
        self.old, self.new = program.graph, fx.Graph()
        inputs = [node for node in self.old.nodes if node.op == "placeholder"]
        self.inputs = dict(zip(inputs, program.graph_signature.input_specs, strict=True))
        self.written: list[OutputSpec] = []  # inputs and buffers, whose values come first
        self.source: dict[fx.Node, fx.Node] = {}  # a view, or a write, to the tensor that it is of
        self.root: dict[fx.Node, fx.Node] = {}
        self.version: dict[fx.Node, int] = {}  # writes so far, by root
        self.copies: dict[fx.Node, fx.Node] = {}
        self.current: dict[fx.Node, tuple[int, fx.Node]] = {}
        self._find_memories()

    def _find_memories(self) -> None:
        memories = {node: _storages(node) for node in self.old.nodes if node.op != "output"}
        owner: dict[int, fx.Node] = {}
        unclear: set[fx.Node] = set()  # other tensors have their memory
        for node, memory in memories.items():
            # A write's result is its target; other operands are only read.
            inputs = () if node.target is _FRESH else _written(node) or node.all_input_nodes
            source = next((s for s in inputs if s in self.root and memories[s] & memory), None)
            if source is not None:
                self.source[node], self.root[node] = source, self.root[source]
            elif isinstance(node.meta.get("val"), Tensor):
                others = {owner[key] for key in memory if key in owner}
                unclear |= {node, *others} if others and node.target is not _FRESH else set()
                self.root[node], self.version[node] = node, 0
                owner |= dict.fromkeys(memory, node)
        for node in memories:
            for root in (self.root.get(target) for target in _written(node)):
                # A program returns new values of inputs and buffers alone (`_MUTATIONS`).
                known = root in self.inputs and self.inputs[root].kind in _MUTATIONS
                if root is None or root in unclear or not (known or root.op == "call_function"):
                    raise _NoForm("a parameter, or memory of several tensors")

    def made(self) -> fx.Graph:
        """The new graph."""
        for node in self.old.nodes:
            targets = _written(node)
            if node.op == "output":
                self._return(node)
            elif not targets:
                self._keep(node, self._copied(node))
            elif len(targets) == 1:
                self._write(node, targets[0])
            else:
                raise _NoForm("several tensors")
        return self.new

    def _return(self, node: fx.Node) -> None:
        made = self._copied(node)
        values: list[fx.Node] = []
        for root, spec in self.inputs.items():
            if self.version.get(root):
                values.append(self.value(root, node))
                target = spec.target or spec.arg.name
                kind = _MUTATIONS[spec.kind]
                self.written.append(OutputSpec(kind, TensorArgument(values[-1].name), target))
        # As in torch.export: written inputs and buffers first, then the results.
        made.args = ((*values, *made.args[0]),)  # type: ignore[misc]

    def _copied(self, node: fx.Node) -> fx.Node:
        return self.new.node_copy(node, lambda read: self.value(read, node))

    def _keep(self, node: fx.Node, made: fx.Node) -> None:
        self.copies[node] = made
        if node in self.root:
            self.current[node] = self.version[self.root[node]], made

    def value(self, node: fx.Node, reader: fx.Node) -> fx.Node:
        """Current value of a tensor in the new graph."""
        if node not in self.root:
            return self.copies[node]
        version, made = self.current[node]
        if version != self.version[self.root[node]]:
            source = self.value(self.source[node], reader)
            made = source if _is_same(node) else self._again(node, source, reader)
            self.current[node] = self.version[self.root[node]], made
        return made

    def _again(self, view: fx.Node, source: fx.Node, reader: fx.Node) -> fx.Node:
        """A view, taken of the new value of its source."""
        of = self.source[view]
        made = self.new.node_copy(view, lambda read: source if read is of else self.copies[read])
        made.meta = {**reader.meta, "val": view.meta["val"]}
        return made

    def _write(self, node: fx.Node, target: fx.Node) -> None:
        root = self.root[target]
        chain = [target]
        while chain[-1] is not root:
            chain.append(self._source_tensor(chain[-1]))
        # Scatters need the sources as they were, so these are read before the version changes.
        before = {view: self.value(view, node) for view in chain}
        out_of_place = _out_of_place(node.target)
        if out_of_place is None or op_spec(out_of_place).kind == "layout_op":
            raise _NoForm(str(node.target))
        # x.add_(y) keeps the type of x, x.add(y) promotes.
        if not _keeps_type(node, target.meta["val"].dtype):
            raise _NoForm("operands of other types")
        made = self._copied(node)
        made.target = out_of_place
        self.version[root] += 1
        self._keep(node, made)
        # From the written view up to the root: each new value is scattered into the next source.
        for view, source in zip(chain, [*chain[1:], None], strict=True):
            self.current[view] = self.version[root], made
            if source is not None and not _is_same(view):
                made = self._scattered(view, before[source], made, node)

    def _source_tensor(self, view: fx.Node) -> fx.Node:
        """The tensor that a view is of, behind the list of a split's parts."""
        source = self.source[view]
        return source if isinstance(source.meta["val"], Tensor) else self.source[source]

    def _scattered(self, view: fx.Node, source: fx.Node, part: fx.Node, at: fx.Node) -> fx.Node:
        """The new value of a view's source before the write `at`, given the view's new value."""
        value, spec = source.meta["val"], op_spec(view.target)
        if value.dtype != part.meta["val"].dtype:
            raise _NoForm("a view of another type")
        scatter = getattr(_aten, f"{spec.name}_scatter", None)
        call: tuple[Any, ...]
        if view.target is operator.getitem:
            call = _of_part(view, source, part)
        elif spec.layout == "reshape":
            sizes = [
                self.call(at, size, _aten.sym_size.int, source, axis)
                if isinstance(size, SymInt)
                else size
                for axis, size in enumerate(value.shape)
            ]
            call = _aten.reshape.default, part, sizes
        elif spec.layout == "permute":
            (dims,) = self.arguments(view)
            rank = len(dims)
            inverse = sorted(range(rank), key=[d % rank for d in dims].__getitem__)
            call = _aten.permute.default, part, inverse
        elif scatter is not None and spec.layout == "part":
            call = scatter.default, source, part, *self.arguments(view)
        else:
            raise _NoForm(str(view.target))
        return self.call(at, value, *call)

    def call(self, at: fx.Node, value: Any, target: Any, *args: Any) -> fx.Node:
        """A new node, of the call that a write is part of; it makes such a value."""
        made = self.new.call_function(target, args)
        made.meta = {**at.meta, "val": value}
        return made

    def arguments(self, view: fx.Node) -> tuple[Any, ...]:
        """Arguments of a view behind the tensor."""
        args: Any = fx.map_arg(view.args[1:], self.copies.__getitem__)
        if view.kwargs:
            raise _NoForm("named arguments")
        return tuple(args)


_MUTATIONS = {
    InputKind.USER_INPUT: OutputKind.USER_INPUT_MUTATION,
    InputKind.BUFFER: OutputKind.BUFFER_MUTATION,
}
# torch's trace shows the memory of the constant that it copies.
_FRESH = torch.ops.aten.lift_fresh_copy.default
_aten = torch.ops.aten


def _of_part(view: fx.Node, source: fx.Node, part: fx.Node) -> tuple[Any, ...]:
    """The scatter of one of the tensors of a split, whose list stands between it and its source."""
    split, place = view.args
    assert isinstance(split, fx.Node)
    assert isinstance(place, int)
    axis = _axis_of(split)
    if op_spec(split.target).name == "unbind":
        return _aten.select_scatter.default, source, part, axis, place
    sizes = [one.shape[axis] for one in split.meta["val"][: place + 1]]
    if any(isinstance(size, SymInt) for size in sizes):
        raise _NoForm("parts of open sizes")
    return _aten.slice_scatter.default, source, part, axis, sum(sizes[:-1]), sum(sizes)


def _is_same(node: fx.Node) -> bool:
    """Whether a node of shared memory is all of its source, as it is: a write, ``x.detach()``."""
    if _written(node):
        return True
    return op_spec(node.target).kind == "identity" or op_spec(node.target).casts


def _keeps_type(node: fx.Node, dtype: torch.dtype) -> bool:
    """Whether a write's operation has the type and shape of its target."""
    spec = op_spec(node.target)
    values = [other.meta.get("val") for other in node.all_input_nodes]
    types = {value.dtype for value in values if isinstance(value, Tensor)}
    return spec.writes or (spec.shape and types <= {dtype, torch.bool})


def _axis_of(split: fx.Node) -> int:
    names = [argument.name for argument in split.target._schema.arguments]  # type: ignore[union-attr]
    place = names.index("dim")
    given = split.args[place] if place < len(split.args) else split.kwargs.get("dim", 0)
    assert isinstance(given, int)
    return given


def _storages(node: fx.Node) -> set[int]:
    """The memory of a tensor, or of the tensors of a list."""
    tensors = [v for v in leaves(node.meta.get("val")) if isinstance(v, Tensor)]
    return {tensor.untyped_storage()._cdata for tensor in tensors}


def _inline(module: fx.GraphModule) -> bool:
    """Inline the parts that run under another autocast or gradient mode."""
    # ``with torch.autocast(…, enabled=False)`` is one node to torch.export, with a graph of its
    # own. The replay verifies that the mode does not matter.
    regions = [n for n in module.graph.nodes if str(n.target) in _REGIONS]
    for node in regions:
        body, *given = node.args[_REGIONS[str(node.target)] :]
        inside = getattr(module, str(body.target))
        _inline(inside)
        inputs = [n for n in inside.graph.nodes if n.op == "placeholder"]
        with module.graph.inserting_before(node):
            made: Any = module.graph.graph_copy(inside.graph, dict(zip(inputs, given, strict=True)))
        for user in list(node.users):
            user.replace_all_uses_with(made[user.args[1]])
            module.graph.erase_node(user)
        module.graph.erase_node(node)
        module.graph.erase_node(body)
    if regions:
        module.recompile()
    return bool(regions)


_REGIONS = {"wrap_with_autocast": 4, "wrap_with_set_grad_enabled": 1}  # arguments before the body


def _copy_views(graph: fx.Graph) -> None:
    """Numbers are taken out of tensors of their own: torch's second trace loses those of views."""
    for node in graph.nodes:
        if str(node.target) not in NUMBERS:
            continue
        (value,) = node.args
        if value.op == "call_function" and op_spec(value.target).kind == "layout_op":
            with graph.inserting_before(node):
                copy = graph.call_function(torch.ops.aten.clone.default, (value,))
            copy.meta = dict(value.meta)
            node.args = (copy,)


def _view_reshaped(graph: fx.Graph) -> None:
    """``x.squeeze_()``, which changes the shape of a tensor and no values, becomes a view of it."""
    passed: set[fx.Node] = set()
    changed = False
    for node in graph.nodes:
        passed.add(node)
        view = _out_of_place(node.target) if _written(node) else None
        # Later readers of the tensor read its new shape: in a trace these read this node.
        if view is not None and op_spec(view).kind == "layout_op":
            if passed.issuperset(node.all_input_nodes[0].users):
                node.target, changed = view, True
    if changed:
        normalise(graph)


def _of_vmap(node: fx.Node) -> bool:
    """Whether the node begins or ends a `torch.vmap`: inside, values have a hidden batch axis."""
    return getattr(node.target, "__module__", None) == "torch._functorch.predispatch"


def _written(node: fx.Node) -> tuple[fx.Node, ...]:
    """Arguments that the node writes to."""
    if node.op != "call_function" or not isinstance(node.target, torch._ops.OpOverload):
        return ()
    found = []
    for index, argument in enumerate(node.target._schema.arguments):
        if argument.alias_info is not None and argument.alias_info.is_write:
            value = node.kwargs.get(
                argument.name, node.args[index] if index < len(node.args) else None
            )
            found += [v for v in leaves(value) if isinstance(v, fx.Node)]
    return tuple(found)


def _out_of_place(target: Any) -> Any:
    """``relu_`` → ``relu``, ``__iand__`` → ``__and__``; None without such an operator."""
    name = re.sub(r"^__i(\w+__)$", r"__\1", target._schema.name.split("::")[1])
    name = name if name.endswith("__") else name.removesuffix("_")
    if name == target._schema.name.split("::")[1]:
        return None
    packet = getattr(getattr(torch.ops, target.namespace), name, None)
    if packet is None:
        return None
    # By their arguments: `pow.Scalar` is a number to a tensor, `pow_.Scalar` a tensor to a number.
    found = [getattr(packet, overload) for overload in packet.overloads()]
    return next((other for other in found if _types(other) == _types(target)), None)


def _types(target: Any) -> list[str]:
    return [str(argument.type) for argument in target._schema.arguments]


def _rename_outputs(program: ExportedProgram) -> None:
    """The signature's names follow the values that are returned."""
    (made,) = program.graph.output_node().args
    for spec, value in zip(program.graph_signature.output_specs, made, strict=True):
        if isinstance(value, fx.Node) and hasattr(spec.arg, "name"):
            spec.arg.name = value.name
