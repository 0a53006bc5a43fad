"""Element by element in one pass over memory, on all of torch's threads; needs numba.

The same float64 arithmetic as the torch operations that they stand in for, which take a dozen
passes over eight bytes a value. Rows of channels lie a fixed stride apart.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from bevquant_sparse.runtime.jit import compiled
from bevquant_sparse.runtime.threads import share

_VALUES = 1 << 16  # of a task


def quantize_flat(x: Any, scale: float, low: float, high: float, out: Any) -> bool:
    """``out = clamp(rint(x / scale))``; False where a NaN was met. Flat float32 and int8."""
    clean = np.ones(-(-len(x) // _VALUES), np.uint8)
    share(
        lambda i: _quantize(i * _VALUES, min((i + 1) * _VALUES, len(x)), x, scale, low, high, out,
                            clean[i : i + 1]),
        len(clean),
    )  # fmt: skip
    return bool(clean.all())


def add_rows(
    a: Any, a_stride: int, a_factor: Any, b: Any, b_stride: int, b_factor: Any,
    factor: float, low: float, high: float, out: Any,
) -> None:  # fmt: skip
    """``out = clamp(rint((a·a_factor + b·b_factor)·factor))``; `a` int8 or int32, `b` int8."""
    work = _add[a.dtype != np.int32]

    def run(first: int, stop: int) -> None:
        work(first, stop, a, a_stride, a_factor, b, b_stride, b_factor, factor, low, high, out)

    _by_rows(run, *out.shape)


def requantize_rows(acc: Any, stride: int, factor: Any, low: float, high: float, out: Any) -> None:
    """``out = clamp(rint(acc·factor))``, int32 or int8 to int8."""
    work = _requantize[acc.dtype != np.int32]
    _by_rows(lambda first, stop: work(first, stop, acc, stride, factor, low, high, out), *out.shape)


def dequantize_rows(acc: Any, stride: int, factor: Any, low: float, out: Any) -> None:
    """``out = max(float32(acc·factor), low)``, int32 or int8 to float32."""
    work = _dequantize[acc.dtype != np.int32]
    _by_rows(lambda first, stop: work(first, stop, acc, stride, factor, low, out), *out.shape)


def _by_rows(work: Any, rows: int, channels: int) -> None:
    step = max(1, _VALUES // max(channels, 1))
    share(lambda i: work(i * step, min((i + 1) * step, rows)), -(-rows // step))


@compiled("void(int64, int64, float32[::1], float64, float64, float64, int8[::1], uint8[::1])")
def _quantize(first, stop, x, scale, low, high, out, clean):
    nans = 0
    x, out = x[first:stop], out[first:stop]
    for i in range(len(x)):
        value = np.float64(x[i]) / scale
        nans += value != value
        value = np.rint(value)
        value = low if value < low else value
        value = high if value > high else value
        out[i] = np.int8(np.int32(value))
    if nans:
        clean[0] = 0


def _for_inputs(signature: str) -> Any:
    """Decorator: the function compiled for int32 and for int8 in the place of ``IN``."""

    def decorate(function: Any) -> tuple[Any, Any]:
        wide, narrow = (signature.replace("IN", name) for name in ("int32", "int8"))
        return compiled(wide)(function), compiled(narrow)(function)

    return decorate


@_for_inputs(
    "void(int64, int64, IN[::1], int64, float64[::1], int8[::1], int64, float64[::1], float64, "
    "float64, float64, int8[:, ::1])"
)
def _add(first, stop, a, a_stride, a_factor, b, b_stride, b_factor, factor, low, high, out):
    for row in range(first, stop):
        made = out[row]
        left, right = a[row * a_stride :][: len(made)], b[row * b_stride :][: len(made)]
        for c in range(len(made)):
            value = (left[c] * a_factor[c] + right[c] * b_factor[c]) * factor
            value = np.rint(value)
            value = low if value < low else value
            value = high if value > high else value
            made[c] = np.int8(np.int32(value))


@_for_inputs("void(int64, int64, IN[::1], int64, float64[::1], float64, float64, int8[:, ::1])")
def _requantize(first, stop, acc, stride, factor, low, high, out):
    for row in range(first, stop):
        made = out[row]
        given = acc[row * stride :][: len(made)]
        for c in range(len(made)):
            value = np.rint(given[c] * factor[c])
            value = low if value < low else value
            value = high if value > high else value
            made[c] = np.int8(np.int32(value))


@_for_inputs("void(int64, int64, IN[::1], int64, float64[::1], float64, float32[:, ::1])")
def _dequantize(first, stop, acc, stride, factor, low, out):
    for row in range(first, stop):
        made = out[row]
        given = acc[row * stride :][: len(made)]
        for c in range(len(made)):
            value = np.float32(given[c] * factor[c])
            made[c] = low if value < low else value
