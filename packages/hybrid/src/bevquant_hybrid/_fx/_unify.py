"""One scale for everything that is concatenated, as BERNOULLI2 has it."""

from __future__ import annotations

import operator
from typing import Any

from torch import Tensor, nn
from torch.fx import Graph, Node

from bevquant_graph import layer_class
from bevquant_hybrid._fake_quant._fake_quantize import CalibFakeQuantize, FakeQuantize
from bevquant_hybrid._fake_quant._learned import LearnedFakeQuantize
from bevquant_hybrid._fx._calibrated_scales import is_calibration
from bevquant_hybrid._fx._placement import keeps_scale
from bevquant_hybrid._observers._range import FixedScaleObserver
from bevquant_hybrid._scale_keeping import rule_of
from bevquant_hybrid.march import JOINS_AT_ONE_SCALE


def refuse_settings(optimize_kwargs: dict[str, Any] | None, caller: str) -> None:
    """Refuse what narrows or widens the optimization.

    Raises:
        ValueError: There are such settings.
    """
    if optimize_kwargs:
        raise ValueError(
            f"{caller}: optimize_kwargs={sorted(optimize_kwargs)}: not offered; "
            "optimize_graph=True ties inputs and outputs of every FloatFunctional.cat"
        )


def unify_cat_scales(graph: Graph, root: nn.Module, march: str, caller: str) -> list[list[str]]:
    """Tie the scales of the inputs and the output of every concatenation.

    Each keeps its own observer; the largest range decides. Concatenations that share a tensor
    become one group. Values are then joined without being rescaled. Other marches rescale, and
    nothing is changed.

    Args:
        graph: Calls of the model, with its names.
        root: The prepared model.
        march: What it is prepared for.
        caller: Whom a message names.

    Returns:
        The names of the modules that share, group by group.

    Raises:
        ValueError: A group has outputs of 32 bits, of several types, or several fixed scales.
    """
    # While a model is calibrated nothing is rounded, so that no scale is shared either.
    if march not in JOINS_AT_ONE_SCALE or is_calibration(root):
        return []
    groups = _groups(graph, root)
    for paths in groups:
        _tie(root, paths, caller)
    return groups


def _groups(graph: Graph, root: nn.Module) -> list[list[str]]:
    """Names of the modules that quantize the inputs and the output of concatenations."""
    leader: dict[str, str] = {}

    def first(path: str) -> str:
        while leader[path] != path:
            path = leader[path]
        return path

    for node in graph.nodes:
        if node.op != "call_method" or node.target != "cat":
            continue
        found = [path for path in (_quantizer(n, root) for n in _joined(node)) if path]
        mine = _quantizer(node, root)
        if mine is None:
            continue
        for path in (mine, *found):
            leader.setdefault(path, path)
            leader[first(path)] = first(mine)
    made: dict[str, list[str]] = {}
    for path in leader:
        made.setdefault(first(path), []).append(path)
    return list(made.values())


def _joined(node: Node) -> list[Node]:
    tensors = node.args[1] if len(node.args) > 1 else node.kwargs.get("tensors", ())
    if isinstance(tensors, Node):
        return [tensors]
    return [n for n in tensors if isinstance(n, Node)] if isinstance(tensors, list | tuple) else []


def _quantizer(node: Node, root: nn.Module) -> str | None:
    """Name of the module that gives a node's value its scale, beyond what keeps the scale."""
    while True:
        path = _owner(node)
        module = root.get_submodule(path) if path else None
        if module is not None and _quantizes(module):
            return path
        inputs = [n for n in node.all_input_nodes if n.op != "get_attr"]
        keeps = _keeps(node) if module is None else keeps_scale(module)
        if not keeps or not inputs:
            return None
        node = inputs[0]


def _owner(node: Node) -> str:
    if node.op == "call_module":
        return str(node.target)
    owner = node.args[0] if node.op == "call_method" and node.args else None
    return str(owner.target) if isinstance(owner, Node) and owner.op == "get_attr" else ""


def _quantizes(module: nn.Module) -> bool:
    if isinstance(module, FakeQuantize | CalibFakeQuantize):
        return True
    if "activation_post_process" not in module._modules:
        return False
    # torch's own arithmetic holds an Identity there.
    return layer_class(module._modules["activation_post_process"], nn.Identity) is None


def _keeps(node: Node) -> bool:
    """Whether a function's value has its first input's scale."""
    function: Any = node.target
    if node.op == "call_method":
        function = getattr(Tensor, str(node.target), None)
    return node.op in ("call_function", "call_method") and (
        function is operator.getitem or rule_of(function) is not None
    )


def _tie(root: nn.Module, paths: list[str], caller: str) -> None:
    found = {path: _fake_quant(root.get_submodule(path)) for path in paths}
    wide = [path for path, fake_quant in found.items() if fake_quant is None]
    kinds = sorted({str(fake_quant.dtype) for fake_quant in found.values() if fake_quant})
    learned = [path for path, q in found.items() if isinstance(q, LearnedFakeQuantize)]
    fixed = sorted(
        {
            float(q.activation_post_process.fixed_scale)
            for q in found.values()
            if q and isinstance(q.activation_post_process, FixedScaleObserver)
        }
    )
    reason = ""
    if wide:
        reason = f"{wide[0]} has 32 bits; give it a qconfig with an activation"
    elif len(kinds) > 1:
        reason = f"they have {', '.join(kinds)}; give them one type"
    elif learned:
        reason = f"that of {learned[0]} is learned; use activation_fake_quant='fake_quant'"
    elif len(fixed) > 1:
        reason = f"their scales are fixed at {fixed}; fix one of them"
    if reason:
        raise ValueError(
            f"{caller}: optimize_graph=True gives {', '.join(paths)} one scale, but {reason}, or "
            "leave optimize_graph off"
        )
    first, *others = (q for q in found.values() if isinstance(q, FakeQuantize))
    first.tie(others)


def _fake_quant(module: nn.Module) -> Any:
    if isinstance(module, FakeQuantize | CalibFakeQuantize):
        return module
    return module._modules["activation_post_process"]
