"""One pass over float32 memory: scale, round, clamp, scale back, and note what was inside.

Results go into memory of earlier ones that were freed. The C library gives large blocks back to the
system as soon as they are freed, so that each new 20 MB tensor costs thousands of page faults and
as many pages set to zero: more time than fake-quantizing into it takes. CUDA allocators keep such
blocks, and so does this one, a few.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ._format import NumBits, format_of
from ._jit import jit
from ._memory_order import memory_order
from ._steps import refuse_negative, scales
from ._stream_numba import LANES, keep_stream, quantize_stream
from ._threads import run_parts

_PARTS = 8  # for each thread
_SMALLEST_STREAM = 1 << 20  # bytes
_SMALLEST, _LARGEST = 1 << 20, 1 << 25  # bytes; below the C library reuses by itself
_LINE = 64  # bytes of a cache line, at whose start each block begins
# A full deque drops its oldest: at most 128 MiB lie idle. Its methods are atomic, which matters
# because a block may come back at any moment, in any thread and within a garbage collection.
_idle: deque[Any] = deque(maxlen=4)

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
        run_parts(
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
            elements=a.size,
            each=_PARTS,
        )
        return y, torch.from_numpy(words) if masked else None
    inside, mask = _empty(dense.shape, order, np.bool_) if masked else (None, np.empty(0, np.bool_))
    arrays: list[Any] = [dense.numpy(), y_array, mask]
    if not wide:
        a, b, m = (array.reshape(-1) for array in arrays)
        negative = run_parts(
            lambda i, j: _flat(a[i:j], b[i:j], m[i:j], amaxs[0], up[0], down[0], *bounds),
            a.size,
            each=_PARTS,
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

        negative = run_parts(part, a.shape[0], elements=a.size, each=_PARTS)
    if options[1] and any(negative):
        refuse_negative(x)
    return y, inside


def _empty(shape: torch.Size, order: list[int], dtype: type) -> tuple[Tensor, Any]:
    """Return an uninitialised tensor of axes in their own order, and its memory in `order`."""
    array = _memory(tuple(shape), dtype)
    own = sorted(range(len(order)), key=order.__getitem__)
    return torch.from_numpy(array).permute(own), array


class _Buffer:
    """Shows a block to numpy, which keeps this object as long as any array or tensor needs it."""

    def __init__(self, block: Any) -> None:
        # Held here: a module's names are gone when the interpreter shuts down.
        self.idle, self.block = _idle, block
        self.__array_interface__ = block.__array_interface__

    def __del__(self) -> None:
        self.idle.append(self.block)


def _memory(shape: tuple[int, ...], dtype: type) -> Any:
    """Return an uninitialised array, where one fits in memory that an earlier one has left."""
    size = math.prod(shape)
    nbytes = size * np.dtype(dtype).itemsize
    if not _SMALLEST <= nbytes <= _LARGEST:
        return np.empty(shape, dtype)
    # The memory comes back when the last array or tensor that shows it is gone.
    return np.asarray(_Buffer(_take(nbytes)))[:nbytes].view(dtype).reshape(shape)


def _take(nbytes: int) -> Any:
    """Return an idle block of at most twice the size, or a new one."""
    for _ in range(len(_idle)):
        try:
            block = _idle.popleft()
        except IndexError:  # another thread took the last one
            break
        if nbytes <= block.nbytes <= 2 * nbytes:
            return block
        _idle.append(block)
    raw = np.empty(nbytes + _LINE, np.uint8)
    start = -raw.ctypes.data % _LINE
    return raw[start : start + nbytes]


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
    run_parts(
        lambda i, j: keep_stream(g[LANES * i : LANES * j], m[i:j], o[LANES * i : LANES * j]),
        m.size,
        elements=g.size,
        each=_PARTS,
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
    run_parts(lambda i, j: _masked_gradient(g[i:j], m[i:j], o[i:j]), g.size, each=_PARTS)
    return out
