"""Plans and estimates of a prepared graph under the names of the model's layers.

A graph from `prepare_qat_fx` has generated names for fused layers, functions and boundaries. Here
each node has the name of its original layer.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import torch
from torch import fx, nn

from bevquant_hybrid.nn.intrinsic import anchor_of
from bevquant_hybrid.operators import OperatorCall, find_violations, trace_calls
from bevquant_hybrid.partition import Plan, PlanNode, partition, place_operator
from bevquant_hybrid.utils.fx_helper import called_path, scope_of
from bevquant_hybrid_tools.performance import LayerEstimate, estimate_layers

__all__ = ["NodeLabel", "estimate_by_layer", "node_labels", "plan_by_layer"]

_BOUNDARIES = ("_activation_post_process", "_input_dequant")


class NodeLabel(NamedTuple):
    """A node's names."""

    path: str  # in the whole model, such as "encoders.camera.backbone.layer1.0.conv3"
    short: str  # the same within the graph's own model, where each is unique
    operator: str  # its operators, such as "Conv2d + add + ReLU"
    place: str  # name of its recorded calls: the module's path, or the node's name


def node_labels(graph: fx.GraphModule, prefix: str = "") -> dict[str, NodeLabel]:
    """Labels by node name, for all calls but the boundaries inserted by prepare.

    A fused addition has its layer's name, a function that of the module whose forward calls it.

    Args:
        graph: From `prepare_qat_fx`.
        prefix: Prefix of its paths in the whole model, such as "encoders.camera.".

    Example:
        >>> from bevquant_hybrid.march import March, set_march
        >>> from bevquant_hybrid.quantization import (
        ...     QuantStub, fuse_fx, get_default_qat_qconfig, prepare_qat_fx)
        >>> set_march(March.BAYES)
        >>> net = nn.Sequential(QuantStub(), nn.Conv2d(3, 4, 1), nn.BatchNorm2d(4), nn.ReLU())
        >>> graph = prepare_qat_fx(fuse_fx(net.eval()), {"": get_default_qat_qconfig()})
        >>> [(label.path, label.operator) for label in node_labels(graph, "neck.").values()]
        [('neck.0', 'QuantStub'), ('neck.1', 'Conv2d + ReLU')]
    """
    modules = dict(graph.named_modules())
    labels = {}
    for node in graph.graph.nodes:
        target = called_path(node)
        if not target and node.op in ("call_function", "call_method"):
            path = f"{scope_of(node)}.{node.name}".strip(".")
            labels[node.name] = NodeLabel(prefix + path, path, _function(node), node.name)
        elif target and not target.endswith(_BOUNDARIES):
            module = modules.get(target)
            path = _layer(target, module)
            labels[node.name] = NodeLabel(prefix + path, path, _operator(node, module), target)
    return labels


def _layer(target: str, module: Any) -> str:
    """The layer's path; for a function's module, its place in the forward."""
    anchor = getattr(anchor_of(module), "anchor_path", None)
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


def plan_by_layer(
    graph: fx.GraphModule,
    march: str,
    shapes: Sequence[tuple[int, ...]],
    *,
    prefix: str = "",
    on_cpu: Mapping[str, str] | None = None,
) -> Plan:
    """`partition` of a prepared graph, under the names of the layers.

    Args:
        graph: From `prepare_qat_fx`.
        march: The BPU.
        shapes: Shapes of the graph's inputs; one entry of the first axis is run, all are reported.
        prefix: Prefix of its paths in the whole model.
        on_cpu: Paths of modules on the CPU, with the reported reason.
    """
    found = partition(graph, march, example_inputs=_single(shapes))
    labels = node_labels(graph, prefix)
    names = {node: label.short for node, label in labels.items()}
    nodes = []
    for node in found.nodes:
        shape = node.shape and _grown(node.shape, shapes)
        node = replace(node, shape=shape, inputs=tuple(names.get(n, n) for n in node.inputs))
        label = labels.get(node.name)
        nodes.append(node if label is None else _named(node, label, march, on_cpu or {}))
    return replace(found, nodes=tuple(nodes))


def _named(node: PlanNode, label: NodeLabel, march: str, on_cpu: Mapping[str, str]) -> PlanNode:
    named = replace(node, name=label.short, path=label.path)
    if node.kind != "operator":
        return named
    if node.place == "BPU":
        reason = f"{node.operator}: {place_operator(node.operator, march).because}"
    else:
        around = f"{label.short}."  # whole names: neck.1 is not around neck.10
        chosen = (why for path, why in on_cpu.items() if around.startswith(f"{path}."))
        reason = next(chosen, node.reason)
    return replace(named, operator=label.operator, reason=reason)


def estimate_by_layer(
    graph: fx.GraphModule,
    labels: Mapping[str, NodeLabel],
    march: str,
    shapes: Sequence[tuple[int, ...]],
) -> tuple[tuple[LayerEstimate, ...], tuple[str, ...]]:
    """`estimate_layers` of the BPU part, under the names of the layers.

    Args:
        graph: From `convert_fx`.
        labels: Labels of the prepared graph.
        march: The BPU.
        shapes: Shapes of the graph's inputs. One entry of the first axis is run, since only shapes
            count and tracing keeps every activation; the estimate is for all entries.

    Returns:
        A row for each call but the boundaries, and the violations of the march's limits, one line
        each.
    """
    calls = [_of_all(call, shapes) for call in trace_calls(graph, _single(shapes))]
    on_bpu = [c for c in calls if c.operator.endswith("Stub") or "float32" not in c.input_dtypes]
    names = {label.place: label.path for label in labels.values()}
    layers = [
        replace(
            layer,
            path=names.get(layer.path, layer.path),
            fused_into=names.get(layer.fused_into, layer.fused_into),
        )
        for layer in estimate_layers(on_bpu, march)
        if not layer.operator.endswith("Stub")
    ]
    violations = [str(v) for v in find_violations([c for c in on_bpu if c.input_dtypes], march)]
    return tuple(layers), tuple(violations)


def _single(shapes: Sequence[tuple[int, ...]]) -> tuple[torch.Tensor, ...]:
    return tuple(torch.zeros(1, *shape[1:]) for shape in shapes)


def _grown(shape: tuple[int, ...], shapes: Sequence[tuple[int, ...]]) -> tuple[int, ...]:
    """The shape with all entries along the first axis instead of one."""
    return (shape[0] * shapes[0][0], *shape[1:])


def _of_all(call: OperatorCall, shapes: Sequence[tuple[int, ...]]) -> OperatorCall:
    every, made = (
        tuple(_grown(shape, shapes) if len(shape) == 4 else shape for shape in side)
        for side in (call.input_shapes, (call.output_shape,))
    )
    return replace(call, input_shapes=every, output_shape=made[0])
