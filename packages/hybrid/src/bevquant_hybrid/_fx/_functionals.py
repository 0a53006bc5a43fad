"""Functions that need a scale of their own become modules that can have one."""

from __future__ import annotations

import operator
from collections import Counter
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from torch.ao.nn import quantized as torch_quantized
from torch.fx import Graph, Node

from bevquant_hybrid._fx._numbers import number_nodes
from bevquant_hybrid._fx._tracer import scope_of
from bevquant_hybrid.nn import _functions as functions
from bevquant_hybrid.nn._division import Div
from bevquant_hybrid.nn._float_functional import FloatFunctional
from bevquant_hybrid.operators import load_support_table, row_of_module
from bevquant_hybrid.partition import place_operator

__all__ = ["mapper_has", "plan_of", "replace_functions"]

_BINARY: dict[Any, str] = {
    **dict.fromkeys((operator.add, operator.iadd, torch.add, "add", "add_"), "add"),
    **dict.fromkeys((operator.sub, operator.isub, torch.sub, "sub", "sub_"), "sub"),
    **dict.fromkeys((operator.mul, operator.imul, torch.mul, "mul", "mul_"), "mul"),
    **dict.fromkeys((operator.truediv, torch.div, torch.true_divide, "div"), "div"),
    **dict.fromkeys((operator.matmul, torch.matmul, torch.bmm, "matmul", "bmm"), "matmul"),
    **dict.fromkeys((torch.maximum, "maximum"), "maximum"),
    **dict.fromkeys((torch.minimum, "minimum"), "minimum"),
}
_REDUCTIONS: dict[Any, str] = {
    **dict.fromkeys((torch.mean, "mean"), "mean"),
    **dict.fromkeys((torch.sum, "sum"), "sum"),
    **dict.fromkeys((torch.cat, torch.concat), "cat"),
}
_SAME_NAME = (  # torch.acos is functions.Acos, and so on
    *("Acos", "Acosh", "Asin", "Asinh", "Atan", "Atanh", "Ceil", "Cos", "Cosh", "Erf", "Exp"),
    *("Floor", "Reciprocal", "Sin", "Sinh", "Sqrt", "Tan"),
)
_MODULES: dict[Any, tuple[str, Callable[..., nn.Module]]] = {
    **dict.fromkeys((torch.sigmoid, F.sigmoid, "sigmoid"), ("sigmoid", nn.Sigmoid)),
    **dict.fromkeys((torch.tanh, F.tanh, "tanh"), ("tanh", nn.Tanh)),
    **dict.fromkeys((torch.log, "log"), ("log", functions.HardLog)),
    **dict.fromkeys((F.selu, torch.selu), ("selu", functions.Selu)),
    **dict.fromkeys((torch.pow, operator.pow, "pow"), ("pow", functions.Pow)),
    **{
        spelling: (name.lower(), getattr(functions, name))
        for name in _SAME_NAME
        for spelling in (getattr(torch, name.lower()), name.lower())
    },
    **dict.fromkeys((F.softmax, torch.softmax, "softmax"), ("softmax", nn.Softmax)),
    F.glu: ("glu", nn.GLU),
    F.silu: ("silu", nn.SiLU),
    F.gelu: ("gelu", nn.GELU),
    F.leaky_relu: ("leaky_relu", nn.LeakyReLU),
    F.elu: ("elu", nn.ELU),
    F.softplus: ("softplus", nn.Softplus),
    F.hardsigmoid: ("hardsigmoid", nn.Hardsigmoid),
    F.hardswish: ("hardswish", nn.Hardswish),
    F.avg_pool2d: ("avg_pool2d", nn.AvgPool2d),
    F.adaptive_avg_pool2d: ("adaptive_avg_pool2d", nn.AdaptiveAvgPool2d),
}
_IGNORED = {"_stacklevel", "inplace"}


