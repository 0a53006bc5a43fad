"""What people call the nodes of a unit's graph: the layer's path in the model, and what it does."""

from __future__ import annotations

from typing import Any, NamedTuple

from torch import fx, nn

from bevfusion_quant.bpu._units import PREFIXES
from bevquant_hybrid.nn.intrinsic import Fused

__all__ = ["Label", "node_labels"]


_BOUNDARIES = ("_activation_post_process", "_input_dequant")


class Label(NamedTuple):
    """A node's names.

    Attributes:
        path: In the model, such as "encoders.camera.backbone.layer1.0.conv3".
        short: Within the plan, where each is unique.
        operator: What it computes, such as "Conv2d + add + ReLU".
        place: What calls of it are recorded under: the module's path, or the node's name.
    """

    path: str
    short: str
    operator: str
    place: str


def node_labels(unit: str, graph: fx.GraphModule) -> dict[str, Label]:
    """Labels by node name, of everything that is called but the boundaries that prepare put in.

    A fused addition goes by the layer that it is computed with, a function by the module in whose
    forward it stands.
    """
    modules = dict(graph.named_modules())
    labels = {}
    for node in graph.graph.nodes:
        owner = node.args[0] if node.op == "call_method" and node.args else None
        if node.op == "call_module":
            target = str(node.target)
        elif isinstance(owner, fx.Node) and owner.op == "get_attr":
            target = str(owner.target)
        elif node.op in ("call_function", "call_method"):
            path = f"{node.meta.get('scope', '')}.{node.name}".strip(".")
            labels[node.name] = _label(unit, path, _function(node), node.name)
            continue
        else:
            continue
        if target.endswith(_BOUNDARIES):
            continue
        module = modules.get(target)
        labels[node.name] = _label(unit, _layer(target, module), _operator(node, module), target)
    return labels


def _label(unit: str, path: str, operator: str, place: str) -> Label:
    return Label(PREFIXES[unit] + path, path, operator, place)


def _layer(target: str, module: Any) -> str:
    """The layer's own path; of what stands for a function, its place in the forward."""
    layer = module.part("conv") if isinstance(module, Fused) else module
    anchor = getattr(layer, "anchor_path", None)
    if isinstance(anchor, str):
        return anchor
    scope = getattr(module, "generated_in", None)
    if isinstance(scope, str):
        stem = f"{scope.replace('.', '_')}_generated_"
        return f"{scope}.{target.removeprefix(stem)}".strip(".")
    return target


def _operator(node: fx.Node, module: nn.Module | None) -> str:
    if node.op == "call_method":
        return str(node.target)
    kinds = [
        c.__name__ for c in type(module).__mro__ if c.__module__.startswith("torch.nn.modules")
    ]
    base = kinds[0] if kinds and kinds[0] != "Module" else type(module).__name__
    added = "add" if getattr(module, "adds", False) else ""
    behind = {"relu": "ReLU", "relu6": "ReLU6"}.get(str(getattr(module, "activation", "")), "")
    return " + ".join(part for part in (base, added, behind) if part)


def _function(node: fx.Node) -> str:
    return str(node.target) if node.op == "call_method" else getattr(node.target, "__name__", "")
