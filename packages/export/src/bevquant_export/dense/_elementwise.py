"""Functions of single elements, by modules of torch and by name."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from bevquant_export.dense._graph import Graph
from bevquant_graph import layer_class

__all__ = ["elementwise", "unary"]

_UNARY = {
    "abs": "Abs", "acos": "Acos", "acosh": "Acosh", "asin": "Asin", "asinh": "Asinh",
    "atan": "Atan", "atanh": "Atanh", "ceil": "Ceil", "cos": "Cos", "cosh": "Cosh", "erf": "Erf",
    "exp": "Exp", "floor": "Floor", "log": "Log", "neg": "Neg", "reciprocal": "Reciprocal",
    "selu": "Selu", "sigmoid": "Sigmoid", "sigmoid_": "Sigmoid", "sin": "Sin", "sinh": "Sinh",
    "sqrt": "Sqrt", "tan": "Tan", "tanh": "Tanh",
}  # fmt: skip
_LINEAR_FROM = 15.0  # where softplus is its argument to the last bit of float32


def unary(graph: Graph, path: str, x: str, what: str) -> str | None:
    """The function of this name; ``None`` where there is none."""
    return graph.node(_UNARY[what], path, [x]) if what in _UNARY else None


def elementwise(graph: Graph, path: str, x: str, module: Any, rank: int) -> str | None:
    """Nodes of an activation; ``None`` where it is not on the list.

    Operator set 11 has no Celu, Gelu, HardSwish and Mish that runtimes would take: these are the
    operators that they consist of.

    Args:
        graph: Where nodes are added.
        path: Module.
        x: Its input.
        module: The activation.
        rank: Axes of the input.
    """
    cls = layer_class(module)
    make = None if cls is None else _MADE.get(cls)
    return None if make is None else make(_At(graph, path, x, rank), module)


class _At:
    """Where nodes are added, and what they read."""

    def __init__(self, graph: Graph, path: str, x: str, rank: int) -> None:
        self.graph, self.path, self.x, self.rank = graph, path, x, rank

    def node(self, operator: str, *inputs: str | float, **attributes: Any) -> str:
        """Add a node; numbers among its inputs are constants."""
        names = [
            name if isinstance(name, str) else self.graph.constant(f"float_{name:g}", name)
            for name in inputs
        ]
        return self.graph.node(operator, self.path, names, **attributes)


def _plain(operator: str) -> Callable[[_At, Any], str]:
    return lambda at, module: at.node(operator, at.x)


def _celu(at: _At, module: Any) -> str:
    alpha = float(module.alpha)
    return at.node("Mul", at.node("Elu", at.node("Div", at.x, alpha)), alpha)


def _gelu(at: _At, module: Any) -> str:
    half = at.node("Mul", at.x, 0.5)
    if module.approximate == "none":
        return at.node(
            "Mul", half, at.node("Add", at.node("Erf", at.node("Mul", at.x, math.sqrt(0.5))), 1.0)
        )
    cube = at.node("Mul", at.node("Mul", at.node("Mul", at.x, at.x), at.x), 0.044715)
    inner = at.node("Mul", at.node("Add", at.x, cube), math.sqrt(2 / math.pi))
    return at.node("Mul", half, at.node("Add", at.node("Tanh", inner), 1.0))


def _hardsigmoid(at: _At) -> str:
    return at.node("HardSigmoid", at.x, alpha=1 / 6, beta=0.5)


def _softplus(at: _At, x: str) -> str:
    return at.node("Softplus", x)


def _log_sigmoid(at: _At, module: Any) -> str:
    return at.node("Neg", _softplus(at, at.node("Neg", at.x)))


def _mish(at: _At, module: Any) -> str:
    return at.node("Mul", at.x, at.node("Tanh", _softplus(at, at.x)))


def _general_softplus(at: _At, module: Any) -> str | None:
    if module.threshold < _LINEAR_FROM:
        return None
    if module.beta == 1:
        return _softplus(at, at.x)
    beta = float(module.beta)
    return at.node("Div", _softplus(at, at.node("Mul", at.x, beta)), beta)


def _prelu(at: _At, module: Any) -> str:
    slope: torch.Tensor = module.weight.detach().float().cpu()
    if slope.numel() > 1:  # along axis 1
        slope = slope.reshape(-1, *[1] * (at.rank - 2))
    return at.node("PRelu", at.x, at.graph.constant(f"{at.path}.weight", slope.numpy()))


_MADE: dict[type[nn.Module], Callable[[_At, Any], str | None]] = {
    nn.CELU: _celu,
    nn.ELU: lambda at, module: at.node("Elu", at.x, alpha=float(module.alpha)),
    nn.GELU: _gelu,
    nn.Hardsigmoid: lambda at, module: _hardsigmoid(at),
    nn.Hardswish: lambda at, module: at.node("Mul", at.x, _hardsigmoid(at)),
    nn.LeakyReLU: lambda at, module: at.node("LeakyRelu", at.x, alpha=float(module.negative_slope)),
    nn.LogSigmoid: _log_sigmoid,
    nn.Mish: _mish,
    nn.PReLU: _prelu,
    nn.SELU: _plain("Selu"),
    nn.SiLU: lambda at, module: at.node("Mul", at.x, at.node("Sigmoid", at.x)),
    nn.Sigmoid: _plain("Sigmoid"),
    nn.Softplus: _general_softplus,
    nn.Tanh: _plain("Tanh"),
}
