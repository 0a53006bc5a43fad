"""One flat graph without in-place writes: every operation makes a new value, for the right readers.

``y = relu_(x)`` becomes ``y = relu(x)`` and whoever reads x afterwards reads y. That is all where
nobody reads another tensor of x's memory afterwards, which the traced storages tell exactly. Other
writes through views and to slices, those to inputs or buffers, and `torch.vmap`, take torch's
functionalization, which traces the graph once more, at twice the time of the first trace.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, fx
from torch.export import ExportedProgram

from ._operators import op_spec
from ._registrations import registered_once
from ._tidy import NUMBERS

__all__ = ["functional"]


def functional(program: ExportedProgram) -> ExportedProgram:
    """The same program without in-place operations, and without regions."""
    if _inline(program.graph_module):
        _rename_outputs(program)
    writes = [node for node in program.graph.nodes if _written(node)]
    mapped = any(map(_of_vmap, program.graph.nodes))
    if not writes and not mapped:
        return program
    if mapped or any(not _is_plain(node) for node in writes) or not _alone(program.graph, writes):
        _copy_views(program.graph)
        with registered_once():
            whole: ExportedProgram = program.run_decompositions({})
        return whole
    for node in writes:
        (old,) = _written(node)
        node.target = _out_of_place(node.target)
        order = {other: index for index, other in enumerate(program.graph.nodes)}
        for user in list(old.users):
            if order[user] > order[node]:
                user.replace_input_with(old, node)
    program.graph_module.recompile()
    _rename_outputs(program)
    return program


def _inline(module: fx.GraphModule) -> bool:
    """Put what runs under another autocast or gradient mode among the rest.

    ``with torch.autocast(…, enabled=False)`` is one node to torch.export, with a graph of its own.
    That it computes the same without is for the replay to say.
    """
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
        if value.op == "call_function" and op_spec(value.target).kind == "move":
            with graph.inserting_before(node):
                copy = graph.call_function(torch.ops.aten.clone.default, (value,))
            copy.meta = dict(value.meta)
            node.args = (copy,)


def _of_vmap(node: fx.Node) -> bool:
    """Whether the node begins or ends a `torch.vmap`: inside, values are batches of what they say.

    torch's second trace runs the map, and leaves operations on whole tensors.
    """
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
            found += [v for v in _flat(value) if isinstance(v, fx.Node)]
    return tuple(found)


def _flat(value: Any) -> Iterator[Any]:
    if isinstance(value, list | tuple):
        for item in value:
            yield from _flat(item)
    else:
        yield value


def _out_of_place(target: Any) -> Any:
    """``relu_`` → ``relu``; None where there is no such operator."""
    name = target._schema.name.split("::")[1]
    if not name.endswith("_") or name.endswith("__"):
        return None
    packet = getattr(getattr(torch.ops, target.namespace), name[:-1], None)
    return getattr(packet, target._overloadname, None)


def _is_plain(node: fx.Node) -> bool:
    """An in-place operation on one tensor with a form that makes a new one of the same type."""
    written = _written(node)
    if len(written) != 1 or node.args[:1] != written or _out_of_place(node.target) is None:
        return False
    own = written[0].meta["val"]
    others = [a.meta.get("val") for a in node.all_input_nodes]
    return all(
        not isinstance(o, Tensor) or o.dtype == own.dtype or o.dtype == torch.bool for o in others
    )


def _storages(node: fx.Node) -> set[int]:
    """The memory of a tensor, or of the tensors of a list."""
    tensors = [v for v in _flat(node.meta.get("val")) if isinstance(v, Tensor)]
    return {tensor.untyped_storage()._cdata for tensor in tensors}


def _alone(graph: fx.Graph, writes: list[fx.Node]) -> bool:
    """Whether what shares the memory of what is written is read no more, and is no input.

    As where a block's sum is written into a slice of a concatenation that nobody else reads.
    """
    order = {node: index for index, node in enumerate(graph.nodes)}
    sharing: dict[int, list[fx.Node]] = defaultdict(list)
    for node in graph.nodes:
        for storage in _storages(node):
            sharing[storage].append(node)
    begun: dict[fx.Node, fx.Node] = {}  # what a row of writes goes back to
    for node in writes:
        (old,) = _written(node)
        begun[node] = begun.get(old, old)
    for node in writes:
        shared = [other for s in _storages(begun[node]) for other in sharing[s]]
        if not shared or shared[0].op != "call_function":
            return False
        for other in shared:
            if begun.get(other, other) is begun[node] or order[other] > order[node]:
                continue  # its later readers read what was written; a later view shows it
            # The rest, or a part, of the same memory: harmless if nobody reads it from here on.
            if any(order[user] >= order[node] for user in other.users):
                return False
    return True


def _rename_outputs(program: ExportedProgram) -> None:
    """The signature's names follow the values that are returned."""
    (made,) = program.graph.output_node().args
    for spec, value in zip(program.graph_signature.output_specs, made, strict=True):
        if isinstance(value, fx.Node) and hasattr(spec.arg, "name"):
            spec.arg.name = value.name
