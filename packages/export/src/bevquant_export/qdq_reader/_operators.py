"""ONNX operators (opsets 13 to 26) as functions of torch.

A value is a tensor, or a numpy array where it is known without data: constants of the file, and
sizes. Sizes are arrays of objects, which hold torch's symbolic integers. Operators on arrays alone
compute in numpy, so that ``Shape → Gather → Concat → Reshape`` leaves sizes open.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Callable
from functools import reduce
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

Function = Callable[..., Any]
OPERATORS: dict[str, Function] = {}
"""Operator to its function: inputs by position (None where left out), attributes by name."""

VALUES_KEPT = frozenset(
    "Identity Dropout Reshape Transpose Flatten Squeeze Unsqueeze Slice Split MaxPool Relu "
    "DepthToSpace SpaceToDepth Expand Tile".split()
)
"""Operators of one tensor whose results are values of it: integers keep their scale."""

_TYPES = {
    1: torch.float32, 2: torch.uint8, 3: torch.int8, 5: torch.int16, 6: torch.int32,
    7: torch.int64, 9: torch.bool, 10: torch.float32, 11: torch.float32, 16: torch.float32,
}  # fmt: skip
"""Types of ``Cast``; every float is held in float32."""


def tensor(value: Any) -> Any:
    """A value as a tensor; None where it is left out."""
    if value is None or isinstance(value, Tensor):
        return value
    if value.dtype == object:
        return torch.stack([torch.as_tensor(v) for v in value.ravel()]).reshape(value.shape)
    return torch.from_numpy(np.array(value))  # a copy: those of a file cannot be written to


def of_sizes(value: Tensor, sizes: list[int]) -> Tensor:
    """The value, of the file's sizes; 0 is any size."""
    if value.ndim != len(sizes) or any(
        n and m != n for m, n in zip(value.shape, sizes, strict=True)
    ):
        raise ValueError(
            f"expected the file's sizes {sizes} (0 is any size), got {list(value.shape)}. Give "
            "inputs of these sizes, or write the file with open sizes"
        )
    return value


def numbers(value: Any, what: str) -> list[Any]:
    """A known value as a list of numbers."""
    if isinstance(value, Tensor):
        raise ValueError(
            f"{what} is computed from data; expected a constant or a size. Simplify the file "
            "(onnxsim, onnxslim) or cut the model before this node"
        )
    return list(np.asarray(value).ravel())


def _integers(value: Any, what: str) -> list[Any]:
    return [n if isinstance(n, torch.SymInt) else int(n) for n in numbers(value, what)]


def op(*names: str) -> Callable[[Function], Function]:
    """Register a function for these operators."""

    def register(function: Function) -> Function:
        OPERATORS.update(dict.fromkeys(names, function))
        return function

    return register


def _known(*values: Any) -> bool:
    return not any(isinstance(value, Tensor) for value in values)


def _both(ours: Function, numpy: Function) -> Function:
    def call(*values: Any, **settings: Any) -> Any:
        if _known(*values):
            return np.asarray(numpy(*values, **settings))
        return ours(*map(tensor, values), **settings)

    return call


def _each(ours: Function, of_number: Function) -> Function:
    """A function of one tensor that exporters apply to sizes too."""
    return _both(ours, lambda x: np.vectorize(of_number, otypes=[x.dtype])(x))


def _divide(x: Tensor, y: Tensor) -> Tensor:
    whole = not (x.is_floating_point() or y.is_floating_point())
    return torch.div(x, y, rounding_mode="trunc" if whole else None)


def _divide_sizes(x: Any, y: Any) -> Any:
    return np.floor_divide(x, y) if x.dtype == object or x.dtype.kind == "i" else np.divide(x, y)