def replace_functions(graph: Graph, root: nn.Module, march: str | None = None) -> list[str]:
    """Replace functions in place by calls of new modules of `root`.

    The module of the k-th ``add`` in the forward of ``features.3`` is named
    ``features_3_generated_add_k``; in the model's own forward ``_generated_add_k``. Sizes, and
    functions that a quantized tensor passes through with its scale, stay as they are.

    Args:
        graph: Nodes.
        root: Gets the modules.
        march: Of a hybrid model: functions that its mapper runs on the CPU stay functions.

    Returns:
        The names of the new modules, in the order of execution.
    """
    numbers = number_nodes(graph)
    arithmetic = {
        path for path, m in root.named_modules() if isinstance(m, torch_quantized.FloatFunctional)
    }
    counts: Counter[tuple[str, str]] = Counter()
    names = []
    for node in list(graph.nodes):
        plan = None if node in numbers else plan_of(node, numbers, arithmetic)
        if plan is None:
            continue
        operation, module, method, args, kwargs = plan
        if march is not None and not mapper_has(module, method, march):
            continue
        scope = scope_of(node)
        prefix = scope.replace(".", "_")
        name = f"{prefix}_generated_{operation}_{counts[scope, operation]}"
        counts[scope, operation] += 1
        module.generated_in = scope  # type: ignore[assignment]
        root.add_module(name, module)
        names.append(name)
        with graph.inserting_before(node):
            if method is None:
                made = graph.call_module(name, args, kwargs)
            else:
                owner = graph.get_attr(name)
                owner.meta["scope"] = scope
                made = graph.call_method(method, (owner, *args), kwargs)
        made.meta = dict(node.meta)
        node.replace_all_uses_with(made)
        graph.erase_node(node)
    return names


# Methods of FloatFunctional whose operator goes by another name.
_OPERATORS = {"add_relu": "add", "add_scalar": "add", "mul_scalar": "mul"}


def mapper_has(module: nn.Module, method: str | None, march: str) -> bool:
    """Whether the mapper of a hybrid model runs a module, or a method of it, on the BPU."""
    row = f"torch.{_OPERATORS.get(method, method)}" if method else ""
    row = row or row_of_module(module, load_support_table())
    return place_operator(row, march).place == "BPU"


Plan = tuple[str, nn.Module, str | None, tuple[Any, ...], dict[str, Any]]


def plan_of(node: Node, numbers: set[Node], arithmetic: set[str]) -> Plan | None:
    """What a function is as a module: name, module, method, arguments; None for other nodes.

    Args:
        node: The node.
        numbers: Nodes that hold numbers.
        arithmetic: Paths of the modules whose methods are arithmetic already.
    """
    if node.op not in ("call_function", "call_method"):
        return None
    owner = node.args[0] if node.args else None
    if isinstance(owner, Node) and owner.op == "get_attr" and owner.target in arithmetic:
        return None
    if node.target in _BINARY and len(node.args) == 2 and not node.kwargs:
        return _binary(_BINARY[node.target], node, numbers)
    if node.target in _REDUCTIONS and not set(node.kwargs) - {"dim", "keepdim", "tensors", "input"}:
        operation = _REDUCTIONS[node.target]
        return operation, FloatFunctional(), operation, node.args, dict(node.kwargs)
    if node.target in _MODULES and node.args:
        operation, make = _MODULES[node.target]
        settings = {n: v for n, v in node.kwargs.items() if n not in _IGNORED}
        if any(isinstance(v, Node) for v in (*node.args[1:], *settings.values())):
            return None
        if settings.get("dtype", 0) is None:
            del settings["dtype"]
        return operation, make(*node.args[1:], **settings), None, node.args[:1], {}
    return None


def _binary(operation: str, node: Node, numbers: set[Node]) -> Plan | None:
    tensors = [a for a in node.args if isinstance(a, Node) and a not in numbers]
    if operation == "div":
        first, second = node.args
        if len(tensors) == 1 and isinstance(second, int | float) and second:
            return "mul_scalar", FloatFunctional(), "mul_scalar", (first, 1 / second), {}
        return ("div", Div(), None, node.args, {}) if len(tensors) == 2 else None
    if len(tensors) == 2:
        return operation, FloatFunctional(), operation, node.args, {}
    constant = next((a for a in node.args if isinstance(a, int | float)), None)
    if len(tensors) != 1 or constant is None or operation not in ("add", "mul", "sub"):
        return None
    if operation == "sub":
        if node.args[0] is not tensors[0]:
            return None
        return "add_scalar", FloatFunctional(), "add_scalar", (tensors[0], -constant), {}
    method = f"{operation}_scalar"
    return method, FloatFunctional(), method, (tensors[0], constant), {}
