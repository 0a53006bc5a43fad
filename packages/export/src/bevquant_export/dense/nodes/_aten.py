"""Nodes of float operators: a function for each, with the arguments of torch's operator.

`Ref`s are computed operands; weights are tensors and settings are numbers. A function returns None
where its operator has no form with these arguments.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping
from functools import partial
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from bevquant_export.dense.nodes._at import At, Form
from bevquant_export.voxels._body import FLOAT
from bevquant_graph import zero_padding
from bevquant_int8sim.program import Ref

_LOWEST = -65504.0  # of half precision, in which engines may compute it
_LINEAR_FROM = 15.0  # where softplus is its argument to the last bit of float32


def plain(operator: str) -> Form:
    """ONNX's function of one tensor."""
    return lambda at, x: at.node(operator, x)


# Activations. Operator set 11 has no Celu, Gelu, HardSwish and Mish that runtimes accept, so these
# are written in basic operators.


def _gelu(at: At, x: Ref, approximate: str = "none") -> str:
    half = at.node("Mul", x, 0.5)
    if approximate == "none":
        erf = at.node("Erf", at.node("Mul", x, math.sqrt(0.5)))
        return at.node("Mul", half, at.node("Add", erf, 1.0))
    cube = at.node("Mul", at.node("Mul", at.node("Mul", x, x), x), 0.044715)
    inner = at.node("Mul", at.node("Add", x, cube), math.sqrt(2 / math.pi))
    return at.node("Mul", half, at.node("Add", at.node("Tanh", inner), 1.0))


def _hardsigmoid(at: At, x: Ref) -> str:
    return at.node("HardSigmoid", x, alpha=1 / 6, beta=0.5)


def _softplus(at: At, x: Ref, beta: float = 1.0, threshold: float = 20.0) -> str | None:
    # Beyond its threshold torch returns x, as Softplus does to the last bit from 15 on.
    if threshold < _LINEAR_FROM:
        return None
    if beta == 1:
        return at.node("Softplus", x)
    return at.node("Div", at.node("Softplus", at.node("Mul", x, float(beta))), float(beta))


def _prelu(at: At, x: Ref, weight: Tensor) -> str:
    name, axes = at.name(x), len(at.shape(x)) - 2
    slope = weight.reshape(-1, *[1] * axes) if weight.numel() > 1 else weight  # along axis 1
    return at.node("PRelu", name, at.parameter("weight", slope))


# Layers with float weights


def _conv(
    at: At, x: Ref, weight: Tensor, bias: Tensor | None = None, stride: Any = 1, padding: Any = 0,
    dilation: Any = 1, groups: int = 1,
) -> str:  # fmt: skip
    settings = _windows(weight, stride, dilation, groups)
    sizes = padding if isinstance(padding, str) else _sizes(padding, weight.dim() - 2)
    kernel, steps = settings["kernel_shape"], settings["dilations"]
    window = SimpleNamespace(padding=sizes, dilation=steps, kernel_size=kernel)
    before, after = zip(*zero_padding(window), strict=True)
    inputs = [at.graph.float_operand(at.path, at.name(x)), *at.parameters(weight=weight, bias=bias)]
    return at.node("Conv", *inputs, pads=[*before, *after], **settings)


def _conv_transpose(
    at: At, x: Ref, weight: Tensor, bias: Tensor | None = None, stride: Any = 1, padding: Any = 0,
    output_padding: Any = 0, groups: int = 1, dilation: Any = 1,
) -> str:  # fmt: skip
    pads, more = (_sizes(value, weight.dim() - 2) for value in (padding, output_padding))
    inputs = [at.graph.float_operand(at.path, at.name(x)), *at.parameters(weight=weight, bias=bias)]
    return at.node(
        "ConvTranspose", *inputs, pads=pads * 2, output_padding=more,
        **_windows(weight, stride, dilation, groups),
    )  # fmt: skip


