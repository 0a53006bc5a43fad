"""Layers, batch norms and activations of a traced model, fused."""

from __future__ import annotations

import copy
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from torch.ao.nn import quantized as torch_quantized
from torch.fx import Graph, Node
from torch.nn.modules.batchnorm import _BatchNorm

from bevquant_fusion import fuse_conv_bn
from bevquant_graph import layer_class
from bevquant_hybrid._fx._graph_module import replace_module
from bevquant_hybrid.nn.intrinsic import ACTIVATIONS, ANCHORS, fused_class
from bevquant_hybrid.nn.qat._base import hand_over_qconfig, take_over
from bevquant_hybrid.qat_mode import QATMode, get_qat_mode

_FUNCTIONS: dict[Any, type[nn.Module]] = {
    **dict.fromkeys((F.relu, torch.relu, "relu", "relu_", F.relu_), nn.ReLU),
    F.relu6: nn.ReLU6,
}


def fold(anchor: nn.Module, bn: nn.Module) -> nn.Module:
    """Return a copy of the layer with the batch norm's running statistics folded in."""
    # A copy of the batch norm, in evaluation: a model in training would be refused.
    settled = copy.copy(bn)
    settled.training = False
    made = fuse_conv_bn(anchor, settled)
    made.train(anchor.training)
    if layer_class(made, nn.Linear):
        made.register_forward_pre_hook(_refuse_inner_axes)
    for mark in ("qconfig", "preserve_qat_mode"):
        if mark in anchor.__dict__:
            setattr(made, mark, anchor.__dict__[mark])
    return made


def _refuse_inner_axes(module: nn.Module, args: tuple[Any, ...]) -> None:
    """Refuse what the folded batch norm would have normalized along another axis."""
    if args and args[0].dim() > 2:
        path = getattr(module, "qualified_name", "") or type(module).__name__
        raise ValueError(
            f"{path}: its input has shape {tuple(args[0].shape)}, and a BatchNorm1d follows, which "
            "normalizes axis 1 and was folded into the last axis; give [N, C], or transpose "
            "between the two"
        )


def fused(
    anchor: nn.Module,
    norm: nn.Module | None,
    adds: bool,
    activation: nn.Module | None,
    path: str | None = None,
) -> nn.Module:
    """The module of a layer, batch norm, addition and activation, as the mode of QAT has it."""
    if norm is not None and get_qat_mode() == QATMode.FuseBN:
        anchor, norm = fold(anchor, norm), None
    if norm is None and not adds and activation is None:
        return anchor
    # The float model's layer is not changed.
    own: Any = take_over(type(anchor), anchor)
    if path is not None:
        own.anchor_path = path
    kinds = layer_class(own) or type(own), norm is not None, adds, layer_class(activation)
    made = fused_class(*kinds)(own, norm, activation)
    hand_over_qconfig(own, made)
    return made


@dataclass
class _Chain:
    """Nodes that become one module."""

    anchor: Node
    bn: Node | None = None
    add: Node | None = None
    act: Node | None = None

    @property
    def last(self) -> Node:
        return self.act or self.add or self.bn or self.anchor


def fuse_graph(graph: Graph, root: nn.Module, stays_apart: Callable[[Node, Node], bool]) -> None:
    """Fuse in place."""
    modules = dict(root.named_modules(remove_duplicate=False))
    # Every intermediate result has one consumer; layer and batch norm are called once.
    calls = Counter(id(modules[n.target]) for n in graph.nodes if n.op == "call_module")
    reads = Counter(str(n.target) for n in graph.nodes if n.op == "get_attr" and n.users)
    finder = _Finder(modules, calls, reads, stays_apart)
    for node in list(graph.nodes):
        if finder.is_anchor(node):
            chain = finder.follow(node)
            if chain.last is not node:
                # The fused module has the layer's name, or the addition's if there is one; the
                # other names hold `nn.Identity`, so that they still lead to a module.
                _fuse(graph, root, modules, chain)
    graph.lint()


