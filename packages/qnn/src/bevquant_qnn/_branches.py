"""Questions about the graph of one module's forward: where a value comes from, who reads it."""

from __future__ import annotations

import operator
from collections.abc import Iterator

import torch
from torch import fx, nn

from bevquant_graph import layer_class
from bevquant_qnn._kinds import (
    has_sparse_conv,
    is_batch_norm,
    is_dense_conv,
    is_identity,
    is_plain_chain,
    is_quantized,
    is_sparse_module,
)
from bevquant_quantizers import TensorQuantizer

__all__ = ["Branches"]

_ADDS = frozenset({operator.add, operator.iadd, torch.add})
_INPLACE_ADDS = frozenset({operator.iadd, "add_"})
_ADD_METHODS = frozenset({"add", "add_"})
_CONCATS = frozenset({torch.cat, torch.concat, torch.concatenate})
_NUMBERS = frozenset(
    {"shape", "size", "dim", "ndim", "numel", "batch_size", "spatial_shape", "indices"}
)


class Branches:
    """The graph of `module`'s own forward, and the children its nodes call."""

    def __init__(self, module: nn.Module, graph: fx.Graph) -> None:
        self.module = module
        self.graph = graph

    def additions(self) -> list[fx.Node]:
        """Return the nodes that add two computed tensors."""
        return [
            node
            for node in self.graph.nodes
            if self._is_addition(node) and all(self._is_tensor(arg) for arg in node.args)
        ]

    def concatenations(self) -> list[fx.Node]:
        """Return the nodes that concatenate tensors."""
        return [
            node
            for node in self.graph.nodes
            if node.op == "call_function" and node.target in _CONCATS and "out" not in node.kwargs
        ]

    def child(self, node: fx.Node) -> nn.Module | None:
        """Return the module that `node` calls, if it calls one."""
        return self.module.get_submodule(str(node.target)) if node.op == "call_module" else None

    def producers(self, node: fx.Node) -> list[nn.Module]:
        """Return the modules nearest behind `node`, looking through functions and identities."""
        found = []
        for source in self._sources(node, set()):
            child = self.child(source)
            if child is not None:
                found.append(child)
        return found

    def readers(self, node: fx.Node) -> list[nn.Module]:
        """Return the modules nearest after `node`, looking through functions and identities."""
        found: list[nn.Module] = []
        pending, seen = list(node.users), set()
        while pending:
            user = pending.pop()
            if user in seen:
                continue
            seen.add(user)
            child = self.child(user)
            if child is not None and not is_identity(child):
                found.append(child)
            else:
                pending.extend(user.users)
        return found

    def is_sparse(self, node: fx.Node) -> bool:
        """Tell whether the value of `node` is a sparse tensor or the features of one."""
        for source in self._sources(node, set(), stop_at_features=True):
            child = self.child(source)
            if source.target is getattr or (
                child is not None and (is_sparse_module(child) or has_sparse_conv(child))
            ):
                return True
        return False

    def ends_in_conv(self, node: fx.Node) -> bool:
        """Tell whether a quantized dense conv made the value, norms and activations aside."""
        return any(_ends_in_conv(child) for child in self.producers(node))

    def is_quantized(self, node: fx.Node) -> bool:
        """Tell whether `node` is the output of a quantizer."""
        return isinstance(self.child(node), TensorQuantizer)

    def depth(self, node: fx.Node) -> int:
        """Return the number of weighted layers on the longest way from an input to `node`."""
        depths: dict[fx.Node, int] = {}
        for other in self.graph.nodes:
            child = self.child(other)
            own = 0 if child is None or is_identity(child) else max(1, _layers(child))
            depths[other] = own + max((depths[i] for i in other.all_input_nodes), default=0)
        return depths[node]

    def hides_a_change(self, node: fx.Node) -> bool:
        """Tell whether `node` adds in place to a tensor that is read later under another name.

        Such an addition cannot be replaced by one that makes a new tensor.
        """
        if node.target not in _INPLACE_ADDS:
            return False
        order = {other: index for index, other in enumerate(self.graph.nodes)}
        changed = node.args[0]
        while isinstance(changed, fx.Node):
            stored = any(
                user.target is setattr and user.args[0] is changed and user.args[2] is node
                for user in changed.users
            )
            if not stored and any(
                order[user] > order[node] and _reads_values(user, changed) for user in changed.users
            ):
                return True
            # What it is a view of, or the sparse tensor that holds it, changes with it.
            follow = changed.op in ("call_function", "call_method") and changed.args
            changed = changed.args[0] if follow else None
        return False

    def _is_addition(self, node: fx.Node) -> bool:
        known = (node.op == "call_function" and node.target in _ADDS) or (
            node.op == "call_method" and node.target in _ADD_METHODS
        )
        return known and len(node.args) == 2 and not node.kwargs

    def _is_tensor(self, arg: object) -> bool:
        if not isinstance(arg, fx.Node) or arg.op == "get_attr":
            return False
        if arg.op == "call_method":
            return arg.target not in _NUMBERS
        if arg.target is getattr:
            return arg.args[1] not in _NUMBERS
        if arg.target is operator.getitem and isinstance(arg.args[0], fx.Node):
            return self._is_tensor(arg.args[0])
        return True

    def _sources(
        self, node: fx.Node, seen: set[fx.Node], *, stop_at_features: bool = False
    ) -> Iterator[fx.Node]:
        if node in seen:
            return
        seen.add(node)
        child = self.child(node)
        transparent = child is None or _is_transparent(child)
        features = node.target is getattr and node.args[1] == "features"
        if (stop_at_features and features) or node.op == "placeholder" or not transparent:
            yield node
            return
        for source in node.all_input_nodes:
            yield from self._sources(source, seen, stop_at_features=stop_at_features)


def _reads_values(user: fx.Node, tensor: fx.Node) -> bool:
    """Tell whether `user` looks at the values of `tensor`, not at its sizes or coordinates."""
    name = user.target if user.op == "call_method" else getattr(user.target, "__name__", "")
    if name == "replace_feature":
        return tensor in user.args[1:]
    return not (user.target is getattr and user.args[1] in _NUMBERS)


def _is_transparent(module: nn.Module) -> bool:
    activation = getattr(layer_class(module), "__module__", "") == "torch.nn.modules.activation"
    resize = layer_class(module, nn.Upsample) is not None
    return is_identity(module) or is_batch_norm(module) or activation or resize


def _ends_in_conv(module: nn.Module) -> bool:
    if is_quantized(module):
        return is_dense_conv(module)
    if is_plain_chain(module):
        last = next((c for c in reversed(list(module.children())) if not _is_transparent(c)), None)
        return last is not None and _ends_in_conv(last)
    return any(is_dense_conv(child) for child in module.modules())


def _layers(module: nn.Module) -> int:
    return sum(1 for child in module.modules() if "weight" in child._parameters)