OPERATORS |= {
    "Add": _both(torch.add, np.add),
    "Sub": _both(torch.sub, np.subtract),
    "Mul": _both(torch.mul, np.multiply),
    "Div": _both(_divide, _divide_sizes),
    "Pow": _both(torch.pow, np.power),
    "Mod": _both(
        lambda x, y, fmod=0: (torch.fmod if fmod else torch.remainder)(x, y),
        lambda x, y, fmod=0: (np.fmod if fmod else np.mod)(x, y),
    ),
    "Equal": _both(torch.eq, np.equal),
    "Greater": _both(torch.gt, np.greater),
    "GreaterOrEqual": _both(torch.ge, np.greater_equal),
    "Less": _both(torch.lt, np.less),
    "LessOrEqual": _both(torch.le, np.less_equal),
    "And": _both(torch.logical_and, np.logical_and),
    "Or": _both(torch.logical_or, np.logical_or),
    "Xor": _both(torch.logical_xor, np.logical_xor),
    "Where": _both(torch.where, np.where),
    "Max": lambda *x: reduce(torch.maximum, map(tensor, x)),
    "Min": lambda *x: reduce(torch.minimum, map(tensor, x)),
    "Sum": lambda *x: reduce(torch.add, map(tensor, x)),
    "Mean": lambda *x: reduce(torch.add, map(tensor, x)) / len(x),
    "MatMul": lambda x, y: torch.matmul(tensor(x), tensor(y)),
    "Identity": lambda x: x,
    "Relu": F.relu,
    "Sigmoid": torch.sigmoid,
    "Tanh": torch.tanh,
    "Erf": torch.erf,
    "Exp": torch.exp,
    "Log": torch.log,
    "Sqrt": _each(torch.sqrt, torch.sym_sqrt),
    "Abs": _each(torch.abs, abs),
    "Neg": _both(torch.neg, np.negative),
    "Reciprocal": _both(torch.reciprocal, np.reciprocal),
    "Floor": _each(torch.floor, math.floor),
    "Ceil": _each(torch.ceil, math.ceil),
    "Round": _each(torch.round, round),
    "Sign": torch.sign,
    "Sin": torch.sin,
    "Cos": torch.cos,
    "Tan": torch.tan,
    "Asin": torch.asin,
    "Acos": torch.acos,
    "Atan": torch.atan,
    "Sinh": torch.sinh,
    "Cosh": torch.cosh,
    "IsNaN": torch.isnan,
    "Swish": lambda x, alpha=1.0: x * torch.sigmoid(alpha * x),
    "Celu": lambda x, alpha=1.0: F.celu(x, alpha),
    "ThresholdedRelu": lambda x, alpha=1.0: F.threshold(x, alpha, 0.0),
    "Not": torch.logical_not,
    "HardSwish": F.hardswish,
    "Mish": F.mish,
    "Softplus": F.softplus,
    "Softsign": F.softsign,
    "Selu": lambda x, alpha=1.67326319217681884765625, gamma=1.05070102214813232421875: (
        gamma * F.elu(x, alpha)
    ),
    "Elu": lambda x, alpha=1.0: F.elu(x, alpha),
    "Gelu": lambda x, approximate="none": F.gelu(x, approximate=approximate),
    "LeakyRelu": lambda x, alpha=0.01: F.leaky_relu(x, alpha),
    "PRelu": lambda x, slope: torch.where(x >= 0, x, tensor(slope) * x),
    "HardSigmoid": lambda x, alpha=0.2, beta=0.5: torch.clamp(alpha * x + beta, 0, 1),
    "Softmax": lambda x, axis=-1: torch.softmax(x, axis),
    "LogSoftmax": lambda x, axis=-1: torch.log_softmax(x, axis),
    "Einsum": lambda *x, equation: torch.einsum(equation, *map(tensor, x)),
    "GlobalAveragePool": lambda x: _pooled(x),
    "GlobalMaxPool": lambda x: x.amax(tuple(range(2, x.dim())), keepdim=True),
    "GatherElements": lambda x, index, axis=0: torch.gather(x, axis, tensor(index)),
    "CumSum": lambda x, axis, **flags: _running_sum(x, _integers(axis, "axis")[0], **flags),
    "Size": lambda x: np.array(math.prod(x.shape), dtype=object),
}


