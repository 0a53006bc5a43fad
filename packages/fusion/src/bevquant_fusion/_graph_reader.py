"""Layers and batch norms of a captured graph, and obstacles to folding them."""

from __future__ import annotations

import operator
from collections import defaultdict
from collections.abc import Collection
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch.nn.modules.batchnorm import _BatchNorm

from bevquant_graph import Graph, called_name, layer_class, op_spec

from ._channels import distinct, is_float, keeps_channels, known_size, numbers_behind, source
from ._fold import NormPaths, Part, Refused, tensor_owners, tied_to
from ._foldable import DENSE, bn_problem, has_hooks, is_convolution
from ._products import reads_bias
from ._ranges import is_sparse

BATCH_NORM = torch.ops.aten.batch_norm.default


class Reader:
    """Layers and batch norms of a graph; ``plain`` layers become plain ones before folding."""

    def __init__(self, model: nn.Module, graph: Graph, plain: Collection[str]) -> None:
        self.model, self.graph, self.plain = model, graph, plain
        self.operations = list(graph.operations)
        self.modules = dict(model.named_modules(remove_duplicate=False))
        self.owners = tensor_owners(model)
        self.names = {module: path for path, module in model.named_modules()}
        self.norms: dict[str, list[fx.Node]] = defaultdict(list)
        self.layers: dict[str, list[fx.Node]] = defaultdict(list)
        self.readers: dict[str, list[fx.Node]] = defaultdict(list)
        self.callers: dict[str, set[str]] = defaultdict(set)  # of the members of a module
        for node in self.operations:
            stack = self.stack(node)
            for outer, inner in zip(["", *stack], stack, strict=False):
                if inner:
                    self.callers[inner.rpartition(".")[0]].add(outer)
            layer = self.layer(node)
            if layer is not None:
                self.layers[layer].append(node)
            if node.target is BATCH_NORM:
                self.norms[self.owner(node)].append(node)
            for value in node.all_input_nodes:
                constant = graph.constant_path(value)
                if constant is not None:
                    self.readers[constant].append(node)

    # Modules

    def stack(self, node: fx.Node) -> list[str]:
        """Paths of the running modules, each module by its first path."""
        return [self.names[self.modules[path]] for path in self.graph.stack(node)]

    def layer(self, node: fx.Node) -> str | None:
        """The convolution or linear layer whose forward computes the node."""
        stack = reversed(self.stack(node))
        return next((path for path in stack if is_convolution(self.modules[path])), None)

    def owner(self, norm: fx.Node) -> str:
        """The module that has the statistics, or else the one whose forward normalises."""
        # batch_norm(x, weight, bias, mean, var, training, momentum, eps, cudnn)
        mean = self.graph.constant_path(norm.args[3])
        path = self.stack(norm)[-1] if mean is None else mean.rpartition(".")[0]
        first: str = self.names[self.modules[path]]
        return first

    def describe(self, node: fx.Node) -> str:
        """A step in words."""
        path = self.stack(node)[-1]
        module = self.modules[path]
        if is_convolution(module) or (path and next(module.children(), None) is None):
            return f"{path} ({type(module).__name__})"
        return f"{called_name(node)}()" + (f" in {path}" if path else "")

    # One batch norm

    def numbers(self, path: str, norms: list[fx.Node]) -> NormPaths:
        """Where the numbers of the norm are, if they are its alone."""
        module = self.modules[path]
        if isinstance(module, _BatchNorm):
            problem = bn_problem(module, own_forward=True)
            if problem is not None:
                raise Refused(problem)
        # A line in a loop may call it several times with one result; other lines share it.
        if norms[1:] and len({(*self.stack(n), self.graph.location(n)) for n in norms}) > 1:
            raise Refused(f"is shared: it is called {len(norms)} times")
        found: list[str | None] = []
        names = ("weight", "bias", "running_mean", "running_var")
        for name, value in zip(names, norms[0].args[1:5], strict=True):
            constant = self.graph.constant_path(value)
            if value is not None and constant is None:
                raise Refused(f"the forward of {path or 'the model'} computes its {name}")
            found.append(constant)
            others = [n for n in self.readers[constant or ""] if n not in norms]
            if others:
                raise Refused(f"{constant} is read by {self.describe(others[0])}, too")
        weight, bias, mean, var = found
        if norms[0].args[5] or mean is None or var is None:
            raise Refused("keeps no running statistics, so it normalises by each batch")
        if self.modules[self.stack(norms[0])[-1]].training:
            raise Refused("is in training mode, so it normalises by each batch; call eval() first")
        paths = {p for p in found if p is not None}
        for constant in paths:
            self.constant(constant)
        tied = tied_to(self.owners, paths)
        if tied is not None:
            raise Refused(f"{tied[0]} is tied to {tied[1]}")
        eps: Any = norms[0].args[7]
        return NormPaths(mean, var, weight, bias, float(eps))

    def constant(self, path: str) -> Tensor:
        """The parameter or buffer at ``path``."""
        try:
            found: Tensor = operator.attrgetter(path)(self.model)
        except AttributeError:  # a name that torch.export gave
            raise Refused(
                "its numbers are no parameters or buffers of the model; register them (modules of "
                "a list in an nn.ModuleList)"
            ) from None
        return found

    # The way back

    def behind(self, norms: list[fx.Node]) -> tuple[list[fx.Node], set[fx.Node]]:
        """Where the values come from, and all nodes on the way."""
        pending: list[fx.Node] = [n.all_input_nodes[0] for n in norms]
        ends, inside = [], set(norms)
        while pending:
            node = pending.pop()
            if node in inside:
                continue
            inside.add(node)
            if not keeps_channels(node):
                ends.append(node)
                continue
            inside.add(source(node))
            pending += [value for value in source(node).all_input_nodes if is_float(value)]
        return ends, inside

    def channel_axis(self, conv: str, node: fx.Node) -> int:
        """The channel axis of a layer's input or output."""
        module, axes = self.modules[conv], int(node.meta["val"].dim())
        if is_sparse(module) or isinstance(module, nn.Linear):
            return axes - 1
        weight: Any = module.weight
        # From the end, as maps may have no batch axis.
        return axes - (int(weight.dim()) - 2) - 1

    def applies_weights(self, conv: str, made: fx.Node) -> bool:
        """Whether the last that a layer's forward does is to apply its weight, and its bias."""
        if conv in self.plain:
            return True
        # So a class that pads its input first, as TensorFlow's ``"same"``, takes a norm as its base
        # does.
        module: Any = self.modules[conv]
        dense = "linear" if isinstance(module, nn.Linear) else None
        if dense is None and not is_sparse(module):
            dense = f"conv{'_transpose' * module.transposed}{module.weight.dim() - 2}d"
        weight, bias, *rest = *made.args[1:], None, None
        if op_spec(made.target).name != dense or not isinstance(weight, fx.Node):
            return False
        if dense != "linear" and (rest[3] if len(rest) > 5 else 1) != module.groups:
            return False
        if self.graph.constant_path(weight) != f"{conv}.weight".lstrip("."):
            return False
        if isinstance(bias, fx.Node):
            return self.graph.constant_path(bias) == f"{conv}.bias".lstrip(".")
        return bias is None and module.bias is None and self.would_read_bias(conv, made)

    def takes_norm(self, layer: str, made: fx.Node, value: fx.Node) -> bool:
        """Whether a dense layer applies its weight to a value, and pads no zeros."""
        module: Any = self.modules[layer]
        if is_sparse(module) or not self.applies_weights(layer, made):
            return False
        if made.args[0] is not value or getattr(module, "transposed", False):
            return False
        # A padded zero is no normalised value: it would lack its share of the shift.
        padding: Any = made.args[4] if len(made.args) > 4 else 0
        return padding == "valid" or not any([padding] if isinstance(padding, int) else padding)

    def would_read_bias(self, conv: str, made: fx.Node) -> bool:
        """Whether a layer without a bias hands the one that it is given to its product."""
        own = {n for n in self.layers[conv] if self.call(conv, n) == self.call(conv, made)}
        read = {v for n in own for v in n.all_input_nodes} - own
        given = [v for v in read if is_float(v) and not self.graph.constant_path(v)]
        sizes = _sizes(given[0].meta["val"].shape) if len(given) == 1 else None
        if sizes and layer_class(self.modules[conv], *DENSE) is type(self.modules[conv]):
            return True  # torch's own forward
        return reads_bias(self.modules[conv], sizes or [])

    # What stands against it

    def refuse_other_readers(
        self, part: Part, norms: list[fx.Node], inside: set[fx.Node], marks: dict[fx.Node, Tensor]
    ) -> None:
        """Refuse if another consumer reads a channel of the batch norm."""
        others: dict[str, None] = {}
        channels = torch.tensor([i for i, norm in enumerate(part.channels, 1) if norm >= 0])
        for node in inside.difference(norms):
            for user in node.users:
                if user in inside or not (user.op == "output" or reads_values(user, node)):
                    continue
                read = marks.get(node)
                if keeps_channels(user) and user.op != "output":
                    read = numbers_behind(user, marks) if is_float(user) else read
                if read is None or torch.isin(channels, distinct(read)).any():
                    out = user.op == "output"
                    others["the outside of the model" if out else self.describe(user)] = None
        if others:
            raise Refused(f"{part.layer}'s output is also read by {', '.join(others)}")

    def call(self, conv: str, node: fx.Node) -> tuple[str, int]:
        """Which call of a layer a node is part of: the path it was called by, and the number."""
        path = next(
            p for p in reversed(self.graph.stack(node)) if self.names[self.modules[p]] == conv
        )
        return self.graph.call(node, path)

    def refuse_sharing(self, conv: str, ends: list[fx.Node]) -> None:
        """Refuse a layer that is called elsewhere too, takes several tensors, or shares its own."""
        nodes = self.layers[conv]
        calls = {self.call(conv, node) for node in nodes}
        if calls != {self.call(conv, node) for node in ends}:
            norms = [path for path, own in self.norms.items() if self.follows(own, conv)]
            served = (
                f", and serves {len(norms)} batch norms ({', '.join(norms)})" if norms[1:] else ""
            )
            raise Refused(f"{conv} is shared: it is called {len(calls)} times{served}")
        for call in calls:
            own = {node for node in nodes if self.call(conv, node) == call}
            given = {
                value
                for node in own
                for value in node.all_input_nodes
                if value not in own and is_float(value) and not self.graph.constant_path(value)
            }
            if len(given) > 1:
                raise Refused(
                    f"{conv} takes {len(given)} tensors in a call; a batch norm "
                    "can be folded where a layer multiplies one alone"
                )
        for name, _ in self.modules[conv].named_parameters(recurse=False):
            others = [n for n in self.readers[f"{conv}.{name}".lstrip(".")] if n not in nodes]
            if others:
                raise Refused(f"{conv}.{name} is read by {self.describe(others[0])}, too")

    def follows(self, norms: list[fx.Node], conv: str) -> bool:
        """Whether a batch norm reads a layer's output."""
        return any(
            node.op != "placeholder" and self.layer(node) == conv for node in self.behind(norms)[0]
        )

    def refuse_hooks(self, made: fx.Node, norm: fx.Node) -> None:
        """Hooks of the modules that the value leaves or enters on its way see it."""
        left, entered = self.stack(made), self.stack(norm)
        for path in {*left} ^ {*entered}:
            if path and has_hooks(self.modules[path]):
                raise Refused(f"{self.layer(made)}'s output is also read by hook() in {path}")

    # What a class of its own does behind the normalisation

    def rest(self, path: str, norms: list[fx.Node]) -> tuple[str, ...] | None:
        """Names of the children that follow the normalisation; None where other code does."""
        module = self.modules[path]
        if not isinstance(module, _BatchNorm) or any(self.stack(n)[-1] != path for n in norms):
            return None
        if bn_problem(module) is None:
            return ()
        order = [name for name, child in module._modules.items() if child is not None]
        groups: list[tuple[str, list[fx.Node]]] = []
        value, known = norms[0], set(norms)
        for node in self.operations:
            stack = self.stack(node)
            if path not in stack or node in known or op_spec(node.target).kind == "size":
                continue
            below = stack[stack.index(path) + 1 :]
            name = below[0].removeprefix(f"{path}.").split(".")[0] if below else ""
            if not name or norms[1:]:
                return None
            if not groups or groups[-1][0] != name:
                value = groups[-1][1][-1] if groups else value
                groups.append((name, []))
            groups[-1][1].append(node)
            inputs = [i for i in node.all_input_nodes if not self.graph.constant_path(i)]
            if any(i is not value and i not in groups[-1][1] for i in inputs):
                return None
        ran = [name for name, _ in groups]
        if [name for name in order if name in ran] != ran:
            return None
        last = groups[-1][1][-1] if groups else norms[0]
        made = {*norms, *(n for _, nodes in groups for n in nodes)}
        if any(user not in made for n in made if n is not last for user in n.users):
            return None
        return tuple(order)