class _Finder:
    def __init__(
        self,
        modules: dict[str, nn.Module],
        calls: Counter[int],
        reads: Counter[str],
        stays_apart: Callable[[Node, Node], bool],
    ) -> None:
        self.modules, self.calls, self.reads = modules, calls, reads
        self.stays_apart = stays_apart
        # A module may have several names: its parameters are counted once.
        distinct = {id(module): module for module in modules.values()}.values()
        self.owners = Counter(
            id(parameter) for m in distinct for parameter in m._parameters.values()
        )

    def module(self, node: Node) -> nn.Module | None:
        return self.modules[str(node.target)] if node.op == "call_module" else None

    def is_anchor(self, node: Node) -> bool:
        module = self.module(node)
        if module is None or layer_class(module) not in ANCHORS or self.calls[id(module)] != 1:
            return False
        # A weight that is read elsewhere must not be folded into.
        if any(self.owners[id(parameter)] > 1 for parameter in module.parameters(recurse=False)):
            return False
        return not any(path.startswith(f"{node.target}.") for path in self.reads)

    def follow(self, anchor: Node) -> _Chain:
        chain = _Chain(anchor)
        for reader in self._readers(anchor):
            # Batch norm first, then one addition, then one activation, as the fused modules
            # compute.
            module = self.module(reader)
            if layer_class(module, _BatchNorm):
                if chain.last is not anchor or self.calls[id(module)] != 1:
                    break
                if not _is_norm_of(module, self.module(anchor)):
                    break
                chain.bn = reader
            elif self._is_add(reader):
                if chain.add or self._other_comes_first(reader, chain.last):
                    break
                chain.add = reader
            elif self._activation(reader):
                chain.act = reader
                break
            else:
                break
        return chain

    def _readers(self, node: Node) -> Iterator[Node]:
        """The only reader, then its only reader, and so on."""
        anchor = node
        while len(node.users) == 1:
            node = next(iter(node.users))
            if self.stays_apart(anchor, node):
                return
            yield node

    def _is_add(self, node: Node) -> bool:
        if node.op != "call_method" or node.target != "add" or len(node.args) != 3:
            return False
        owner = node.args[0]
        if not isinstance(owner, Node) or owner.op != "get_attr" or len(owner.users) != 1:
            return False
        # An arithmetic module that is called elsewhere too stays what it is.
        if self.reads[str(owner.target)] != 1:
            return False
        module = self.modules.get(str(owner.target))
        both = isinstance(node.args[1], Node) and isinstance(node.args[2], Node)
        distinct = node.args[1] is not node.args[2]
        return isinstance(module, torch_quantized.FloatFunctional) and both and distinct

    def _other_comes_first(self, add: Node, mine: Node) -> bool:
        """Whether the addition's first argument is another layer that could take it."""
        first = add.args[1]
        if first is mine or not isinstance(first, Node) or len(first.users) != 1:
            return False
        if layer_class(self.module(first), _BatchNorm):
            # The layer stands in front of its batch norm.
            (first,) = first.all_input_nodes
        return self.is_anchor(first) and len(first.users) == 1

    def _activation(self, node: Node) -> type[nn.Module] | None:
        kind = layer_class(self.module(node))
        if kind in ACTIVATIONS:
            return kind
        function = node.op in ("call_function", "call_method")
        return _FUNCTIONS.get(node.target) if function else None


def _is_norm_of(norm: Any, layer: Any) -> bool:
    """Whether a batch norm can be one of a layer's output channels, which Linear has last."""
    if not layer_class(layer, nn.Linear):
        return True
    of_rows = layer_class(norm, nn.BatchNorm1d, nn.SyncBatchNorm)
    return bool(of_rows) and norm.num_features == layer.out_features


def _fuse(graph: Graph, root: nn.Module, modules: dict[str, nn.Module], chain: _Chain) -> None:
    path = str(chain.anchor.target)
    norm = modules[str(chain.bn.target)] if chain.bn is not None else None
    activation = _new_activation(chain.act, modules)
    made = fused(modules[path], norm, chain.add is not None, activation, path)
    keeper = chain.anchor if chain.add is None else _call_in_place_of(chain, graph)
    if keeper is not chain.last:
        chain.last.replace_all_uses_with(keeper)
    for node in (chain.act, chain.add, chain.bn, chain.anchor):
        if node is not None and node is not keeper:
            graph.erase_node(node)
            if node.op == "call_module":
                _silence(graph, root, modules, str(node.target))
    replace_module(root, str(keeper.target), made)


def _new_activation(node: Node | None, modules: dict[str, nn.Module]) -> nn.Module | None:
    if node is None:
        return None
    if node.op == "call_module":
        module = modules[str(node.target)]
        made: nn.Module = (layer_class(module) or type(module))()
        return made
    return _FUNCTIONS[node.target]()


def _call_in_place_of(chain: _Chain, graph: Graph) -> Node:
    """Turn the call of the addition into one of the fused module, under the same names."""
    add = chain.add
    assert add is not None
    owner, *operands = add.args
    assert isinstance(owner, Node)
    mine = chain.bn or chain.anchor
    other = next(operand for operand in operands if operand is not mine)
    add.op, add.target = "call_module", str(owner.target)
    # In the place of the addition: by then both of its operands are known.
    add.args = (chain.anchor.args[0], other)
    add.meta["scope"] = add.target
    graph.erase_node(owner)
    return add


def _silence(graph: Graph, root: nn.Module, modules: dict[str, nn.Module], path: str) -> None:
    """Leave an Identity where a fused module was, unless another node still calls it."""
    # A shared module may still be called elsewhere.
    called = {id(modules[str(n.target)]) for n in graph.nodes if n.op == "call_module"}
    if id(modules[path]) not in called:
        replace_module(root, path, nn.Identity())
