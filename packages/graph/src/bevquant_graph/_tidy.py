"""Puts what torch exports into the form that a `Graph` promises.

Nodes have paths of the model's own modules, each operation has one form, what only torch's compiler
reads is gone (`tidy`), and nothing writes in place: every operation makes a new value, for the
right readers (`functional`). ``y = relu_(x)`` becomes ``y = relu(x)``, and whoever reads x
afterwards reads y. That is all where nobody reads another tensor of x's memory afterwards, which
the traced storages tell exactly. Other writes through views and to slices, those to inputs or
buffers, and `torch.vmap`, take torch's functionalization, which traces the graph once more, at
twice the time of the first trace.
"""

from __future__ import annotations

import operator
import re
from collections import defaultdict
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch.export import ExportedProgram

from ._operators import op_spec
from ._registrations import registered_once
from ._signature import leaves

REQUIRE = torch.ops.aten._assert_scalar.default
"""Demands that a number taken out of a tensor is what it was in the example."""

ANSWER = "bevquant_answer"
"""Place of the question about a number of rows, or of a tensor, that a requirement answers."""

NUMBERS = ("aten.item.default", "aten._local_scalar_dense.default")

_SLICE = re.compile(r"slice\((None|-?\d+), (None|-?\d+), (None|-?\d+)\)")
SHELL = "model"  # what holds the model inside of an exported program
PASSED_OVER = "bevquant_passed_over"
"""Says of a concatenation that the forward's call has empty operands beside the node's."""
NO_VALUE = (
    "_assert_tensor_metadata",
    "sym_constrain_range",
    "sym_constrain_range_for_size",
    "_assert_async",
)


def fixed_number(size: Any) -> int | None:
    """A size or number that is the same in every frame; None for an open one."""
    if isinstance(size, int):
        return size
    return int(size.node.expr) if size.node.expr.is_number else None


def inside(path: str) -> str:
    """A path in the shell as one in the model."""
    return path.removeprefix(SHELL).removeprefix(".")


def functional(program: ExportedProgram) -> ExportedProgram:
    """The same program without in-place operations, and without regions."""
    if _inline(program.graph_module):
        _rename_outputs(program)
    for node in program.graph.nodes:  # where a forward leaves no_grad, torch forgets some readers
        for read in node.all_input_nodes:
            read.users.setdefault(node)
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
        if value.op == "call_function" and op_spec(value.target).kind == "layout_op":
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
            found += [v for v in leaves(value) if isinstance(v, fx.Node)]
    return tuple(found)


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
    tensors = [v for v in leaves(node.meta.get("val")) if isinstance(v, Tensor)]
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


def _name_listed(module: fx.GraphModule, model: nn.Module) -> None:
    """Children of a module that a forward took out of a plain list have their own paths.

    torch may begin anew there: ``model.block.0``, then ``conv`` for ``model.block.0.conv``.
    """
    for node in module.graph.nodes:
        stack, base = node.meta.get("nn_module_stack") or {}, ""
        named: dict[str, tuple[str, Any]] = {}
        for key, (path, kind) in stack.items():
            whole = f"{base}.{path}"
            if path.split(".")[0] == SHELL:
                base = path
            elif path and base and _has(model, inside(whole)):
                _, at, count = key.rpartition("@")
                key, path = f"L__self__{whole}{at}{count if at else ''}", whole
            named[key] = path, kind
        if named != stack:
            node.meta["nn_module_stack"] = named


def _has(model: nn.Module, path: str) -> bool:
    try:
        model.get_submodule(path)
    except AttributeError:
        return False
    return True


def _name_sliced(module: fx.GraphModule, model: nn.Module) -> None:
    """Members that a forward took out of a slice, as ``layers[:-1]``, have their own paths."""
    for node in module.graph.nodes:
        stack = node.meta.get("nn_module_stack") or {}
        if any("slice(" in path for path, _ in stack.values()):
            node.meta["nn_module_stack"] = {
                key: (f"{SHELL}.{_sliced(model, inside(path))}", kind)
                if path.startswith(f"{SHELL}.")
                else (path, kind)
                for key, (path, kind) in stack.items()
            }


def _sliced(model: nn.Module, path: str) -> str:
    """The path in the model for one of torch's, as ``layers.slice(None, -1, None).0``.

    A slice of a Sequential keeps the names of its members, one of a ModuleList counts them anew.
    """
    names: list[str] = []
    holder: nn.Module | None = model
    members: list[str] | None = None  # of the last slice, while it renumbers them
    for part in path.split("."):
        bounds = _SLICE.fullmatch(part)
        if bounds is not None and holder is not None:
            chosen = slice(*(None if b == "None" else int(b) for b in bounds.groups()))
            members = (list(holder._modules) if members is None else members)[chosen]
            continue
        counted = members is not None and isinstance(holder, nn.ModuleList)
        names.append(members[int(part)] if counted and members is not None else part)
        holder = None if holder is None else holder._modules.get(names[-1])
        members = None
    return ".".join(names)


