"""Take folded batch norms out of a model, in the way each place asks for."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Literal

from torch import fx, nn

from bevquant_graph import layer_class
from bevquant_sparse import is_sparse_conv

from ._chains import is_chain, remove_member
from ._dataflow import DataFlow
from ._errors import UntraceableError
from ._plan import Pair
from ._rebuild import rebuild_forward
from ._sparse_names import is_sparse_module, is_sparse_sequential
from ._trace_forward import trace_forward

Removal = Literal["identity", "removed", "rebuilt"]
_ACTIVATIONS = (nn.ReLU, nn.ReLU6, nn.LeakyReLU, nn.ELU, nn.SiLU, nn.Hardswish)


def remove_batch_norms(
    model: nn.Module, flow: DataFlow, pairs: Iterable[Pair]
) -> dict[Pair, Removal]:
    """Remove the batch norm of each pair; the paths are those before any removal."""
    places = _places(model)
    modules = dict(model.named_modules())
    removal: dict[Pair, Removal] = {}
    chains: dict[str, list[Pair]] = {}
    blocks: dict[str, list[Pair]] = {}
    for pair in pairs:
        at = places[modules[pair.bn]]
        parent = pair.bn.rpartition(".")[0]
        sparse = is_sparse_conv(modules[pair.conv])
        if not sparse or len(at) != 1 or pair.scope != parent:
            removal[pair] = "identity"
        elif is_sparse_sequential(modules[parent]) and is_chain(modules[parent]):
            chains.setdefault(parent, []).append(pair)
        elif is_chain(modules[parent]) or parent in flow.called_with_options:
            removal[pair] = "identity"
        else:
            blocks.setdefault(parent, []).append(pair)
    for parent, members in blocks.items():
        done = _rebuild_without(modules[parent], [p.bn.rpartition(".")[2] for p in members])
        removal |= dict.fromkeys(members, "rebuilt" if done else "identity")
    for pair, how in removal.items():
        if how == "identity":
            for owner, name in places[modules[pair.bn]]:
                owner._modules[name] = nn.Identity().train(modules[pair.bn].training)
    for parent, members in chains.items():
        indexed = any(c.path.rpartition(".")[0] == parent != c.scope for c in flow.calls if c.path)
        # From the end, so that renumbering leaves the names still to be removed alone.
        for pair in reversed(members):
            name = pair.bn.rpartition(".")[2]
            if indexed:
                modules[parent]._modules[name] = nn.Identity().train(modules[pair.bn].training)
            else:
                remove_member(modules[parent], name)
            removal[pair] = "identity" if indexed else "removed"
    return removal


def stop_inplace(model: nn.Module, flow: DataFlow) -> list[str]:
    """Set ``inplace=False`` on the activations of sparse encoders; return their paths.

    A sparse encoder is any module that is a sparse module itself or has one among its children.
    Activations whose in-place writing is seen through another name are left: without it the model
    would compute something else.
    """
    changed = []
    for path, parent in model.named_modules():
        children = list(parent.named_children())
        if not is_sparse_module(parent) and not any(
            is_sparse_conv(c) or is_sparse_module(c) for _, c in children
        ):
            continue
        for name, child in children:
            child_path = f"{path}.{name}" if path else name
            if layer_class(child, *_ACTIVATIONS) and getattr(child, "inplace", False):
                if child_path not in flow.inplace_seen:
                    child.inplace = False
                    changed.append(child_path)
    return changed


def _places(model: nn.Module) -> dict[nn.Module, list[tuple[nn.Module, str]]]:
    places: dict[nn.Module, list[tuple[nn.Module, str]]] = {}
    for parent in model.modules():
        for name, child in parent._modules.items():
            if child is not None:
                places.setdefault(child, []).append((parent, name))
    return places


def _rebuild_without(block: nn.Module, names: list[str]) -> bool:
    """Rebuild the forward of ``block`` without calls of ``names`` and delete them."""
    try:
        graph = trace_forward(block)
    except UntraceableError:
        return False
    for name in names:
        calls = [n for n in graph.nodes if n.op == "call_module" and n.target == name]
        if len(calls) != 1 or len(calls[0].args) != 1:
            return False
        calls[0].replace_all_uses_with(calls[0].args[0])
        graph.erase_node(calls[0])
    _drop_self_replacement(graph)
    rebuild_forward(block, graph)
    for name in names:
        delattr(block, name)
    return True


def _drop_self_replacement(graph: fx.Graph) -> None:
    """``x.replace_feature(x.features)`` is ``x``; ``x.features = x.features`` is nothing."""
    for node in list(graph.nodes):
        method = node.op == "call_method" and node.target == "replace_feature"
        helper = getattr(node.target, "__name__", "") == "replace_feature"
        write = node.target is setattr and node.args[1] == "features"
        if not (method or helper or write) or node.kwargs or len(node.args) != 2 + write:
            continue
        base, read = node.args[0], node.args[-1]
        if not isinstance(read, fx.Node) or read.target is not getattr:
            continue
        if read.args != (base, "features") or read.next is not node:
            continue
        if not write:
            node.replace_all_uses_with(base)
        graph.erase_node(node)
        if not read.users:
            graph.erase_node(read)
