"""The arithmetic of a convolution's grid: normalised parameters, output shape, their checks."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import NoReturn, SupportsInt

import torch
from torch import Tensor

INT32_MAX = 2**31 - 1
_MOST_OFFSETS = 2**24  # of a kernel: a row of a rulebook has as many entries


@dataclass(frozen=True)
class Geometry:
    """Checked parameters of one sparse convolution or pooling, one entry per spatial axis.

    Per axis, with input coordinate ``i``, output coordinate ``o`` and kernel index ``k``:
    a convolution pairs ``i = o·stride − padding + k·dilation``, a transposed one
    ``o = i·stride − padding + k·dilation`` (torch's and spconv's definitions). SubM is the
    convolution with ``o`` restricted to the input coordinates and the kernel centred.
    """

    batch_size: int
    in_shape: tuple[int, ...]
    out_shape: tuple[int, ...]
    kernel_size: tuple[int, ...]
    stride: tuple[int, ...]
    padding: tuple[int, ...]
    dilation: tuple[int, ...]
    output_padding: tuple[int, ...]
    subm: bool
    transposed: bool

    @property
    def ndim(self) -> int:
        return len(self.in_shape)

    @property
    def kernel_volume(self) -> int:
        return math.prod(self.kernel_size)


def make_geometry(
    spatial_shape: Sequence[int],
    kernel_size: int | Sequence[int],
    stride: int | Sequence[int],
    padding: int | Sequence[int],
    dilation: int | Sequence[int],
    output_padding: int | Sequence[int],
    *,
    subm: bool,
    transposed: bool,
    batch_size: int,
) -> Geometry:
    """Expand scalars, check every value and compute the output shape."""
    in_shape = as_tuple("spatial_shape", spatial_shape, None, minimum=1)
    ndim = len(in_shape)
    if not 1 <= ndim <= 4:
        raise ValueError(
            f"spatial_shape={in_shape} has {ndim} axes; sparse convolutions of rank 1 to 4 are "
            "supported"
        )
    kernel = as_tuple("kernel_size", kernel_size, ndim, minimum=1)
    steps = as_tuple("stride", stride, ndim, minimum=1)
    pads = as_tuple("padding", padding, ndim, minimum=0)
    dilations = as_tuple("dilation", dilation, ndim, minimum=1)
    out_pads = as_tuple("output_padding", output_padding, ndim, minimum=0)
    if is_open((batch_size,)):
        torch._check(batch_size >= 1)
    elif batch_size < 1 or batch_size > INT32_MAX:
        raise ValueError(f"batch_size={batch_size}: expected a positive int32")
    if math.prod(kernel) > _MOST_OFFSETS:
        raise ValueError(f"kernel_size={kernel}: more than {_MOST_OFFSETS} offsets")
    if not transposed and any(out_pads):
        raise ValueError(
            f"output_padding={out_pads} has a meaning for a transposed convolution only; "
            "pass transposed=True or leave it 0"
        )
    if subm:
        out_shape, pads = _subm_shape(in_shape, kernel, steps, dilations, transposed)
    elif transposed:
        out_shape = _deconv_shape(in_shape, kernel, steps, pads, out_pads)
    else:
        out_shape = _conv_shape(in_shape, kernel, steps, pads, dilations)
    _check_out_shape(out_shape, in_shape, kernel, steps, pads, dilations, out_pads)
    return Geometry(
        batch_size, in_shape, out_shape, kernel, steps, pads, dilations, out_pads, subm, transposed
    )


def as_tuple(
    name: str, value: int | Sequence[int], ndim: int | None, *, minimum: int
) -> tuple[int, ...]:
    """One integer for every axis, from one or from a sequence of them, each checked."""
    if not isinstance(value, Iterable):
        if ndim is None:
            raise TypeError(f"{name}={value!r}: expected a sequence of integers")
        value = (value,) * ndim
    values = tuple(value)
    if ndim is not None and len(values) != ndim:
        raise ValueError(
            f"{name}={values} has {len(values)} entries for {ndim} spatial axes; pass one integer "
            "or one per axis"
        )
    if is_open(values):
        # A size that comes out of an array is symbolic there: a check of the graph, not of now.
        for entry in values:
            torch._check(minimum <= entry)
        return values
    for entry in values:
        # numpy integers and 0-d tensors have __index__; floats such as 3.0 do not.
        whole = hasattr(entry, "__index__") and not getattr(entry, "ndim", 0)
        if isinstance(entry, bool) or not whole:
            raise TypeError(f"{name}={values}: expected integers, got {type(entry).__name__}")
    ints = whole_numbers(values)
    if any(not minimum <= entry <= INT32_MAX for entry in ints):
        raise ValueError(f"{name}={ints}: every entry must lie in {minimum}…{INT32_MAX}")
    return ints


def whole_numbers(values: Iterable[SupportsInt]) -> tuple[int, ...]:
    """As Python's integers; a size that `torch.export` holds open stays open."""
    return tuple(v if isinstance(v, torch.SymInt) else int(v) for v in values)  # type: ignore[misc]


