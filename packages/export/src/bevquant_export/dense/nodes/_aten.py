"""Float ATen operators by name: those that are layers of torch.nn, and nodes for the others.

A captured model calls ``aten.conv2d(x, weight, bias, …)`` where its author wrote a layer. With the
weights, which are constants of the program, the call becomes that layer again.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from bevquant_export.dense._source import Source
from bevquant_export.dense.nodes._graph import Graph
from bevquant_export.dense.nodes._layout_ops import sliced
from bevquant_export.sparse.portable._body import FLOAT
from bevquant_int8sim.program import FloatCall, Ref, Step

Read = Callable[[str], str]

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
_LOWEST = -65504.0  # of half precision, in which engines may compute it


def as_layer(step: FloatCall, constants: Mapping[str, Tensor]) -> FloatCall:
    """The step with a module in place of an operator and its weights; other steps unchanged.

    Args:
        step: A float step that calls an operator.
        constants: Constant values of the program.
    """
    if not isinstance(step.function, torch._ops.OpOverload):
        return step
    what = step.name
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
            name="clamp",
        )  # fmt: skip
    return step


def _norm(step: FloatCall, weight: Any, bias: Any, kwargs: dict[str, Any]) -> FloatCall:
    kwargs = {**kwargs, "weight": weight, "bias": bias}
    return replace(step, args=step.args[:1], function=None, kwargs=kwargs)


class _Unknown:
    """A value that is not constant."""


def _constant(value: Any, constants: Mapping[str, Tensor]) -> Any:
    if not isinstance(value, Ref):
        return value
    return constants.get(value.name, _Unknown())


def _layer(what: str, rest: list[Any], kwargs: dict[str, Any]) -> nn.Module | None:
    """Operands after the first, and named ones, as a module of torch."""
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
    if what == "linear" and isinstance(rest[0], Tensor) and rest[0].dim() == 2:
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
    """The module with these parameters, the same tensor objects."""
    for name, tensor in tensors.items():
        if tensor is not None:
            setattr(module, name, nn.Parameter(tensor, requires_grad=False))
    return module


# Products, sums, clamps and normalizations as nodes


def softmax(
    graph: Graph, path: str, x: str, axis: int, rank: int, operator: str = "Softmax"
) -> str:
    """Softmax or LogSoftmax; before operator set 13 it flattens all axes from its axis on."""
    axis %= rank
    if graph.profile.opset >= 13 or axis == rank - 1:
        return graph.node(operator, path, [x], axis=axis)
    order = list(range(rank))
    order[axis], order[-1] = order[-1], order[axis]
    turned = graph.node("Transpose", path, [x], perm=order)
    made = graph.node(operator, path, [turned], axis=rank - 1)
    return graph.node("Transpose", path, [made], perm=order)


def _reduced(graph: Graph, step: Step, read: Read, source: Source, operator: str) -> str | None:
    found = _axes(step, source)
    if found is None:
        return None
    x, (axes, keep) = read(step.args[0].name), found
    return graph.node(operator, step.path, [x], axes=axes, keepdims=keep)


def _axes(step: Step, source: Source) -> tuple[list[int], int] | None:
    """The reduced axes, and whether they stay with size 1; None for other arguments."""
    given = _given(step, "dim", "keepdim")
    if set(given) - {"dim", "keepdim"}:
        return None
    rank, dim = len(source.shapes[step.args[0].name]), given.get("dim")
    dims = range(rank) if dim is None or dim == () else [dim] if isinstance(dim, int) else dim
    return sorted(d % rank for d in dims), int(bool(given.get("keepdim", False)))


def _given(step: Step, *names: str) -> dict[str, Any]:
    """Arguments after the first, by name; surplus ones by position."""
    rest = step.args[1:]
    surplus = {str(place): value for place, value in enumerate(rest[len(names) :])}
    return {**dict(zip(names, rest, strict=False)), **surplus, **step.kwargs}


def _matmul(graph: Graph, step: Step, read: Read, source: Source) -> str | None:
    if len(step.args) != 2:
        return None
    names = []
    for ref, turned in zip(step.args, ("x_trans", "y_trans"), strict=True):
        name, rank = read(ref.name), len(source.shapes[ref.name])
        if step.kwargs.get(turned):
            order = [*range(rank - 2), rank - 1, rank - 2]
            name = graph.node("Transpose", step.path, [name], perm=order)
        names.append(name)
    return graph.node("MatMul", step.path, names)


def _clamp(graph: Graph, step: Step, read: Read, source: Source) -> str | None:
    given = _given(step, "min", "max")
    low, high = given.get("min"), given.get("max")
    if set(given) - {"min", "max"} or isinstance(low, Ref) or isinstance(high, Ref):
        return None
    limits = ["" if limit is None else _number(graph, limit) for limit in (low, high)]
    inputs = [read(step.args[0].name), *limits]
    return graph.node("Clip", step.path, inputs if limits[1] else inputs[:2])


def _glu(graph: Graph, step: Step, read: Read, source: Source) -> str:
    shape, x = source.shapes[step.args[0].name], read(step.args[0].name)
    axis = int(_given(step, "dim").get("dim", -1)) % len(shape)
    half = shape[axis] // 2
    values = sliced(graph, step.path, x, {axis: (0, half, 1)})
    gates = sliced(graph, step.path, x, {axis: (half, 2 * half, 1)})
    return graph.node("Mul", step.path, [values, graph.node("Sigmoid", step.path, [gates])])


def _guarded_div(graph: Graph, step: Step, read: Read, source: Source) -> str:
    """Division where x/0 is ±top and 0/0 is 0."""
    path, (x, y) = step.path, (read(ref.name) for ref in step.args)
    top, one = (_number(graph, value) for value in (step.kwargs["top"], 1.0))
    zero = graph.node("Equal", path, [y, _number(graph, 0.0)])
    ratio = graph.node("Div", path, [x, graph.node("Where", path, [zero, one, y])])
    top = graph.node("Mul", path, [graph.node("Sign", path, [x]), top])
    return graph.node("Where", path, [zero, top, ratio])


def _layer_norm(graph: Graph, step: Step, read: Read, source: Source) -> str | None:
    """Layer norm in basic operators: LayerNormalization needs operator set 17.

    Axes are ``dim``; torch's function has a shape instead.
    """
    if "dim" not in step.kwargs:
        return None
    path, x = step.path, read(step.args[0].name)
    rank = len(source.shapes[step.args[0].name])
    axes = sorted(d % rank for d in step.kwargs["dim"])
    return _affine(graph, step, _normalized(graph, path, x, axes, step.kwargs["eps"]), 0)


def _instance_norm(graph: Graph, step: Step, read: Read, source: Source) -> str | None:
    if step.target is not None:  # not read by `as_layer`
        return None
    x, shape = read(step.args[0].name), source.shapes[step.args[0].name]
    made = instances(graph, step.path, x, (shape[1], len(shape)), step.kwargs["eps"])
    return _affine(graph, step, made, len(shape) - 2)


def _affine(graph: Graph, step: Step, made: str, axes: int) -> str:
    """Factor and shift of a norm, with `axes` further axes."""
    for name, operator in (("weight", "Mul"), ("bias", "Add")):
        if (tensor := step.kwargs.get(name)) is not None:
            value = tensor.detach().float().cpu().numpy()
            value = value.reshape(*value.shape, *[1] * axes)
            constant = graph.constant(f"{step.path}.{name}", value)
            made = graph.node(operator, step.path, [made, constant])
    return made


def instances(graph: Graph, path: str, x: str, form: tuple[int, int], epsilon: float) -> str:
    """Normalize each row of each channel; `form` holds the numbers of channels and axes."""
    channels, rank = form
    if not graph.profile.fuses_norms:
        return _normalized(graph, path, x, list(range(2, rank)), epsilon)
    constants = [
        graph.constant(f"{name}s_{channels}", np.full(channels, value, np.float32))
        for name, value in (("one", 1), ("zero", 0))
    ]
    return graph.node("InstanceNormalization", path, [x, *constants], epsilon=epsilon)


def _normalized(graph: Graph, path: str, x: str, axes: list[int], epsilon: float) -> str:
    """(x - mean) / √(variance + ε) over some axes."""
    reduced: dict[str, Any] = {"axes": axes, "keepdims": 1}
    deviation = graph.node("Sub", path, [x, graph.node("ReduceMean", path, [x], **reduced)])
    fuses = graph.profile.fuses_norms
    factor = deviation if fuses else graph.node("Abs", path, [deviation])
    square = graph.node("Mul", path, [factor, factor])
    variance = graph.node("ReduceMean", path, [square], **reduced)
    constant = graph.constant(f"{path}.eps", epsilon)
    spread = graph.node("Sqrt", path, [graph.node("Add", path, [variance, constant])])
    return graph.node("Div", path, [deviation, spread])


def _attention(graph: Graph, step: Step, read: Read, source: Source) -> str | None:
    """softmax(q·kᵀ·s + mask)·v, with s = 1/√d by default.

    A boolean mask becomes the lowest number at masked places, which gives 0 after the softmax.
    Fully masked rows are zero, as in torch.
    """
    given = _given(step, "key", "value", "attn_mask", "dropout_p", "is_causal")
    operands = [step.args[0], given.pop("key"), given.pop("value")]
    mask, scale = given.pop("attn_mask", None), given.pop("scale", None)
    causal = given.pop("is_causal", False)
    if given.pop("enable_gqa", False) or given.pop("dropout_p", 0):
        return None
    if given or not all(isinstance(ref, Ref) for ref in operands):
        return None
    path, (q, k, v) = step.path, (read(ref.name) for ref in operands)
    shape = source.shapes[operands[0].name]
    rank = len(shape)
    counts = [source.named(ref.name)[-2] for ref in operands[:2]]
    if causal and any(isinstance(count, str) for count in counts):
        return None  # the mask is as large as the frame
    order = [*range(rank - 2), rank - 1, rank - 2]
    scale = 1 / math.sqrt(shape[-1]) if scale is None else float(scale)
    q = graph.node("Mul", path, [q, _number(graph, scale)])
    made = graph.node("MatMul", path, [q, graph.node("Transpose", path, [k], perm=order)])
    shut = None
    if causal:
        later = np.triu(np.full([int(count) for count in counts], _LOWEST, np.float32), 1)
        made = graph.node("Add", path, [made, graph.constant(f"{path}.causal".lstrip("."), later)])
    elif mask is not None and source.dtype(mask.name) == torch.bool:
        shut = read(mask.name)
        made = graph.node("Where", path, [shut, made, _number(graph, _LOWEST)])
    elif mask is not None:
        made = graph.node("Add", path, [made, read(mask.name)])
    made = softmax(graph, path, made, -1, rank)
    if shut is not None:
        seen, last = graph.node("Cast", path, [shut], to=FLOAT), len(source.shapes[mask.name]) - 1
        seen = graph.node("ReduceMax", path, [seen], axes=[last], keepdims=1)
        made = graph.node("Mul", path, [made, seen])
    return graph.node("MatMul", path, [made, v])


def _number(graph: Graph, value: float) -> str:
    return graph.constant(f"float_{value:g}", np.float32(value))


NAMED: dict[str, Callable[[Graph, Step, Read, Source], str | None]] = {
    "clamp": _clamp,
    "glu": _glu,
    "guarded_div": _guarded_div,
    "instance_norm": _instance_norm,
    "layer_norm": _layer_norm,
    "scaled_dot_product_attention": _attention,
    **dict.fromkeys(("matmul", "bmm", "mm"), _matmul),
    "mean": partial(_reduced, operator="ReduceMean"),
    "sum": partial(_reduced, operator="ReduceSum"),
}
