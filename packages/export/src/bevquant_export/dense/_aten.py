"""Operators of torch in float, as the layers and functions that the exporter writes.

A captured model calls ``aten.conv2d(x, weight, bias, …)`` where its author wrote a layer: with the
weights, which are constants of the program, the call is that layer again.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from bevquant_export.dense._source import Ref, Step

_CONVS = {f"conv{n}d": getattr(nn, f"Conv{n}d") for n in (1, 2, 3)}
_TRANSPOSED = {f"conv_transpose{n}d": getattr(nn, f"ConvTranspose{n}d") for n in (1, 2, 3)}
_ACTIVATIONS: dict[str, Callable[..., nn.Module]] = {
    "celu": nn.CELU,
    "elu": nn.ELU,
    "gelu": lambda approximate="none": nn.GELU(approximate),
    "hardsigmoid": nn.Hardsigmoid,
    "hardswish": nn.Hardswish,
    "leaky_relu": nn.LeakyReLU,
    "log_sigmoid": nn.LogSigmoid,
    "mish": nn.Mish,
    "selu": nn.SELU,
    "silu": nn.SiLU,
    "softplus": lambda beta=1, threshold=20: nn.Softplus(beta, threshold),
}


def as_layer(step: Step, constants: Mapping[str, Tensor]) -> Step:
    """The step with a module in the place of an operator and its weights; other steps as they are.

    Args:
        step: A step in float that calls an operator.
        constants: Values of the program that are constants.
    """
    if not isinstance(step.function, torch._ops.OpOverload):
        return step
    what = str(step.attributes["what"])
    args = [_constant(a, constants) for a in step.args]
    if any(isinstance(a, _Unknown) for a in args[1:]):
        return step
    layer = _layer(what, args[1:], dict(step.kwargs))
    if layer is not None:
        return replace(step, args=step.args[:1], kwargs={}, function=None, module=layer.eval())
    if what == "layer_norm":
        shape, weight, bias, eps, *_ = _filled(args[1:], ((), None, None, 1e-5))
        return _norm(step, weight, bias, {"dim": list(range(-len(shape), 0)), "eps": eps})
    if what == "instance_norm" and args[5]:  # of the input's own mean and variance
        return _norm(step, args[1], args[2], {"eps": float(args[7])})
    if what == "hardtanh":
        low, high, *_ = _filled(args[1:], (-1.0, 1.0))
        return replace(
            step, args=step.args[:1], kwargs={"min": low, "max": high},
            attributes={**step.attributes, "what": "clamp"},
        )  # fmt: skip
    return step


def _norm(step: Step, weight: Any, bias: Any, kwargs: dict[str, Any]) -> Step:
    named = {"weight": weight, "bias": bias}
    tensors = {name: t for name, t in named.items() if t is not None}
    return replace(step, args=step.args[:1], function=None, kwargs=kwargs, tensors=tensors)


class _Unknown:
    """A value that is no constant."""


def _constant(value: Any, constants: Mapping[str, Tensor]) -> Any:
    if not isinstance(value, Ref):
        return value
    return constants.get(value.name, _Unknown())


def _layer(what: str, rest: list[Any], kwargs: dict[str, Any]) -> nn.Module | None:
    """Operands behind the first one, and named ones, as a module of torch."""
    if what in _ACTIVATIONS:
        return _ACTIVATIONS[what](*rest, **kwargs)
    if kwargs:
        return None
    if what in _CONVS and isinstance(rest[0], Tensor):
        weight, bias, stride, padding, dilation, groups = _filled(rest, (None, None, 1, 0, 1, 1))
        rank = weight.dim() - 2
        made = _CONVS[what](
            weight.shape[1] * groups, weight.shape[0], tuple(weight.shape[2:]),
            _sizes(stride, rank),
            padding if isinstance(padding, str) else _sizes(padding, rank),
            _sizes(dilation, rank), groups, bias is not None, device="meta",
        )  # fmt: skip
        return _with(made, weight=weight, bias=bias)
    if what in _TRANSPOSED and isinstance(rest[0], Tensor):
        weight, bias, stride, padding, more, groups, dilation = _filled(
            rest, (None, None, 1, 0, 0, 1, 1)
        )
        rank = weight.dim() - 2
        made = _TRANSPOSED[what](
            weight.shape[0], weight.shape[1] * groups, tuple(weight.shape[2:]),
            _sizes(stride, rank), _sizes(padding, rank), _sizes(more, rank), groups,
            bias is not None, _sizes(dilation, rank), device="meta",
        )  # fmt: skip
        return _with(made, weight=weight, bias=bias)
    if what == "linear" and isinstance(rest[0], Tensor):
        weight, bias = _filled(rest, (None, None))
        made = nn.Linear(weight.shape[1], weight.shape[0], bias is not None, device="meta")
        return _with(made, weight=weight, bias=bias)
    if what == "batch_norm" and isinstance(rest[2], Tensor) and not rest[4]:
        weight, bias, mean, var = rest[:4]
        norm = nn.BatchNorm2d(len(mean), float(rest[6]), affine=weight is not None, device="meta")
        norm.running_mean, norm.running_var = mean, var
        return _with(norm, weight=weight, bias=bias)
    if what == "group_norm":
        groups, weight, bias, eps, *_ = _filled(rest, (None, None, 1e-5))
        channels = groups if weight is None else len(weight)
        group_norm = nn.GroupNorm(groups, channels, eps, weight is not None, device="meta")
        group_norm.bias = None  # type: ignore[assignment]
        return _with(group_norm, weight=weight, bias=bias)
    if what == "prelu" and isinstance(rest[0], Tensor):
        return _with(nn.PReLU(rest[0].numel(), device="meta"), weight=rest[0])
    return None


def _filled(given: list[Any], defaults: tuple[Any, ...]) -> tuple[Any, ...]:
    return (*given, *defaults[len(given) :])


def _sizes(value: Any, rank: int) -> tuple[int, ...]:
    values = tuple(value) if isinstance(value, list | tuple) else (value,)
    return values * rank if len(values) == 1 else values


def _with(module: nn.Module, **tensors: Tensor | None) -> nn.Module:
    """The module with these parameters, the very same tensors."""
    for name, tensor in tensors.items():
        if tensor is not None:
            setattr(module, name, nn.Parameter(tensor, requires_grad=False))
    return module
