"""Operators of a prepared model that compute on floats: refused, or listed with their reason.

In a hybrid model they run on the CPU, with stubs between them and the BPU.
"""

from __future__ import annotations

import logging
import operator
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.fx import Graph, Node
from torch.nn.modules.padding import _ConstantPadNd, _ReplicationPadNd

from bevquant_graph import layer_class
from bevquant_hybrid._fx._placement import Kind, Placement, keeps_scale
from bevquant_hybrid._fx._tracer import called_function, line_of, scope_of
from bevquant_hybrid._scale_keeping import gives_plain, rule_of
from bevquant_hybrid.nn._functions import Div, FloatFunctional, Where
from bevquant_hybrid.nn.qat import has_qat_form
from bevquant_hybrid.nn.qat.stubs import DeQuantStub

Make = Callable[[Node], nn.Module]
BOUNDARY = "boundary"  # key of a node's meta

_logger = logging.getLogger(__name__)
_LIBRARIES = ("torch", "_operator", "builtins", "math")
_REMEDIES: dict[Any, str] = {
    F.instance_norm: "nn.GroupNorm with a group per channel has a quantized form",
    F.batch_norm: "nn.BatchNorm2d has a quantized form",
    F.log_softmax: "nn.Softmax has a quantized form; take the logarithm behind the DeQuantStub",
    **dict.fromkeys(
        (torch.var, torch.std, "var", "std"),
        "FloatFunctional().mean of squares has a quantized form",
    ),
    **dict.fromkeys(
        (torch.norm, "norm", torch.linalg.vector_norm),
        "nn.functional.normalize has a quantized form",
    ),
    **dict.fromkeys(
        ("float", "to", "type_as", "half", "double"), "a DeQuantStub gives its float values"
    ),
}


@dataclass(frozen=True)
class CpuOperator:
    """An operator of a hybrid model that runs on the CPU."""

    node: str  # name of its node
    operator: str  # the module's class, or the function
    path: str  # the module, or the module whose forward calls the function
    line: str  # file and line of the forward that calls it
    reason: str  # reason why it is not on the BPU

    def __str__(self) -> str:
        where = f" in {self.path}" if self.path else ""
        return f"{self.operator}{where} ({self.line}): {self.reason}"


def list_cpu_operators(placement: Placement) -> tuple[CpuOperator, ...]:
    """The operators that a hybrid model runs on the CPU, in the order of execution; also logged."""
    found = tuple(
        CpuOperator(
            node.name,
            _name(node, placement),
            placement.path(node),
            line_of(node),
            placement.reason(node),
        )
        for node, kind in placement.kinds.items()
        if kind is Kind.CPU
    )
    for entry in found:
        _logger.info("on the CPU: %s", entry)
    return found


def insert_boundaries(graph: Graph, root: nn.Module, placement: Placement, make: Make) -> None:
    """Insert boundaries between CPU and BPU, in one pass in the graph's order."""
    for node in list(graph.nodes):
        if placement.kinds[node] is Kind.CPU:
            _quantize_behind(graph, root, node, placement, make)
            _dequantize_before(graph, root, node, placement)


def _needs_quantized(user: Node, placement: Placement) -> bool:
    """Whether a node computes on the BPU, or passes its input on to one that does."""
    kind = placement.kinds[user]
    if kind is Kind.PASS:
        # A view of float values is no reader by itself: what reads the view decides.
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
    # One stub for all inputs: it has no state, and its name is the operator's.
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


def refuse_float_operators(placement: Placement, caller: str) -> None:
    """Refuse operators that do not accept their quantized inputs."""
    quantized = _quantized_nodes(placement)
    problems = []
    for node in placement.kinds:
        problem = _problem(node, placement, quantized)
        if problem:
            where = scope_of(node) or "the model"
            problems.append(f"{line_of(node)}: {_name(node, placement)} in {where} {problem}")
    if problems:
        raise ValueError(
            f"{caller}: {problems[0]}"
            + "".join(f"\n{problem}" for problem in problems[1:])
            + "\nOr prepare with hybrid=True, which runs what a BPU does not have on the CPU."
        )


