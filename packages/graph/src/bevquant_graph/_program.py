"""From an exported program back to a module: layers become modules, the rest stays calls.

An `ExportedProgram` (or the `GraphModule` that is its `module()`) has ATen calls for layers. Here
each stretch of calls by one module of the author becomes a module at the same path, which runs
these calls in order. A stretch that is torch's own layer becomes that layer, with the program's own
parameter objects. Layers, names and forwards can then be found as in any model.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator
from typing import Any

import torch
import torch.utils._pytree as pytree
from torch import Tensor, fx, nn
from torch.export import ExportedProgram

from ._batch_arguments import as_example
from ._faults import author_line
from ._operators import op_spec
from ._program_modules import (
    Part,
    Plan,
    Step,
    Value,
    call_arguments,
    freed,
    full_name,
    item,
    layer_of,
    library_class,
    named,
    root_class,
)
from ._tidy import NO_VALUE

_REMEDY = "give the eager model and its example inputs instead of the exported program"
# Overloads by the functions that they are, so that additions and concatenations look like any.
_FUNCTIONS: dict[Any, Any] = {
    torch.ops.aten.add.Tensor: torch.add,
    torch.ops.aten.add_.Tensor: torch.Tensor.add_,
    torch.ops.aten.cat.default: torch.cat,
}


def module_of(program: ExportedProgram | fx.GraphModule) -> nn.Module:
    """The module that a program was exported from, as far as the program shows it.

    Convolutions, linear layers, batch norms, pools, ReLUs, dropouts and flattenings of torch's
    classes become modules of these classes again, at their paths, with the program's parameters
    (the same objects). The author's modules become modules at their paths that run their part of
    the program. The result is compared with the program: on the program's example inputs it has the
    same bits. It takes inputs of the sizes that the program takes.

    Args:
        program: From `torch.export.export(model.eval(), …)`, or its `module()`.

    Raises:
        TypeError: `program` is neither.
        ValueError: It was exported in training mode, or holds control flow or sparse convolutions;
            the message names node, module, file, line and remedy.

    Example:
        >>> import torch
        >>> from torch import nn
        >>> net = nn.Sequential(nn.Conv2d(3, 8, 3), nn.ReLU()).eval()
        >>> module_of(torch.export.export(net, (torch.ones(1, 3, 8, 8),)))
        Sequential(
          (0): Conv2d(3, 8, kernel_size=(3, 3), stride=(1, 1))
          (1): ReLU()
        )
    """
    if isinstance(program, ExportedProgram):
        # `Root` checks the inputs itself, so the program's guards are left out.
        made = _Builder(program.module(check_guards=False), program.state_dict, whole=True).model()
        _prove(program, made)
        return made
    if isinstance(program, fx.GraphModule):
        return _Builder(program, program.state_dict(), whole=False).model()
    raise TypeError(
        "module_of: expected an ExportedProgram (torch.export.export) or its module(), got "
        f"{type(program).__name__}"
    )


def as_module(model: Any, example_inputs: Any) -> tuple[Any, Any]:
    """The module of an exported program, and its example inputs where none are given.

    So for a program's `module()`, which refuses to be set to evaluation mode. Other modules are
    returned unchanged, with their example inputs as the forward takes them (`as_example`).
    """
    if isinstance(model, fx.GraphModule) and "eval" in vars(model):
        model = module_of(model)
    if not isinstance(model, ExportedProgram):
        given = example_inputs is not None and isinstance(model, nn.Module)
        return model, as_example(model, example_inputs) if given else example_inputs
    if example_inputs is None and model.example_inputs is not None:
        args, kwargs = model.example_inputs
        codegen: Any = model.module(check_guards=False).graph._codegen
        names = codegen.pytree_info.orig_args
        example_inputs = dict(zip(names, args, strict=False)) | kwargs if kwargs else tuple(args)
    return module_of(model), example_inputs


class _Builder:
    def __init__(self, program: fx.GraphModule, state: Iterable[str], *, whole: bool) -> None:
        self.state, self.whole = list(state), whole
        self.program, self.modules = program, dict[str, nn.Module]()
        nodes = list(program.graph.nodes)
        self.inputs = [n for n in nodes if n.op == "placeholder"]
        self.output = next(n for n in nodes if n.op == "output")
        self.steps = [n for n in nodes if n.op.startswith("call_") and not _says_nothing(n)]
        self.kinds: dict[str, str] = {}
        for node in self.steps:
            self.refuse(node)
            self.kinds |= {path: kind for _, path, kind in self.entries(node)}

    def model(self) -> nn.Module:
        """The whole."""
        info = getattr(self.program.graph._codegen, "pytree_info", None)
        if info is None:
            raise ValueError(
                "module_of: expected the module() of an exported program, got a "
                f"{type(self.program).__name__} whose inputs are not described; {_REMEDY}"
            )
        returned = pytree.tree_leaves(self.output.args[0])
        names = list(info.orig_args)
        types = (self.entries(node)[0] for node in self.steps if self.entries(node))
        kind = next((t for _, path, t in types if not path), "Program")
        if self.whole and library_class(kind) == "Sequential" and len(names) == 1:
            chain = self.chain("", self.groups(self.steps, 1), self.inputs, returned)
            if chain is not None and info.out_spec.is_leaf():
                self.attach(chain)
                return chain
        root = named(kind, root_class(info, self.inputs))()
        root.plans.append(self.plan("", self.steps, 1, self.inputs, returned))
        self.attach(root)
        return root

    # What the nodes say

    def entries(self, node: fx.Node) -> list[tuple[str, str, str]]:
        """(call, path, class) of the modules whose forwards make a node, outermost first."""
        stack = node.meta.get("nn_module_stack") or {}
        found = [
            (str(k), str(p), c if isinstance(c, str) else full_name(c))
            for k, (p, c) in stack.items()
        ]
        return found if found and not found[0][1] else [("", "", "Program"), *found]

    def describe(self, node: fx.Node) -> str:
        path = self.entries(node)[-1][1]
        place = author_line(node)
        return f"{node.name} ({node.target}) in {path or 'the model'}" + (
            f", {place}" if place else ""
        )

    def refuse(self, node: fx.Node) -> None:
        """Raise the error of a call that a module of layers cannot hold."""
        name = getattr(node.target, "__name__", str(node.target))
        spec = op_spec(node.target)
        met = ""
        if isinstance(node.target, torch._ops.HigherOrderOperator) or node.op != "call_function":
            met = f"holds control flow or a nested graph ({name})"
        elif spec.kind in ("rulebook", "sparse_layer", "sparse_pool", "to_dense"):
            met = "computes sparse convolutions, whose modules a program no longer has"
        elif call_arguments(node).get("training", call_arguments(node).get("train")) is True:
            raise ValueError(
                f"module_of: {self.describe(node)} runs in training mode; export model.eval()"
            )
        if met:
            raise ValueError(f"module_of: the program {met}: {self.describe(node)}; {_REMEDY}")

    def groups(
        self, nodes: list[fx.Node], depth: int
    ) -> Iterator[tuple[tuple[str, str, str] | None, list[fx.Node]]]:
        """Stretches of nodes that one call of a child makes, or single ones of one's own."""

        def of(node: fx.Node) -> Any:
            found = self.entries(node)
            return found[depth] if len(found) > depth else None

        for entry, run in itertools.groupby(nodes, of):
            yield entry, list(run)

    # Modules

    def plan(
        self, path: str, nodes: list[fx.Node], depth: int,
        inputs: list[fx.Node], results: Any, *, single: bool = False,
    ) -> Plan:  # fmt: skip
        """One call of the module at `path`."""
        places: dict[fx.Node, int] = {node: index for index, node in enumerate(inputs)}
        steps: list[Step] = []
        count = len(inputs)

        def value(node: fx.Node) -> Any:
            nonlocal count
            if node not in places:  # an attribute, when it is first read
                name = str(node.target)
                relative = name.removeprefix(f"{path}.") if path else name
                steps.append(Step(getattr, (), (), relative))
                places[node], count = count, count + 1
            return Value(places[node])

        def emit(nodes: list[fx.Node], depth: int) -> None:
            nonlocal count
            for entry, group in self.groups(nodes, depth):
                if entry is None or not entry[1].startswith(f"{path}." if path else ""):
                    for node in group:
                        args = fx.map_arg(node.args, value)
                        kwargs = fx.map_arg(node.kwargs, value)
                        target = _FUNCTIONS.get(node.target, node.target)
                        if kwargs or (len(args) < 2 and target is torch.add):
                            target = node.target
                        steps.append(
                            Step(target, tuple(args), tuple(kwargs.items()),
                                  origin=node.name, place=author_line(node))
                        )  # fmt: skip
                        places[node], count = count, count + 1
                    continue
                taken, made = self.boundary(entry[1], group)
                child = self.child(entry, group, depth, taken, made)
                if child is None:  # a layer of torch's that is no module here
                    emit(group, depth + 1)
                    continue
                args = tuple(value(node) for node in taken)
                relative = entry[1].removeprefix(f"{path}.") if path else entry[1]
                origin = " ".join(node.name for node in group)
                steps.append(Step(None, args, (), relative, child, origin, author_line(group[-1])))
                whole, count = count, count + 1
                if len(made) == 1:
                    places[made[0]] = whole
                    continue
                for index, node in enumerate(made):
                    steps.append(Step(item, (Value(whole), index)))
                    places[node], count = count, count + 1

        emit(nodes, depth)
        result = [value(n) if isinstance(n, fx.Node) else n for n in results]
        return Plan(freed(steps, len(inputs), result), result[0] if single else result)

    def boundary(self, path: str, group: list[fx.Node]) -> tuple[list[fx.Node], list[fx.Node]]:
        """A stretch's inputs from outside, and its values that are read outside."""
        inside = set(group)
        taken = dict.fromkeys(
            n
            for node in group
            for n in node.all_input_nodes
            if n not in inside and not (n.op == "get_attr" and str(n.target).startswith(f"{path}."))
        )
        made = [n for n in group if any(u not in inside and not _says_nothing(u) for u in n.users)]
        return list(taken), made

    def child(
        self, entry: tuple[str, str, str], group: list[fx.Node], depth: int,
        taken: list[fx.Node], made: list[fx.Node],
    ) -> int | None:  # fmt: skip
        """Make the module of a call, and say which plan of it; None where it is to be inlined."""
        _, path, kind = entry
        known = self.modules.get(path)
        if library_class(kind) and library_class(kind) != "Sequential":
            layer = layer_of(kind, group, self.program)
            read = [n for n in taken if n.op != "get_attr"]
            # A layer takes one tensor and gives one; all other calls stay operators.
            if layer is None or len(read) != 1 or len(made) != 1 or taken[0] is not read[0]:
                return None
            # Two calls of one path with different settings cannot be one layer.
            if isinstance(known, Part) or (known is not None and repr(known) != repr(layer)):
                return None
            self.modules.setdefault(path, layer)
            # The rest are its weights, which the layer holds itself.
            taken[1:] = []
            return 0
        if library_class(kind) == "Sequential" and (
            known is None or isinstance(known, nn.Sequential)
        ):
            chain = self.chain(path, self.groups(group, depth + 1), taken, made)
            if chain is not None:
                self.modules.setdefault(path, chain)
                return 0
            if known is not None:
                return None
        plan = self.plan(path, group, depth + 1, taken, made, single=len(made) == 1)
        part = self.modules.setdefault(path, named(kind, Part)())
        if not isinstance(part, Part):
            return None
        if plan not in part.plans:
            part.plans.append(plan)
        return part.plans.index(plan)

    def chain(
        self, path: str, groups: Iterable[Any], inputs: list[fx.Node], made: list[fx.Node]
    ) -> nn.Sequential | None:
        """A Sequential whose members pass one value on; None if it is not one."""
        if len(inputs) != 1 or len(made) != 1:
            return None
        value, names = inputs[0], list[str]()
        # Members that were built on the way are dropped where the chain breaks.
        before = dict(self.modules)
        for entry, group in groups:
            plan = None
            if entry is not None:
                taken, given = self.boundary(entry[1], group)
                names.append(entry[1].removeprefix(f"{path}." if path else ""))
                if taken[:1] == [value] and "." not in names[-1] and len(given) == 1:
                    depth = self.entries(group[0]).index(entry)
                    plan = self.child(entry, group, depth, taken, given)
            if plan != 0 or len(taken) != 1:
                self.modules = before
                return None
            value = given[0]
        if value is not made[0] or len(set(names)) < len(names):
            self.modules = before
            return None
        prefix = f"{path}." if path else ""
        members = {name: self.modules[f"{prefix}{name}"] for name in names}
        chain = nn.Sequential()
        for name, member in members.items():
            chain.add_module(name, member)
        return chain

    def attach(self, root: nn.Module) -> None:
        """Put modules at their paths, and parameters and buffers where the program has them."""
        for path in self.in_order():
            owner = self.holder(root, path.rpartition(".")[0])
            if path.rpartition(".")[2] not in owner._modules:
                made = self.modules.get(path)
                self.holder(root, path) if made is None else owner.add_module(
                    path.rpartition(".")[2], made
                )
        # A module() may hold what a pass has folded away.
        read = {str(n.target) for n in self.program.graph.nodes if n.op == "get_attr" and n.users}
        parameters = self.program.named_parameters(remove_duplicate=False)
        buffers = self.program.named_buffers(remove_duplicate=False)
        for path, tensor in itertools.chain(parameters, buffers):
            if not self.whole and path not in read:
                continue
            parent, _, name = path.rpartition(".")
            owner = self.holder(root, parent)
            if name in owner._parameters or name in owner._buffers:
                continue
            if isinstance(tensor, nn.Parameter):
                owner.register_parameter(name, tensor)
            else:
                holder = self.program.get_submodule(parent)
                kept = name not in holder._non_persistent_buffers_set
                owner.register_buffer(name, tensor, persistent=kept)
        for target in read:
            path, _, name = target.rpartition(".")
            if not hasattr(self.holder(root, path), name):
                where: Any = self.program.get_submodule(path)
                setattr(self.holder(root, path), name, getattr(where, name))
        root.eval()

    def in_order(self) -> list[str]:
        """Parents before children, and these in the order in which the author made them."""
        # Parameters give the order; a module without any comes after the one that runs before it.
        first: dict[str, int] = {}
        for index, name in enumerate(self.state):
            for end in range(1, name.count(".") + 1):
                first.setdefault(".".join(name.split(".")[:end]), index)
        last: dict[str, int] = {}
        paths: dict[str, None] = {}
        for path in self.modules:
            parent = path.rpartition(".")[0]
            last[parent] = first.setdefault(path, last.get(parent, -1))
            for end in range(1, path.count(".") + 2):
                paths[".".join(path.split(".")[:end])] = None
        return sorted(paths, key=lambda path: (path.count("."), first.get(path, -1)))

    def holder(self, root: nn.Module, path: str) -> nn.Module:
        """The module at `path`; if absent, an empty container of its class's name."""
        parts = path.split(".") if path else []
        for index, name in enumerate(parts):
            if name not in root._modules:
                kind = self.kinds.get(".".join(parts[: index + 1]), "Module")
                root.add_module(name, named(kind, nn.Module)())
            root = root._modules[name]  # type: ignore[assignment]
        return root


def _says_nothing(node: fx.Node) -> bool:
    """A check of sizes or types, which the module's own check of its inputs stands for."""
    if node.op == "call_module":
        return str(node.target) == "_guards_fn"
    return node.op == "call_function" and any(
        name in str(node.target) for name in (*NO_VALUE, "_assert_scalar")
    )


def _prove(program: ExportedProgram, made: nn.Module) -> None:
    """Demand the program's own bits of the module."""
    if program.example_inputs is None:
        return
    args, kwargs = program.example_inputs

    def run(module: Any) -> list[Any]:
        # The forward may write to its inputs.
        copied = pytree.tree_map_only(Tensor, torch.clone, (args, kwargs))
        with torch.no_grad():
            return pytree.tree_leaves(module(*copied[0], **copied[1]))

    wanted, got = run(program.module(check_guards=False)), run(made)
    for index, (one, other) in enumerate(zip(wanted, got, strict=True)):
        # NaN counts as equal, which `torch.equal` alone refuses.
        if isinstance(one, Tensor) and not torch.equal(one.nan_to_num(), other.nan_to_num()):
            raise ValueError(
                f"module_of: output {index} of the exported program comes out otherwise when it "
                f"runs again; it computes with random numbers or buffers that change; {_REMEDY}"
            )