def _running_sum(x: Tensor, axis: int, exclusive: int = 0, reverse: int = 0) -> Tensor:
    values = x.flip(axis) if reverse else x
    sums = values.cumsum(axis, dtype=x.dtype) - (values if exclusive else 0)
    return sums.flip(axis) if reverse else sums


def _pooled(x: Tensor) -> Tensor:
    """The mean over all axes of the grid, in the form that has integers."""
    made: Tensor = getattr(F, f"adaptive_avg_pool{x.dim() - 2}d")(x, 1)
    return made


@op("Dropout")
def _dropout(x: Tensor, ratio: Any = None, training: Any = None, seed: int = 0) -> Tensor:
    if training is not None and numbers(training, "training_mode")[0]:
        raise ValueError("training_mode=1; expected 0: export the model in evaluation mode")
    return x


@op("Clip")
def _clip(x: Tensor, low: Any = None, high: Any = None) -> Tensor:
    bottom, top = (None if v is None else float(numbers(v, "min, max")[0]) for v in (low, high))
    top = None if top is not None and top >= torch.finfo(torch.float32).max else top
    if bottom == 0 and (top is None or top > 0):
        return F.relu(x) if top is None else F.hardtanh(x, 0.0, top)
    return x if bottom is None and top is None else torch.clamp(x, bottom, top)


@op("Gemm")
def _gemm(
    a: Any, b: Any, c: Any = None, alpha: float = 1.0, beta: float = 1.0, transA: int = 0,
    transB: int = 0,
) -> Tensor:  # fmt: skip
    a, b = tensor(a), tensor(b)
    product = (a.t() if transA else a) @ (b.t() if transB else b) * alpha
    made: Tensor = product if c is None else product + beta * tensor(c)
    return made


# Shape and order


@op("Shape")
def _shape(x: Any, start: int = 0, end: int | None = None) -> Any:
    sizes = list(x.shape)[start:end]
    made = np.empty(len(sizes), dtype=object)
    made[:] = sizes
    return made


@op("Cast")
def _cast(x: Any, to: int, **_: Any) -> Any:
    if to not in _TYPES:
        raise ValueError(f"type {to}; expected a float, an integer up to 64 bits or bool")
    if _known(x):
        kind = np.dtype(str(_TYPES[to]).removeprefix("torch."))
        return x if x.dtype == object and kind.kind == "i" else x.astype(kind)
    rounds = {10: torch.float16, 16: torch.bfloat16}  # which a value keeps in float32
    return x.to(rounds[to]).float() if to in rounds else x.to(_TYPES[to])


@op("CastLike")
def _cast_like(x: Any, like: Any, **_: Any) -> Any:
    return x.to(like.dtype) if isinstance(x, Tensor) else x.astype(np.asarray(like).dtype)


@op("Reshape")
def _reshape(x: Any, shape: Any, allowzero: int = 0) -> Any:
    sizes = _integers(shape, "shape")
    if not allowzero:
        sizes = [x.shape[i] if n == 0 else n for i, n in enumerate(sizes)]
    return x.reshape(sizes)


@op("Flatten")
def _flatten(x: Tensor, axis: int = 1) -> Tensor:
    if axis == 1:
        return x.flatten(1)
    return x.reshape(math.prod(x.shape[: axis % (x.dim() + 1)]), -1)


@op("Transpose")
def _transpose(x: Any, perm: Any = None) -> Any:
    order = list(range(x.ndim))[::-1] if perm is None else list(perm)
    return x.permute(order) if isinstance(x, Tensor) else x.transpose(order)


@op("Squeeze")
def _squeeze(x: Any, axes: Any = None) -> Any:
    given = None if axes is None else tuple(_integers(axes, "axes"))
    if isinstance(x, Tensor):
        return x.squeeze() if given is None else x.squeeze(given)
    return np.squeeze(x, given)


@op("Unsqueeze")
def _unsqueeze(x: Any, axes: Any) -> Any:
    given = _integers(axes, "axes")
    if not isinstance(x, Tensor):
        return np.expand_dims(x, tuple(given))
    rank = x.dim() + len(given)
    for axis in sorted(a % rank for a in given):
        x = x.unsqueeze(axis)
    return x


