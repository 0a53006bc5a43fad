"""Exact products of integer matrices with torch operations, on any device.

And operands at which wrong integer arithmetic shows, torch's and that of this package's kernels.
"""

from __future__ import annotations

import functools
import logging
import timeit
from collections.abc import Callable

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

logger = logging.getLogger(__name__)

# 1024 products of int8 are at most 1024·128·128 = 2²⁴: every partial sum is a whole float32,
# whatever the order.
_FLOAT32_DEPTH = 1024
_INT_MM_ROWS, _INT_MM_MULTIPLE = 32, 8  # CUDA asks for more than 16 rows, multiples of 8
_ROW_BYTES = 16  # of a row that is gathered word by word
_WORDS = torch.int64, torch.int32, torch.int16, torch.int8


def exact_matmul(a: Tensor, b: Tensor, *, fits_int32: bool) -> Tensor:
    """``a @ b``, as int32 where a bound shows that it holds every sum, else as int64."""
    if 0 in (*a.shape, *b.shape):
        return torch.zeros((a.shape[0], b.shape[1]), dtype=torch.int32, device=a.device)
    if not fits_int32:
        return (a.double() @ b.double()).to(torch.int64)  # exact to 2⁵³
    method = matmul_method(a.device.type, str(a.dtype))
    if method == "int_mm":
        return _int_mm(a, b)
    if method == "float64":
        return (a.double() @ b.double()).to(torch.int32)
    return _by_float32(a, b)


def _by_float32(a: Tensor, b: Tensor) -> Tensor:
    total = torch.zeros((a.shape[0], b.shape[1]), dtype=torch.int32, device=a.device)
    for start in range(0, a.shape[1], _FLOAT32_DEPTH):
        part = slice(start, start + _FLOAT32_DEPTH)
        total += (a[:, part].float() @ b[part].float()).to(torch.int32)
    return total


def exact_product(a: Tensor, b: Tensor, equation: str = "") -> Tensor:
    """``a @ b`` of integers of any shapes, or ``einsum(equation, a, b)``, in whole floats.

    Sums are exact: of int8 in float32 up to 1024 products, else in float64 up to 2⁵³.
    """
    narrow = a.dtype == b.dtype == torch.int8 and not equation and a.shape[-1] <= _FLOAT32_DEPTH
    wide = torch.float32 if narrow else torch.float64
    given = a.to(wide), b.to(wide)
    return torch.einsum(equation, *given) if equation else torch.matmul(*given)


@functools.cache
def matmul_method(device_type: str, dtype: str) -> str:
    """``"int_mm"`` where it is exact and the fastest, else float32 in parts; float64 for int16."""
    if dtype != "torch.int8":
        return "float64"
    # ``torch._int_mm`` adds products in 16 bits on x86 CPUs without VNNI, silently; it is trusted
    # after it has multiplied saturating operands right. On some CPUs with AVX2 alone it is exact,
    # and 20 times as slow as float32 or more.
    trusted = _int_mm_is_exact(device_type) and (device_type != "cpu" or _int_mm_is_faster())
    return "int_mm" if trusted else "float32"


def _int_mm_is_faster() -> bool:
    """Whether the best of three products takes less time than float32's, on the CPU."""
    a, b = (torch.from_numpy(m) for m in saturating_operands(512, 256, 64))

    def seconds(multiply: Callable[[Tensor, Tensor], Tensor]) -> float:
        return min(timeit.repeat(lambda: multiply(a, b), number=1, repeat=3))

    return seconds(_int_mm) < seconds(_by_float32)


def _int_mm(a: Tensor, b: Tensor) -> Tensor:
    rows, depth, columns = a.shape[0], a.shape[1], b.shape[1]
    m = max(_INT_MM_ROWS, rows)
    k, n = (-(-size // _INT_MM_MULTIPLE) * _INT_MM_MULTIPLE for size in (depth, columns))
    if (m, k) != (rows, depth):
        a = torch.nn.functional.pad(a, (0, k - depth, 0, m - rows))
    if (k, n) != (depth, columns):
        b = torch.nn.functional.pad(b, (0, n - columns, 0, k - depth))
    # cuBLAS takes the second operand column by column: two to five times as fast on an H200.
    b = b.t().contiguous().t() if b.is_cuda else b.contiguous()
    out: Tensor = torch._int_mm(a.contiguous(), b)
    return out[:rows, :columns]


def gathered(x: Tensor, rows: Tensor) -> Tensor:
    """``x[rows]`` of a contiguous matrix."""
    # On CUDA ``index_select`` gives each row a block of threads, however short the row is: of rows
    # of 16 to 128 bytes, words are gathered four to twenty times as fast on an H200.
    wide = x.shape[1] * x.element_size() >= _ROW_BYTES
    return taken_by_words(x, rows) if x.is_cuda and wide else x.index_select(0, rows)


def taken_by_words(x: Tensor, rows: Tensor) -> Tensor:
    """``x[rows]`` of a contiguous matrix of integers, gathered word by word."""
    size = x.shape[1] * x.element_size()
    word = next(dtype for dtype in _WORDS if size % dtype.itemsize == 0)
    words = x.view(word)
    places = rows[:, None] * words.shape[1] + torch.arange(words.shape[1], device=x.device)
    return torch.take(words, places).view(x.dtype)


def _int_mm_is_exact(device_type: str) -> bool:
    for rows, depth, columns in ((32, 64, 16), (100, 1000, 40)):
        a, b = (torch.from_numpy(m) for m in saturating_operands(rows, depth, columns))
        try:
            got = _int_mm(a.to(device_type), b.to(device_type)).cpu()
        except (RuntimeError, AttributeError, NotImplementedError) as error:
            logger.debug("torch._int_mm does not run on %s: %s", device_type, error)
            return False
        if not torch.equal(got.long(), a.long() @ b.long()):
            logger.info("torch._int_mm is wrong on %s; products go through float32", device_type)
            return False
    return True


def saturating_operands(
    rows: int, depth: int, columns: int
) -> tuple[npt.NDArray[np.int8], npt.NDArray[np.int8]]:
    """``[rows, depth]`` and ``[depth, columns]`` of nothing but −128 and 127.

    Some rows and columns are constant, the others alternate with every period up to their number.
    """

    def pattern(lines: int) -> npt.NDArray[np.int8]:
        line, place = np.arange(lines)[:, None], np.arange(depth)[None, :]
        low = (place // (line // 2 + 1)) % 2 == line % 2
        low[0], low[1 % lines] = True, False
        return np.where(low, -128, 127).astype(np.int8)

    return pattern(rows), np.ascontiguousarray(pattern(columns).T)
