"""One pass over float32 memory: scale, round, clamp, scale back, and note what was inside."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch import Tensor

from bevquant_sparse.runtime import workspace
from bevquant_sparse.runtime.threads import in_parts

from ._format import NumBits, format_of
from ._jit import SMALLEST_PART, jit
from ._memory_order import memory_order
from ._steps import refuse_negative, scales
from ._stream_numba import LANES, keep_stream, quantize_stream

_SMALLEST_STREAM = 1 << 20  # bytes

# The arithmetic is that of the torch path, operation by operation, so the results are equal bit
# for bit: a comparison with NaN is false, which keeps a NaN as torch.clamp does. Slices that
# start at index 0 and an or-reduction instead of a minimum are what lets LLVM vectorise: nine
# times as fast.


@jit
def _flat(x: Any, y: Any, inside: Any, amax: Any, up: Any, down: Any, low: Any, top: Any) -> Any:
    """Quantize the vector x into y with one range; return whether a negative value was met."""
    negative = np.uint32(0)
    # Empty where no mask is asked for.
    if inside.shape[0] == 0:
        for i in range(x.shape[0]):
            v = x[i]
            q = np.rint(v * up)
            q = low if q < low else q
            q = top if q > top else q
            y[i] = q / down
            negative |= np.uint32(v < 0)
    else:
        for i in range(x.shape[0]):
            v = x[i]
            q = np.rint(v * up)
            q = low if q < low else q
            q = top if q > top else q
            y[i] = q / down
            inside[i] = abs(v) <= amax
            negative |= np.uint32(v < 0)
    return negative != 0


@jit
def _by_row(
    x: Any, y: Any, inside: Any, amax: Any, up: Any, down: Any, low: Any, top: Any, first: int
) -> Any:
    """Quantize x [rows, inner]; row r has the range (first + r) % ranges."""
    negative = False
    for r in range(x.shape[0]):
        c = (first + r) % up.shape[0]
        mask = inside[r] if inside.shape[0] > 0 else inside[:, 0]
        negative |= _flat(x[r], y[r], mask, amax[c], up[c], down[c], low, top)
    return negative


@jit
def _by_column(
    x: Any, y: Any, inside: Any, amax: Any, up: Any, down: Any, low: Any, top: Any
) -> Any:
    """Quantize x [rows, ranges], whose last axis is the one of the ranges."""
    negative = np.uint32(0)
    for r in range(x.shape[0]):
        row, out = x[r], y[r]
        for i in range(row.shape[0]):
            v = row[i]
            q = np.rint(v * up[i])
            q = low if q < low else q
            q = top if q > top else q
            out[i] = q / down[i]
            negative |= np.uint32(v < 0)
        if inside.shape[0] > 0:
            mask = inside[r]
            for i in range(row.shape[0]):
                mask[i] = abs(row[i]) <= amax[i]
    return negative != 0


@jit
def _masked_gradient(grad: Any, inside: Any, out: Any) -> None:
    """Copy the gradient where `inside`, put zero elsewhere."""
    for i in range(grad.shape[0]):
        out[i] = grad[i] if inside[i] else np.float32(0)


def one_pass(
    x: Tensor,
    amax: Tensor,
    options: tuple[NumBits, bool, bool],
    masked: bool,
    *,
    otherwise: Callable[..., tuple[Tensor, Tensor | None]],
    packed: bool = False,
) -> tuple[Tensor, Tensor | None]:
    """Fake-quantize as ``otherwise`` does, which takes what is not ours."""
    order = memory_order(x)
    dense = x.detach().permute(order)
    form = format_of(*options)
    # Ours is integers of dense float32 on the CPU with one range, or one range an index of a single
    # axis.
    if (
        form.dtype is not None
        or x.dtype != torch.float32
        or x.device.type != "cpu"
        or amax.dtype not in (torch.float32, torch.float16)
        or amax.device.type != "cpu"
        or amax.dim() > x.dim()
        or not dense.is_contiguous()
    ):
        return otherwise(x, amax, options, masked)
    ranges = amax.detach().float().reshape((1,) * (x.dim() - amax.dim()) + amax.shape)
    ranges = ranges.permute(order)
    wide = [d for d, size in enumerate(ranges.shape) if size > 1]
    if len(wide) > 1 or any(ranges.shape[d] != dense.shape[d] for d in wide):
        return otherwise(x, amax, options, masked)

    up, down = (s.reshape(-1).numpy() for s in scales(ranges, form.high))
    amaxs = ranges.reshape(-1).numpy()
    y, y_array = _empty(dense.shape, order, np.float32)
    bounds = (np.float32(form.low), np.float32(form.high))
    # One bit a value, 16 in an int16, where x is large and contiguous.
    if packed and not wide and not options[1] and _streams(x, y_array):
        # Without `masked` the bits are written all the same: a thirty-second of what y is.
        words = np.empty(x.numel() // LANES, np.int16)
        a, b = dense.numpy().reshape(-1), y_array.reshape(-1)
        in_parts(
            lambda i, j: quantize_stream(
                a[LANES * i : LANES * j],
                b[LANES * i : LANES * j],
                words[i:j],
                amaxs[0],
                up[0],
                down[0],
                *bounds,
            ),
            words.size,
            SMALLEST_PART // LANES,
        )
        return y, torch.from_numpy(words) if masked else None
    inside, mask = _empty(dense.shape, order, np.bool_) if masked else (None, np.empty(0, np.bool_))
    arrays: list[Any] = [dense.numpy(), y_array, mask]
    if not wide:
        a, b, m = (array.reshape(-1) for array in arrays)
        negative = in_parts(
            lambda i, j: _flat(a[i:j], b[i:j], m[i:j], amaxs[0], up[0], down[0], *bounds),
            a.size,
            SMALLEST_PART,
        )
    else:
        inner = math.prod(dense.shape[wide[0] + 1 :])
        columns = amaxs.size if inner == 1 else inner
        a, b = (array.reshape(-1, columns) for array in arrays[:2])
        m = arrays[2].reshape(-1, columns if masked else 1)
        tail = (amaxs, up, down, *bounds)

        def part(i: int, j: int) -> bool:
            if inner == 1:
                return bool(_by_column(a[i:j], b[i:j], m[i:j], *tail))
            return bool(_by_row(a[i:j], b[i:j], m[i:j], *tail, i))

        negative = in_parts(part, a.shape[0], max(SMALLEST_PART // columns, 1))
    if options[1] and any(negative):
        refuse_negative(x)
    return y, inside


def _empty(shape: torch.Size, order: list[int], dtype: type) -> tuple[Tensor, Any]:
    """Return an uninitialised tensor of axes in their own order, and its memory in `order`."""
    array = workspace.empty(tuple(shape), dtype)
    own = sorted(range(len(order)), key=order.__getitem__)
    return torch.from_numpy(array).permute(own), array


def _streams(x: Tensor, array: Any) -> bool:
    """Whether past the caches pays: what is smaller is better read from them by the next layer."""
    return bool(
        array.nbytes >= _SMALLEST_STREAM
        and x.is_contiguous()
        and x.numel() % LANES == 0
        and array.ctypes.data % 64 == 0
    )


def keep_packed(grad: Tensor, inside: Tensor) -> Tensor:
    """Return the float32 gradient where a bit of `inside` is set, zero elsewhere."""
    out, array = _empty(grad.shape, list(range(grad.dim())), np.float32)
    if not _streams(out, array):
        return torch.where(unpack(inside).reshape(grad.shape), grad, 0.0)
    g, m, o = grad.contiguous().numpy().reshape(-1), inside.numpy(), array.reshape(-1)
    in_parts(
        lambda i, j: keep_stream(g[LANES * i : LANES * j], m[i:j], o[LANES * i : LANES * j]),
        m.size,
        SMALLEST_PART // LANES,
    )
    return out


def unpack(inside: Tensor) -> Tensor:
    """Return the mask as one bool a value."""
    words = inside.numpy().astype("<i2", copy=False)
    return torch.from_numpy(np.unpackbits(words.view(np.uint8), bitorder="little").view(np.bool_))


def keep(grad: Tensor, inside: Tensor) -> Tensor | None:
    """Return the float32 gradient where `inside`, zero elsewhere; None where strides differ."""
    order = memory_order(grad)
    dense, mask = grad.permute(order), inside.permute(order)
    if not (dense.is_contiguous() and mask.is_contiguous()):
        return None
    out, array = _empty(dense.shape, order, np.float32)
    g, m, o = (a.reshape(-1) for a in (dense.numpy(), mask.numpy(), array))
    in_parts(lambda i, j: _masked_gradient(g[i:j], m[i:j], o[i:j]), g.size, SMALLEST_PART)
    return out