@op("Concat")
def _concat(*parts: Any, axis: int) -> Any:
    if _known(*parts):
        return np.concatenate([np.asarray(p) for p in parts], axis)
    return torch.cat([tensor(p) for p in parts], axis)


@op("Split")
def _split(
    x: Any, sizes: Any = None, axis: int = 0, num_outputs: int | None = None, outputs: int = 1
) -> Any:
    count = num_outputs or outputs
    each = -(-x.shape[axis] // count)
    parts = each if sizes is None else _integers(sizes, "split")
    if isinstance(x, Tensor):
        return torch.split(x, parts, axis)
    return np.split(x, count if sizes is None else np.cumsum(parts)[:-1], axis)


@op("Slice")
def _slice(x: Any, starts: Any, ends: Any, axes: Any = None, steps: Any = None) -> Any:
    first, last = _integers(starts, "starts"), _integers(ends, "ends")
    along = list(range(len(first))) if axes is None else _integers(axes, "axes")
    strides = [1] * len(first) if steps is None else _integers(steps, "steps")
    parts: list[Any] = [slice(None)] * x.ndim
    for axis, start, end, step in zip(along, first, last, strides, strict=True):
        stop = None if isinstance(end, int) and end * (1 if step > 0 else -1) > 2**31 - 2 else end
        if step < 0 and isinstance(x, Tensor):
            if (step, start, stop) not in ((-1, -1, None), (-1, x.shape[axis] - 1, None)):
                raise ValueError(f"a slice from {start} to {end} by {step}; expected a whole axis")
            x = x.flip(axis)
        else:
            parts[axis] = slice(start, stop, step)
    return x[tuple(parts)]


@op("Gather")
def _gather(x: Any, index: Any, axis: int = 0) -> Any:
    if _known(x, index):
        return np.asarray(np.take(x, index.astype(np.int64), axis))
    x = tensor(x)
    axis %= x.dim()
    if _known(index) and not index.ndim:
        return x.select(axis, int(index))
    if _known(index) and index.ndim == 1:
        index = np.where(index < 0, index + x.shape[axis], index)
        return x.index_select(axis, tensor(index).long())
    return x[(*[slice(None)] * axis, tensor(index).long())]


@op("GatherND")
def _gather_nd(x: Any, index: Any, batch_dims: int = 0) -> Tensor:
    x, index = tensor(x), tensor(index)
    rows = [
        torch.arange(index.shape[axis]).view([-1] + [1] * (index.dim() - 2 - axis))
        for axis in range(batch_dims)
    ]
    made: Tensor = x[(*rows, *index.long().unbind(-1))]
    return made


@op("ScatterND")
def _scatter_nd(x: Any, index: Any, updates: Any, reduction: str = "none") -> Tensor:
    if reduction not in ("none", "add"):
        raise ValueError(f"reduction={reduction}; expected none or add. Cut the model before it")
    places = tensor(index).long().unbind(-1)
    return tensor(x).index_put(places, tensor(updates), reduction == "add")  # type: ignore[no-any-return]


@op("ScatterElements")
def _scatter(x: Any, index: Any, updates: Any, axis: int = 0, reduction: str = "none") -> Tensor:
    x, index, updates = map(tensor, (x, index, updates))
    index = torch.where(index < 0, index + x.shape[axis], index).long()
    if reduction == "none":
        return torch.scatter(x, axis, index, updates)
    names = {"add": "sum", "mul": "prod", "max": "amax", "min": "amin"}
    return torch.scatter_reduce(x, axis, index, updates, names[reduction])


@op("OneHot")
def _one_hot(index: Any, depth: Any, values: Any, axis: int = -1) -> Tensor:
    count = _integers(depth, "depth")[0]
    index = tensor(index).long()
    index = torch.where(index < 0, index + count, index)
    axis %= index.dim() + 1
    choices = torch.arange(count).view([-1] + [1] * (index.dim() - axis))
    off, on = tensor(values).unbind()
    return torch.where(index.unsqueeze(axis) == choices, on, off)


@op("Trilu")
def _trilu(x: Any, k: Any = None, upper: int = 1) -> Tensor:
    diagonal = 0 if k is None else _integers(k, "k")[0]
    return (torch.triu if upper else torch.tril)(tensor(x), diagonal)


@op("Expand")
def _expand(x: Any, shape: Any) -> Tensor:
    x = tensor(x)
    sizes = _integers(shape, "shape")
    own: list[Any] = [1] * (len(sizes) - x.dim()) + list(x.shape)
    sizes = [1] * (len(own) - len(sizes)) + sizes
    wide = [a if isinstance(b, int) and b == 1 else b for a, b in zip(own, sizes, strict=True)]
    made: Tensor = x.expand(wide)
    return made


@op("Tile")
def _tile(x: Any, repeats: Any) -> Any:
    counts = _integers(repeats, "repeats")
    return x.repeat(counts) if isinstance(x, Tensor) else np.tile(x, counts)


@op("ConstantOfShape")
def _constant_of_shape(shape: Any, value: Any = None) -> Any:
    fill = np.zeros(1, np.float32) if value is None else value
    sizes = _integers(shape, "shape")
    if fill.dtype.kind == "i" and all(isinstance(n, int) for n in sizes):
        return np.full(sizes, fill[0])
    kind = getattr(torch, "float32" if fill.dtype.kind == "f" else str(fill.dtype))
    return torch.full(sizes, fill[0].item(), dtype=kind)


@op("Range")
def _range(start: Any, limit: Any, delta: Any) -> Tensor:
    ends: list[Any] = [numbers(v, "start, limit, delta")[0] for v in (start, limit, delta)]
    return torch.arange(*(n.item() if isinstance(n, np.generic) else n for n in ends))


@op("Pad")
def _pad(x: Tensor, pads: Any, value: Any = None, axes: Any = None, mode: str = "constant") -> Any:
    sizes = _integers(pads, "pads")
    half = len(sizes) // 2
    along = range(x.dim()) if axes is None else _integers(axes, "axes")
    by_axis = {a % x.dim(): (sizes[i], sizes[half + i]) for i, a in enumerate(along)}
    ends = [by_axis.get(a, (0, 0)) for a in range(x.dim())]
    while ends and ends[0] == (0, 0):
        ends = ends[1:]
    flat = [n for pair in reversed(ends) for n in pair]
    fill = 0.0 if value is None else float(numbers(value, "constant_value")[0])
    if mode == "constant":
        return F.pad(x, flat, value=fill) if flat else x
    names = {"reflect": "reflect", "edge": "replicate", "wrap": "circular"}
    return F.pad(x, flat, names[mode]) if flat else x


@op("DepthToSpace")
def _depth_to_space(x: Tensor, blocksize: int, mode: str = "DCR") -> Tensor:
    if mode == "CRD":
        return F.pixel_shuffle(x, blocksize)
    n, c, h, w = x.shape
    parts = x.reshape(n, blocksize, blocksize, c // blocksize**2, h, w)
    return parts.permute(0, 3, 4, 1, 5, 2).reshape(
        n, c // blocksize**2, h * blocksize, w * blocksize
    )


@op("SpaceToDepth")
def _space_to_depth(x: Tensor, blocksize: int) -> Tensor:
    n, c, h, w = x.shape
    parts = x.reshape(n, c, h // blocksize, blocksize, w // blocksize, blocksize)
    return parts.permute(0, 3, 5, 1, 2, 4).reshape(
        n, c * blocksize**2, h // blocksize, w // blocksize
    )


# Reductions and choices


def _reduction(function: Function, of_sizes: Function | None = None) -> Function:
    def call(x: Any, axes: Any = None, keepdims: int = 1, noop_with_empty_axes: int = 0) -> Any:
        given = [] if axes is None else _integers(axes, "axes")
        if not given and noop_with_empty_axes:
            return x
        if _known(x) and x.ndim == 1 and of_sizes is not None:
            made = np.asarray(reduce(of_sizes, x))
            return made.reshape(1) if keepdims else made
        x = tensor(x)
        along = sorted(a % x.dim() for a in given) or list(range(x.dim()))
        return function(x, along, bool(keepdims))

    return call


def _mean(x: Tensor, axes: list[int], keep: bool) -> Tensor:
    if x.dim() in (4, 5) and axes == list(range(2, x.dim())):
        return _pooled(x) if keep else _pooled(x).flatten(1)
    return x.mean(axes, keepdim=keep)


OPERATORS |= {
    "ReduceMean": _reduction(_mean),
    "ReduceSum": _reduction(lambda x, axes, keep: x.sum(axes, keepdim=keep)),
    "ReduceMax": _reduction(lambda x, axes, keep: x.amax(axes, keepdim=keep)),
    "ReduceMin": _reduction(lambda x, axes, keep: x.amin(axes, keepdim=keep)),
    "ReduceL1": _reduction(lambda x, axes, keep: x.abs().sum(axes, keepdim=keep)),
    "ReduceL2": _reduction(lambda x, axes, keep: x.norm(2, axes, keepdim=keep)),
    "ReduceSumSquare": _reduction(lambda x, axes, keep: x.square().sum(axes, keepdim=keep)),
    "ReduceLogSum": _reduction(lambda x, axes, keep: x.sum(axes, keepdim=keep).log()),
    "ReduceLogSumExp": _reduction(lambda x, axes, keep: x.logsumexp(axes, keepdim=keep)),
    "ReduceProd": _reduction(
        lambda x, axes, keep: reduce(lambda y, a: y.prod(a, keepdim=keep), axes[::-1], x),
        operator.mul,
    ),
}  # fmt: skip


def _place(function: Function) -> Function:
    def call(x: Tensor, axis: int = 0, keepdims: int = 1, select_last_index: int = 0) -> Any:
        if select_last_index:
            raise ValueError("select_last_index=1; expected 0")
        return function(x, axis, keepdim=bool(keepdims))

    return call


OPERATORS |= {"ArgMax": _place(torch.argmax), "ArgMin": _place(torch.argmin)}


@op("IsInf")
def _is_inf(x: Tensor, detect_negative: int = 1, detect_positive: int = 1) -> Tensor:
    found = torch.isinf(x)
    found = found if detect_negative else found & (x > 0)
    return found if detect_positive else found & (x < 0)


@op("Attention")
def _attention(
    q: Tensor, k: Tensor, v: Tensor, mask: Any = None, *past: Any, is_causal: int = 0,
    q_num_heads: int = 0, kv_num_heads: int = 0, scale: float | None = None, softcap: float = 0.0,
    **_: Any,
) -> Tensor:  # fmt: skip
    if any(value is not None for value in past) or softcap or (is_causal and mask is not None):
        raise ValueError(
            "softcap, a cache of keys, or a mask with is_causal; expected none of them. Export "
            "the attention as MatMul and Softmax (an operator set below 23)"
        )
    rows = q.dim() == 3  # of all heads: they are parts of the last axis
    if rows:
        counts = (q_num_heads, kv_num_heads, kv_num_heads)
        parts = zip((q, k, v), counts, strict=True)
        q, k, v = (x.unflatten(-1, (heads, -1)).transpose(1, 2) for x, heads in parts)
    made = F.scaled_dot_product_attention(
        q, k, v, tensor(mask), is_causal=bool(is_causal), scale=scale,
        enable_gqa=q.shape[1] != k.shape[1],
    )  # fmt: skip
    return made.transpose(1, 2).flatten(2) if rows else made


@op("TopK")
def _topk(x: Tensor, k: Any, axis: int = -1, largest: int = 1, sorted: int = 1) -> Any:
    # Of equal values the first, as ONNX says; torch.topk takes any.
    values, places = torch.sort(x, dim=axis, descending=bool(largest), stable=True)
    count = _integers(k, "k")[0]
    return values.narrow(axis, 0, count), places.narrow(axis, 0, count)