def is_open(sizes: Iterable[object]) -> bool:
    """Whether a graph is made, of which a size may hold for more than this call."""
    dynamo = torch.compiler.is_dynamo_compiling()
    return dynamo or any(isinstance(size, torch.SymInt) for size in sizes)


def _subm_shape(
    in_shape: tuple[int, ...],
    kernel: tuple[int, ...],
    stride: tuple[int, ...],
    dilation: tuple[int, ...],
    transposed: bool,
) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Output shape and the implied padding: SubM kernels are centred whatever ``padding`` says."""
    if transposed:
        raise ValueError("a SubM convolution cannot be transposed; pass subm=False")
    if any(step != 1 for step in stride):
        raise ValueError(
            f"a SubM convolution keeps its input's coordinates, so its stride must be 1, "
            f"not {stride}; use a strided SparseConv"
        )
    if any(size % 2 == 0 for size in kernel):
        raise ValueError(
            f"kernel_size={kernel}: a SubM kernel has a centre, so every entry must be odd; "
            "use an odd size or a SparseConv"
        )
    return in_shape, tuple((k // 2) * d for k, d in zip(kernel, dilation, strict=True))


def _conv_shape(
    in_shape: tuple[int, ...],
    kernel: tuple[int, ...],
    stride: tuple[int, ...],
    padding: tuple[int, ...],
    dilation: tuple[int, ...],
) -> tuple[int, ...]:
    """``⌊(size + 2·padding − dilation·(kernel − 1) − 1)/stride⌋ + 1``, as torch and spconv."""
    axes = zip(in_shape, kernel, stride, padding, dilation, strict=True)
    return tuple((n + 2 * p - d * (k - 1) - 1) // s + 1 for n, k, s, p, d in axes)


def _deconv_shape(
    in_shape: tuple[int, ...],
    kernel: tuple[int, ...],
    stride: tuple[int, ...],
    padding: tuple[int, ...],
    output_padding: tuple[int, ...],
) -> tuple[int, ...]:
    """``(size − 1)·stride − 2·padding + kernel + output_padding``."""
    # As spconv's ``get_deconv_output_size``: unlike torch's rule it does not look at the dilation,
    # so a dilated transposed kernel is cut off at the far border.
    axes = zip(in_shape, kernel, stride, padding, output_padding, strict=True)
    return tuple((n - 1) * s - 2 * p + k + op for n, k, s, p, op in axes)


def _check_out_shape(out_shape: tuple[int, ...], *parameters: tuple[int, ...]) -> None:
    if is_open(out_shape):
        for size in out_shape:
            torch._check(size >= 1)
        return
    if all(1 <= size <= INT32_MAX for size in out_shape):
        return
    names = ("spatial_shape", "kernel_size", "stride", "padding", "dilation", "output_padding")
    given = ", ".join(f"{n}={v}" for n, v in zip(names, parameters, strict=True))
    problem = "is empty" if any(size < 1 for size in out_shape) else "does not fit int32"
    raise ValueError(
        f"the output shape {out_shape} {problem} ({given}); change the kernel, stride or padding, "
        "or give a larger spatial_shape"
    )


# Checks of voxel coordinates: every refusal names the first offending row.


def require_indices(indices: Tensor, ndim: int) -> Tensor:
    """Return ``indices`` as a contiguous int32 or int64 ``[rows, 1 + ndim]`` tensor."""
    if not isinstance(indices, Tensor):
        raise TypeError(f"indices: expected a torch.Tensor, got {type(indices).__name__}")
    if indices.dtype not in (torch.int32, torch.int64):
        raise ValueError(
            f"indices have dtype {indices.dtype}; expected torch.int32 (or int64) voxel "
            "coordinates: convert them with .int()"
        )
    if indices.ndim != 2 or indices.shape[1] != ndim + 1:
        raise ValueError(
            f"indices have shape {tuple(indices.shape)}; expected [rows, {ndim + 1}]: the batch "
            f"index, then {ndim} coordinates for a spatial_shape of {ndim} axes"
        )
    # Column-major tensors (``mask.nonzero().int()``) become row-major here, so no kernel below ever
    # reads them through the wrong strides.
    # No call without need: it would be a node of an exported graph, and another tensor there.
    return indices if indices.is_contiguous() else indices.contiguous()


def to_int32(indices: Tensor) -> Tensor:
    """``indices`` as int32: the very tensor where it is."""
    return indices if indices.dtype is torch.int32 else indices.to(torch.int32)


def infer_batch_size(indices: Tensor) -> int:
    """Largest batch index plus one; 1 where there are no rows."""
    return max(int(indices[:, 0].max()) + 1, 1) if indices.shape[0] else 1


def check_range(indices: Tensor, geometry: Geometry) -> None:
    """Refuse coordinates outside the grid; one pass, one synchronisation."""
    if indices.shape[0] == 0:
        return
    low, high = indices.aminmax(dim=0)
    limits = torch.tensor((geometry.batch_size, *geometry.in_shape), device=indices.device)
    if bool(((low < 0) | (high >= limits)).any()):
        refuse_out_of_range(indices, geometry)


def refuse_out_of_range(indices: Tensor, geometry: Geometry) -> NoReturn:
    """Name the first row with a coordinate outside the grid and raise ``ValueError``."""
    limits = torch.tensor((geometry.batch_size, *geometry.in_shape), device=indices.device)
    bad = (indices < 0) | (indices >= limits)
    row = int(bad.any(1).nonzero()[0])
    column = int(bad[row].nonzero()[0])
    value, limit = int(indices[row, column]), int(limits[column])
    place = f"indices[{row}] = {indices[row].tolist()}"
    if column == 0:
        raise ValueError(
            f"{place}: batch index {value} is outside 0…{limit - 1} (batch_size={limit}); pass the "
            "right batch_size or remove the row"
        )
    kind = "negative" if value < 0 else "over range"
    raise ValueError(
        f"{place}: coordinate {value} of spatial axis {column - 1} is {kind}, expected 0…"
        f"{limit - 1} for spatial_shape={geometry.in_shape}; clip the points to the grid or "
        "correct the order of the axes"
    )


def refuse_duplicate(indices: Tensor, first: int, second: int) -> NoReturn:
    """Raise ``ValueError`` naming two equal rows."""
    raise ValueError(
        f"indices[{second}] = {indices[second].tolist()} repeats indices[{first}]: voxel "
        "coordinates must be unique; merge duplicate voxels (mean or max) before the convolution"
    )


def find_duplicate(indices: Tensor) -> tuple[int, int]:
    """First row that repeats an earlier one, and that earlier row: ``(first, second)``."""
    _, inverse = torch.unique(indices, dim=0, return_inverse=True)
    order = torch.argsort(inverse, stable=True)
    grouped = inverse[order]
    repeats = (grouped[1:] == grouped[:-1]).nonzero().flatten()
    second = int(order[repeats + 1].min())
    first = int((inverse == inverse[second]).nonzero()[0])
    return first, second