def _problem(node: Node, placement: Placement, quantized: set[Node]) -> str:
    inputs = placement.inputs(node)
    if not quantized.intersection(inputs):
        return ""
    module = placement.module(node)
    if placement.kinds[node] is Kind.CPU and not _takes_quantized(node, module):
        reason = f" ({node.meta['reason']})" if node.meta.get("reason") else ""
        # Where the BPU has a form, a qconfig is the other way out.
        remedy = _REMEDIES.get(node.target, "put a DeQuantStub before it and a QuantStub behind it")
        if module is not None and has_qat_form(module):
            return f"reads quantized values and has no qconfig: give it one, or {remedy}"
        return f"reads quantized values and has no quantized form{reason}: {remedy}"
    if isinstance(module, FloatFunctional | Div | Where) and placement.qconfig(node) is not None:
        values = inputs[1:] if isinstance(module, Where) else inputs
        for value in values:
            source = placement.source(value)
            if value not in quantized and _is_float(source, placement):
                return (
                    f"reads {value.name}, a float tensor ({line_of(source)}), beside quantized "
                    "ones: put a QuantStub behind that, or a DeQuantStub before the others"
                )
    return ""


def _is_float(node: Node, placement: Placement) -> bool:
    """Whether a value is never a quantized tensor, for any input."""
    kind = placement.kinds[node]
    if kind is Kind.DEQUANT:
        return True
    function = _function(node)
    called = kind is Kind.CPU and node.op != "call_module" and function is not getattr
    return called and _is_library(function)


def _takes_quantized(node: Node, module: nn.Module | None) -> bool:
    """Whether an operator without a module of its own may be given quantized tensors."""
    # These make tensors of their input's type before any operator could refuse it.
    if module is not None and layer_class(module, nn.LSTMCell, nn.MultiheadAttention) is not None:
        return False
    if module is not None:
        return (
            has_qat_form(module)
            or keeps_scale(module)
            or layer_class(module, _ConstantPadNd, _ReplicationPadNd) is not None
            or not type(module).__module__.startswith("torch.nn.")
        )
    function = _function(node)
    return function is getattr or not _is_library(function) or rule_of(function) is not None


def _is_library(function: Any) -> bool:
    """Whether a function is torch's or Python's, so that what it does is known."""
    home = getattr(function, "__module__", None) or ""
    return hasattr(function, "__objclass__") or home.partition(".")[0] in (*_LIBRARIES, "")


def _function(node: Node) -> Any:
    """The function that a node calls, as a quantized tensor would see it."""
    target = called_function(node)
    if getattr(target, "__module__", "") == operator.add.__module__:
        name = target.__name__.strip("_")
        return getattr(Tensor, f"__{name}__", target)
    return target


def _quantized_nodes(placement: Placement) -> set[Node]:
    """Nodes whose value is a quantized tensor."""
    found: set[Node] = set()
    for node, kind in placement.kinds.items():
        if node.op in ("placeholder", "get_attr", "output") or kind in (Kind.NUMBER, Kind.DEQUANT):
            continue
        module = placement.module(node)
        reads = not found.isdisjoint(placement.inputs(node))
        if module is not None and has_qat_form(module) and not keeps_scale(module):
            made = kind in (Kind.QUANT, Kind.BPU) and placement.qconfig(node) is not None
        elif module is not None:
            made = reads and keeps_scale(module)
        else:
            function = _function(node)
            keeps = kind is Kind.PASS or function is getattr  # x.T, x.mT
            made = reads and (
                keeps or (rule_of(function) is not None and not gives_plain(function))
            )
        if made:
            found.add(node)
    return found


def _name(node: Node, placement: Placement) -> str:
    module = placement.module(node)
    if module is not None:
        method = f".{node.target}" if node.op == "call_method" else ""
        return f"{type(module).__name__}{method}"
    return str(getattr(node.target, "__name__", node.target))