def _windows(weight: Tensor, stride: Any, dilation: Any, groups: int) -> dict[str, Any]:
    rank = weight.dim() - 2
    return {
        "strides": _sizes(stride, rank), "dilations": _sizes(dilation, rank),
        "group": groups, "kernel_shape": list(weight.shape[2:]),
    }  # fmt: skip


def _sizes(value: Any, rank: int) -> list[int]:
    values = list(value) if isinstance(value, list | tuple) else [value]
    return values * rank if len(values) == 1 else values


def _linear(at: At, x: Ref, weight: Tensor, bias: Tensor | None = None) -> str | None:
    if weight.dim() != 2:
        return None
    name = at.name(x)
    if len(at.shape(x)) == 2:
        name = at.graph.float_operand(at.path, name)
        return at.node("Gemm", name, *at.parameters(weight=weight, bias=bias), transB=1)
    # A Gemm takes two axes alone.
    made = at.node("MatMul", name, at.parameter("weight", weight.t()))
    return made if bias is None else at.node("Add", made, at.parameter("bias", bias))


# Norms


def _batch_norm(
    at: At, x: Ref, weight: Tensor | None, bias: Tensor | None, running_mean: Tensor | None,
    running_var: Tensor | None, training: bool = False, momentum: float = 0.1, eps: float = 1e-5,
    cudnn_enabled: bool = False,
) -> str | None:  # fmt: skip
    if training or running_mean is None:
        return None
    name, count = at.name(x), len(running_mean)
    inputs = at.parameters(
        weight=torch.ones(count) if weight is None else weight,
        bias=torch.zeros(count) if bias is None else bias,
        running_mean=running_mean, running_var=running_var,
    )  # fmt: skip
    return at.node("BatchNormalization", name, *inputs, epsilon=float(eps))


def _group_norm(
    at: At, x: Ref, num_groups: int, weight: Tensor | None = None, bias: Tensor | None = None,
    eps: float = 1e-5, cudnn_enabled: bool = True,
) -> str | None:  # fmt: skip
    """Normalize the values of each group as one row, then apply factor and shift."""
    # The Reshape back infers one free size alone.
    if at.free(x) > 1:
        return None
    rows = at.node("Reshape", at.name(x), [0, num_groups, -1])
    made = _instances(at, rows, num_groups, 3, float(eps))
    made = at.node("Reshape", made, at.source.target(at.path, x.name))
    return _affine(at, made, weight, bias, len(at.shape(x)) - 2)


def _instance_norm(
    at: At, x: Ref, weight: Tensor | None, bias: Tensor | None, running_mean: Tensor | None,
    running_var: Tensor | None, use_input_stats: bool, momentum: float, eps: float,
    cudnn_enabled: bool,
) -> str | None:  # fmt: skip
    if not use_input_stats:
        return None
    shape = at.shape(x)
    made = _instances(at, at.name(x), shape[1], len(shape), float(eps))
    return _affine(at, made, weight, bias, len(shape) - 2)


def _layer_norm(
    at: At, x: Ref, normalized_shape: Any, weight: Tensor | None = None,
    bias: Tensor | None = None, eps: float = 1e-5, cudnn_enable: bool = True,
) -> str:  # fmt: skip
    axes = range(-len(normalized_shape), 0)
    return _axes_norm(at, x, dim=axes, eps=eps, weight=weight, bias=bias)


def _axes_norm(
    at: At, x: Ref, *, dim: Collection[int], eps: float, weight: Any = None, bias: Any = None
) -> str:
    """Layer norm in basic operators: LayerNormalization needs operator set 17."""
    axes = sorted(axis % len(at.shape(x)) for axis in dim)
    return _affine(at, _normalized(at, at.name(x), axes, eps), weight, bias, 0)


def _affine(at: At, made: str, weight: Tensor | None, bias: Tensor | None, axes: int) -> str:
    """Factor and shift of a norm, with `axes` further axes."""
    for name, operator, tensor in (("weight", "Mul", weight), ("bias", "Add", bias)):
        if tensor is not None:
            value = tensor.reshape(*tensor.shape, *[1] * axes)
            made = at.node(operator, made, at.parameter(name, value))
    return made