def _joined(operands: Any) -> Any:
    """The operands of a concatenation, of any rank, without those of shape [0].

    torch passes over these: what is remembered of frames before the first is such a tensor.
    """
    shapes = {value: value.meta["val"].shape for value in operands}
    held = [v for v in operands if [fixed_number(size) for size in shapes[v]] != [0]]
    return held if any(len(shape) > 1 for shape in shapes.values()) else operands


_aten = torch.ops.aten
# Memory that the forward writes to has no values of its own that a replay could give again.
_WRITTEN_LATER: dict[Any, Any] = {
    _aten.empty.memory_format: _aten.zeros.default,
    _aten.empty_like.default: _aten.zeros_like.default,
    _aten.new_empty.default: _aten.new_zeros.default,
}
_NEUTRAL = {"add": 0, "sub": 0, "mul": 1, "div": 1}


def _changes_nothing(node: fx.Node) -> bool:
    """Whether a node adds 0, as Python's ``sum`` begins, subtracts it, or multiplies by 1."""
    name, _, overload = str(node.target).removeprefix("aten.").partition(".")
    if overload not in ("Tensor", "Scalar") or len(node.args) != 2 or node.kwargs:
        return False
    value, number = node.args
    if not isinstance(value, fx.Node) or type(number) not in (int, float):
        return False
    given, made = value.meta.get("val"), node.meta.get("val")
    return (
        number == _NEUTRAL.get(name)
        and isinstance(given, Tensor)
        and isinstance(made, Tensor)
        and given.dtype == made.dtype
        and str(given.stride()) == str(made.stride())  # by which torch may choose another kernel
        and all(user.op != "output" for user in node.users)
    )


def tidy(module: fx.GraphModule, model: nn.Module) -> None:
    """Assertions about sizes and what changes nothing go; batch norm and new memory have one form.

    Args:
        module: What torch exported of `model`.
        model: Whose paths the nodes get.
    """
    graph = module.graph
    for node in list(graph.nodes):
        if node.op != "call_function":
            continue
        if node.target in _WRITTEN_LATER:
            node.target = _WRITTEN_LATER[node.target]
            if node.target is _aten.zeros.default:
                node.kwargs = {k: v for k, v in node.kwargs.items() if k != "memory_format"}
        if node.target is torch.ops.aten._native_batch_norm_legit_no_training.default:
            x, weight, bias, mean, var, momentum, eps = node.args
            with graph.inserting_before(node):
                made = graph.call_function(
                    torch.ops.aten.batch_norm.default,
                    (x, weight, bias, mean, var, False, momentum, eps, False),
                )
            made.meta = {**node.meta, "val": node.meta["val"][0]}
            for user in list(node.users):
                if user.target is operator.getitem and user.args[1] == 0:
                    user.replace_all_uses_with(made)
                if user.target is operator.getitem and not user.users:
                    graph.erase_node(user)
            if node.users:
                graph.erase_node(made)
            else:
                graph.erase_node(node)
        elif node.target is torch.ops.aten.cat.default:
            joined = _joined(node.args[0])
            node.meta[PASSED_OVER] = len(joined) < len(node.args[0])
            node.args = (joined, *node.args[1:])
        elif _changes_nothing(node):
            node.replace_all_uses_with(node.args[0])
            graph.erase_node(node)
        elif node.target is REQUIRE and ANSWER not in node.meta and not _takes_numbers(node):
            graph.erase_node(node)  # that there is a voxel; the operators say so themselves
        elif any(name in str(node.target) for name in NO_VALUE) and not node.users:
            graph.erase_node(node)
    graph.eliminate_dead_code()
    module.recompile()
    _name_listed(module, model)
    _name_sliced(module, model)


_IN_MEMORY = ("aten.sym_storage_offset", "aten.sym_stride")  # where values lie, not which they are


def _takes_numbers(node: fx.Node) -> bool:
    """Whether a requirement is about what a tensor holds, not about sizes.

    What ``torch._check_tensor_all`` asks of one is the author's own check, on which nothing rests.
    """
    pending, seen = [node], set()
    while pending:
        other = pending.pop()
        if str(other.target) in NUMBERS:
            asked: Any = other.args[0]
            if asked.target is not torch.ops.aten._is_all_true.default:
                return True
            continue
        if other not in seen and not str(other.target).startswith(_IN_MEMORY):
            seen.add(other)
            pending += [n for n in other.all_input_nodes if n.op == "call_function"]
    return False