def reads_values(user: fx.Node, node: fx.Node) -> bool:
    """Whether a step reads more of a value than its shape."""
    spec = op_spec(user.target)
    given = list(user.args[:1]) if spec.like else user.all_input_nodes
    return spec.kind != "size" and node in given


def only_reader(node: fx.Node) -> fx.Node | None:
    """The step that reads a value, if there is one alone."""
    return next(iter(node.users)) if len(node.users) == 1 else None


def is_sum(node: fx.Node) -> bool:
    """Whether a step adds or subtracts two tensors of one shape, or adds 0, and nothing else."""
    name = op_spec(node.target).name if node.op == "call_function" else ""
    if name not in ("add", "sub") or len(node.args) != 2 or node.kwargs:
        return False
    values = [node.meta.get("val") for node in node.all_input_nodes]
    shapes = [value.shape for value in values if isinstance(value, Tensor)]
    two = len(values) == len(shapes) == 2 and shapes[0] == shapes[1]
    return two or (name == "add" and len(shapes) == 1 and 0 in node.args)


def addends(value: fx.Node, user: fx.Node | None = None) -> list[fx.Node]:
    """The terms of a sum that nothing but ``user`` reads, a positive one first; else the value."""
    if not is_sum(value) or (user is not None and only_reader(value) is not user):
        return [value]
    found = [node for operand in value.all_input_nodes for node in addends(operand, value)]
    # An addend that counts twice has no share of its own.
    if len(set(found)) < len(found):
        raise Refused
    return found


def concatenated(value: fx.Node, user: fx.Node) -> list[list[fx.Node]]:
    """The addends of each range of channels of ``user``'s input."""
    given: Any = value.args
    if op_spec(value.target).kind != "concat" or only_reader(value) is not user:
        return [addends(value, user)]
    axis = given[1] if len(given) > 1 else value.kwargs.get("dim", 0)
    # Along another axis each layer makes all channels.
    if axis not in (1, 1 - value.meta["val"].dim()):
        raise Refused
    return [addends(item, value) for item in given[0]]


def _sizes(shape: Any) -> list[int] | None:
    sizes = [known_size(size) for size in shape]
    return None if None in sizes else sizes
