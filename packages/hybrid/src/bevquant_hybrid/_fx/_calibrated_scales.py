"""Where values are quantized and dequantized, and what calibration found there."""

from __future__ import annotations

import warnings
from collections.abc import Callable

from torch import Tensor, nn
from torch.fx import Graph, GraphModule, Node

from bevquant_hybrid._fake_quant._fake_quantize import (
    CalibFakeQuantize,
    FakeQuantize,
    _WrappedCalibFakeQuantize,
)
from bevquant_hybrid._fx._placement import Kind, Placement
from bevquant_hybrid._observers._range import FixedScaleObserver
from bevquant_hybrid.nn.qat._parts import Composed
from bevquant_hybrid.nn.qat.stubs import DeQuantStub

Make = Callable[[Node], nn.Module]
BOUNDARY = "boundary"  # key of a node's meta


def insert_boundaries(graph: Graph, root: nn.Module, placement: Placement, make: Make) -> None:
    """Insert what carries values between CPU and BPU, in one pass in the graph's order.

    Behind a CPU node ``n`` from which a BPU node is reachable through views alone:
    ``n_activation_post_process``, which `make` builds. Before a CPU node, for its i-th input that
    comes from the BPU: ``n_input_dequant_i``, all of them one module ``n_input_dequant``.

    Args:
        graph: Nodes, changed in place.
        root: Gets the new modules.
        placement: The kinds of the nodes.
        make: The fake quantizer for a node's output.
    """
    for node in list(graph.nodes):
        if placement.kinds[node] is Kind.CPU:
            _quantize_behind(graph, root, node, placement, make)
            _dequantize_before(graph, root, node, placement)


def _needs_quantized(user: Node, placement: Placement) -> bool:
    """Whether a node computes on the BPU, or passes its input on to one that does."""
    kind = placement.kinds[user]
    if kind is Kind.PASS:
        return any(_needs_quantized(next_user, placement) for next_user in user.users)
    return kind is Kind.BPU


def _quantize_behind(
    graph: Graph, root: nn.Module, node: Node, placement: Placement, make: Make
) -> None:
    # Readers on the CPU keep the float value.
    readers = [user for user in node.users if _needs_quantized(user, placement)]
    if not readers:
        return
    name = f"{node.name}_activation_post_process"
    root.add_module(name, make(node))
    with graph.inserting_after(node):
        made = graph.create_node("call_module", name, (node,), name=name)
    made.meta.update({BOUNDARY: "quantize", "scope": name})
    placement.kinds[made] = Kind.QUANT
    for user in readers:
        user.replace_input_with(node, made)


def _dequantize_before(graph: Graph, root: nn.Module, node: Node, placement: Placement) -> None:
    quantized = [
        value
        for value in placement.inputs(node)
        if placement.kinds[placement.source(value)] in (Kind.BPU, Kind.QUANT)
    ]
    name = f"{node.name}_input_dequant"
    if quantized:
        stub = DeQuantStub()
        stub.forced = placement.forced(node)
        root.add_module(name, stub)
    for index, value in enumerate(quantized):
        with graph.inserting_before(node):
            made = graph.create_node("call_module", name, (value,), name=f"{name}_{index}")
        made.meta.update({BOUNDARY: "dequantize", "scope": name})
        placement.kinds[made] = Kind.DEQUANT
        node.replace_input_with(value, made)


def is_calibration(model: nn.Module) -> bool:
    """Whether a prepared model is one that only collects statistics."""
    kinds = [type(m) for m in model.modules() if isinstance(m, CalibFakeQuantize | FakeQuantize)]
    return FakeQuantize not in kinds and any(issubclass(k, CalibFakeQuantize) for k in kinds)


def optional_paths(model: nn.Module) -> set[str]:
    """Fake quantizers of parts that not every call needs."""
    return {
        f"{path}.{name}.activation_post_process".lstrip(".")
        for path, module in model.named_modules()
        if isinstance(module, Composed)
        for name in module.optional
    }


def calibrated_scales(model: nn.Module) -> dict[str, Tensor | None]:
    """The scale of every activation that was to be calibrated; None where nothing was seen."""
    optional = optional_paths(model)
    return {
        path: module.calculate_qparams()[0] if module.observed else None
        for path, module in model.named_modules()
        if isinstance(module, CalibFakeQuantize)
        and not path.endswith("weight_fake_quant")
        and (module.observed or path not in optional)
    }


def adopt_scales(model: nn.Module, scales: dict[str, Tensor | None]) -> None:
    """Start the fake quantizers of a model from the scales found at the same names.

    Where an operator runs on the CPU that did not during the calibration, what quantizes its result
    takes the scale that this had.
    """
    if isinstance(model, GraphModule):
        scales = {**scales, **_at_new_boundaries(model, scales)}
    modules = dict(model.named_modules())
    forgotten = []
    for path, scale in scales.items():
        module = modules.get(path)
        if isinstance(module, _WrappedCalibFakeQuantize):
            module = module.activation_post_process
        if not isinstance(module, FakeQuantize):
            continue  # a 32-bit output needs no scale
        if isinstance(module.activation_post_process, FixedScaleObserver):
            continue
        if scale is None:
            forgotten.append(path)
        else:
            module.set_qparams(scale)
    warn_of_uncollected(forgotten)


def _at_new_boundaries(
    model: GraphModule, scales: dict[str, Tensor | None]
) -> dict[str, Tensor | None]:
    found = {}
    for node in model.graph.nodes:
        if node.meta.get(BOUNDARY) == "quantize" and node.name not in scales:
            maker = node.args[0]
            owner = maker.args[0] if maker.op == "call_method" else maker
            path = f"{owner.target}.activation_post_process"
            if path in scales:
                found[node.name] = scales[path]
    return found


def warn_of_uncollected(paths: list[str]) -> None:
    """Warn of fake quantizers that have seen nothing."""
    owners = [path.removesuffix(".activation_post_process") for path in paths]
    for owner in dict.fromkeys(owners):
        warnings.warn(
            f"`{owner}` has not collected any statistics of activations and its scale is 1, "
            "please check whether this is intended! Run calibration batches before this step",
            UserWarning,
            stacklevel=4,
        )
