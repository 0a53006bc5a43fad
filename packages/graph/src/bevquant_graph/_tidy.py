"""Normalises torch's export to the form of a `Graph`.

Nodes get the paths of the model's own modules, each operation has one form, and values for torch's
compiler alone are removed.
"""

from __future__ import annotations

import math
import operator
import re
from typing import Any

import torch
from torch import Tensor, fx, nn

from ._faults import author_line
from ._normal import normalise
from ._operators import op_spec

REQUIRE = torch.ops.aten._assert_scalar.default
"""Demands that a number taken out of a tensor is what it was in the example."""

TENSOR_FORMS = "torch.where, a mask, rows padded to a fixed number"
"""Advice where a forward decides by values: forms that keep the decision a tensor."""

ANSWER = "bevquant_answer"
"""Place of the question about a number of rows, or of a tensor, that a requirement answers."""

CHECK = "bevquant_check"
"""The same of an author's check, which decides nothing: frames that fail it have no result."""

KEPT = "a squeezed axis of an open number of rows is kept"
"""Message of the requirement that this number is not 1."""

NUMBERS = ("aten.item.default", "aten._local_scalar_dense.default")

_SLICE = re.compile(r"slice\((None|-?\d+), (None|-?\d+), (None|-?\d+)\)")
SHELL = "model"  # holder of the model in an exported program
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
    members: list[str] | None = None  # of the last slice, which renumbers them
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

    torch ignores these; the memory before a first frame is such a tensor.
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


def _changes_nothing(node: fx.Node) -> bool:
    """Whether a node adds 0, as Python's ``sum`` begins, subtracts it, or multiplies by 1."""
    overload = str(node.target).rpartition(".")[2]
    if overload not in ("Tensor", "Scalar") or len(node.args) != 2 or node.kwargs:
        return False
    value, number = node.args
    if not isinstance(value, fx.Node) or type(number) not in (int, float):
        return False
    given, made = value.meta.get("val"), node.meta.get("val")
    return (
        number == op_spec(node.target).neutral
        and isinstance(given, Tensor)
        and isinstance(made, Tensor)
        and given.dtype == made.dtype
        and str(given.stride()) == str(made.stride())  # by which torch may choose another kernel
        and all(user.op != "output" for user in node.users)
    )


def _count_values(node: fx.Node) -> None:
    """``x.numel()`` as the product of x's sizes, which consumers know."""
    x: Any = node.args[0]
    known = [fixed_number(size) for size in x.meta["val"].shape]
    made: Any = math.prod(size for size in known if size is not None)
    with node.graph.inserting_before(node):
        for axis, size in enumerate(x.meta["val"].shape):
            if known[axis] is None:
                factor = node.graph.call_function(_aten.sym_size.int, (x, axis))
                factor.meta = {**node.meta, "val": size}
                value = size * (made.meta["val"] if isinstance(made, fx.Node) else made)
                made = node.graph.call_function(operator.mul, (factor, made))
                made.meta = {**node.meta, "val": value}
    node.replace_all_uses_with(made)
    node.graph.erase_node(node)


def _keep_axes(node: fx.Node) -> None:
    """Require of axes of open numbers of rows that the squeeze keeps them: not of one row."""
    from torch.fx.experimental.symbolic_shapes import free_unbacked_symbols  # and sympy

    x: Any = node.args[0]
    shape = x.meta["val"].shape
    dims: Any = node.args[1] if len(node.args) > 1 else range(len(shape))
    for axis in (dims,) if isinstance(dims, int) else dims:
        size = shape[axis]
        if not (isinstance(size, torch.SymInt) and free_unbacked_symbols(size)):
            continue
        with node.graph.inserting_before(node):
            rows = node.graph.call_function(_aten.sym_size.int, (x, axis % len(shape)))
            met = node.graph.call_function(operator.ne, (rows, 1))
            kept = node.graph.call_function(REQUIRE, (met, KEPT))
        rows.meta, met.meta = {**node.meta, "val": size}, {**node.meta, "val": size != 1}
        kept.meta = {**node.meta, "val": None, CHECK: author_line(node)}


def tidy(module: fx.GraphModule, model: nn.Module) -> None:
    """Remove assertions about sizes and operations without effect; unify norms and new memory."""
    graph = module.graph
    normalise(graph)
    for node in list(graph.nodes):
        if node.op != "call_function":
            continue
        if node.target is _aten.sym_numel.default:
            _count_values(node)
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
            graph.erase_node(made if node.users else node)
        elif node.target is torch.ops.aten.cat.default:
            joined = _joined(node.args[0])
            node.meta[PASSED_OVER] = len(joined) < len(node.args[0])
            node.args = (joined, *node.args[1:])
        elif getattr(node.target, "overloadpacket", None) is _aten.squeeze:
            _keep_axes(node)
        elif _changes_nothing(node):
            node.replace_all_uses_with(node.args[0])
            graph.erase_node(node)
        elif node.target is REQUIRE and not (
            {ANSWER, CHECK} & node.meta.keys() or _takes_numbers(node)
        ):
            graph.erase_node(node)  # that there is a voxel; the operators say so themselves
        elif any(name in str(node.target) for name in NO_VALUE) and not node.users:
            graph.erase_node(node)
    graph.eliminate_dead_code()
    module.recompile()
    _name_listed(module, model)
    _name_sliced(module, model)


_IN_MEMORY = ("aten.sym_storage_offset", "aten.sym_stride")  # where values lie, not which they are


def _takes_numbers(node: fx.Node) -> bool:
    """Whether a requirement concerns a tensor's values, not sizes.

    ``torch._check_tensor_all`` is the author's own check; the graph does not depend on it.
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