def _instances(at: At, x: str, channels: int, rank: int, epsilon: float) -> str:
    """Normalize each row of each channel."""
    if not at.graph.profile.fuses_norms:
        return _normalized(at, x, list(range(2, rank)), epsilon)
    constants = [
        at.graph.constant(f"{name}s_{channels}", np.full(channels, value, np.float32))
        for name, value in (("one", 1), ("zero", 0))
    ]
    return at.node("InstanceNormalization", x, *constants, epsilon=epsilon)


def _normalized(at: At, x: str, axes: list[int], epsilon: float) -> str:
    """(x - mean) / √(variance + ε) over some axes."""
    reduced: dict[str, Any] = {"axes": axes, "keepdims": 1}
    deviation = at.node("Sub", x, at.node("ReduceMean", x, **reduced))
    # |x|·|x| is no norm to OpenVINO, which would not scale ε for integers.
    factor = deviation if at.graph.profile.fuses_norms else at.node("Abs", deviation)
    variance = at.node("ReduceMean", at.node("Mul", factor, factor), **reduced)
    spread = at.node("Sqrt", at.node("Add", variance, at.parameter("eps", epsilon)))
    return at.node("Div", deviation, spread)


# Products, sums and clamps


def softmax(operator: str, at: At, x: Any, dim: int | None = None, *more: Any, **_: Any) -> Any:
    """Softmax or LogSoftmax; before operator set 13 it flattens all axes from its axis on."""
    if dim is None:
        return None
    return _along(operator, at, at.name(x), int(dim), len(at.shape(x)))


def _along(operator: str, at: At, x: str, axis: int, rank: int) -> str:
    axis %= rank
    if at.graph.profile.opset >= 13 or axis == rank - 1:
        return at.node(operator, x, axis=axis)
    order = list(range(rank))
    order[axis], order[-1] = order[-1], order[axis]
    turned = at.node("Transpose", x, perm=order)
    return at.node("Transpose", at.node(operator, turned, axis=rank - 1), perm=order)


def _reduced(operator: str, at: At, x: Ref, dim: Any = None, keepdim: Any = False) -> str:
    rank = len(at.shape(x))
    dims = range(rank) if dim is None or dim == () else [dim] if isinstance(dim, int) else dim
    axes = sorted(d % rank for d in dims)
    return at.node(operator, x, axes=axes, keepdims=int(bool(keepdim)))


def _matmul(at: At, x: Ref, y: Ref, *, x_trans: bool = False, y_trans: bool = False) -> str:
    names = []
    for ref, turned in ((x, x_trans), (y, y_trans)):
        rank = len(at.shape(ref))
        order = [*range(rank - 2), rank - 1, rank - 2]
        names.append(at.node("Transpose", ref, perm=order) if turned else at.name(ref))
    return at.node("MatMul", *names)


def _clamp(at: At, x: Ref, min: Any = None, max: Any = None) -> str | None:
    if isinstance(min, Ref) or isinstance(max, Ref):
        return None
    limits = ["" if limit is None else at.name(limit) for limit in (min, max)]
    return at.node("Clip", x, *(limits if limits[1] else limits[:1]))


def _glu(at: At, x: Ref, dim: int = -1) -> str:
    shape, name = at.shape(x), at.name(x)
    axis = int(dim) % len(shape)
    half = shape[axis] // 2
    values = at.sliced(name, {axis: (0, half, 1)})
    gates = at.sliced(name, {axis: (half, 2 * half, 1)})
    return at.node("Mul", values, at.node("Sigmoid", gates))


def _guarded_div(at: At, x: Ref, y: Ref, *, top: float) -> str:
    """Division where x/0 is ±top and 0/0 is 0."""
    zero = at.node("Equal", y, 0.0)
    ratio = at.node("Div", x, at.node("Where", zero, 1.0, y))
    return at.node("Where", zero, at.node("Mul", at.node("Sign", x), top), ratio)


def _attention(
    at: At, query: Any, key: Any, value: Any, attn_mask: Ref | None = None, dropout_p: float = 0.0,
    is_causal: bool = False, *, scale: float | None = None, enable_gqa: bool = False,
) -> str | None:  # fmt: skip
    """softmax(q·kᵀ·s + mask)·v, with s = 1/√d by default."""
    operands = (query, key, value)
    if enable_gqa or dropout_p or not all(isinstance(ref, Ref) for ref in operands):
        return None
    q, k, v = map(at.name, operands)
    shape, source = at.shape(query), at.source
    rank = len(shape)
    counts = [source.named(ref.name)[-2] for ref in operands[:2]]
    if is_causal and any(isinstance(count, str) for count in counts):
        return None  # the mask is as large as the frame
    scale = 1 / math.sqrt(shape[-1]) if scale is None else float(scale)
    q = at.node("Mul", q, scale)
    made = at.node(
        "MatMul", q, at.node("Transpose", k, perm=[*range(rank - 2), rank - 1, rank - 2])
    )
    shut = None
    if is_causal:
        later = np.triu(np.full([int(count) for count in counts], _LOWEST, np.float32), 1)
        made = at.node("Add", made, at.graph.constant(f"{at.path}.causal".lstrip("."), later))
    elif attn_mask is not None and source.dtype(attn_mask.name) == torch.bool:
        shut = at.name(attn_mask)
        # The lowest number gives 0 after the softmax.
        made = at.node("Where", shut, made, _LOWEST)
    elif attn_mask is not None:
        made = at.node("Add", made, attn_mask)
    made = _along("Softmax", at, made, -1, rank)
    # Fully masked rows are zero, as in torch.
    if shut is not None and attn_mask is not None:
        seen, last = at.node("Cast", shut, to=FLOAT), len(at.shape(attn_mask)) - 1
        made = at.node("Mul", made, at.node("ReduceMax", seen, axes=[last], keepdims=1))
    return at.node("MatMul", made, v)


# Operators whose weights are constants, and modules of torch.
LAYERS: Mapping[str, Form] = {
    "celu": lambda at, x, alpha=1.0: at.node(
        "Mul", at.node("Elu", at.node("Div", x, alpha)), alpha
    ),
    "elu": lambda at, x, alpha=1.0: at.node("Elu", x, alpha=float(alpha)),
    "gelu": _gelu,
    "hardsigmoid": _hardsigmoid,
    "hardswish": lambda at, x: at.node("Mul", x, _hardsigmoid(at, x)),
    "leaky_relu": lambda at, x, negative_slope=0.01: at.node(
        "LeakyRelu", x, alpha=float(negative_slope)
    ),
    "log_sigmoid": lambda at, x: at.node("Neg", at.node("Softplus", at.node("Neg", x))),
    "mish": lambda at, x: at.node("Mul", x, at.node("Tanh", at.node("Softplus", x))),
    "selu": plain("Selu"),
    "silu": lambda at, x: at.node("Mul", x, at.node("Sigmoid", x)),
    "prelu": _prelu, "softplus": _softplus, "linear": _linear, "batch_norm": _batch_norm,
    "group_norm": _group_norm, "instance_norm": _instance_norm, "layer_norm": _layer_norm,
    **{f"conv{n}d": _conv for n in (1, 2, 3)},
    **{f"conv_transpose{n}d": _conv_transpose for n in (1, 2, 3)},
}  # fmt: skip
NAMED: Mapping[str, Form] = {
    "clamp": _clamp, "glu": _glu, "guarded_div": _guarded_div, "layer_norm": _axes_norm,
    "scaled_dot_product_attention": _attention,
    **dict.fromkeys(("matmul", "bmm", "mm"), _matmul),
    "mean": partial(_reduced, "ReduceMean"), "sum": partial(_reduced, "ReduceSum"),
    "softmax": partial(softmax, "Softmax"), "log_softmax": partial(softmax, "LogSoftmax"),
}  # fmt: skip
