"""Rulebooks: which input row meets which output row under which kernel offset."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from bevquant_sparse._geometry import Geometry, make_geometry
from bevquant_sparse._indices import infer_batch_size, require_indices
from bevquant_sparse._rulebook_torch import build_torch

_BACKENDS = ("auto", "numba", "torch")


@dataclass(frozen=True, eq=False)
class Rulebook:
    """The pairs of a sparse convolution, independent of its channels and weights.

    Kernel offsets are numbered row-major over the kernel's axes, in correlation order as in torch
    and spconv: with ``k`` the offset's index along an axis, a convolution pairs
    ``in = out·stride − padding + k·dilation`` and a transposed one
    ``out = in·stride − padding + k·dilation``.

    Attributes:
        in_indices: int32 ``[num_in, 1 + ndim]``: batch, then the spatial axes in the given order.
        out_indices: int32 ``[num_out, 1 + ndim]``. SubM: the input's rows in the input's order;
            otherwise ascending lexicographic order (batch, then the axes in the given order).
        neighbours: int32 ``[num_out, kernel_volume]``: the input row under each offset, −1 where
            that voxel is empty.
        batch_size: Number of samples in the batch.
        in_shape: Input grid, voxels per axis.
        out_shape: Output grid, voxels per axis.
        kernel_size: Kernel extent per axis.
        stride: Stride per axis.
        padding: Padding per axis; for SubM the implied ``dilation·⌊kernel/2⌋``.
        dilation: Dilation per axis.
        output_padding: Output padding per axis (transposed convolutions).
        subm: Whether this is a submanifold convolution.
        transposed: Whether this is a transposed (or inverse) convolution.
    """

    in_indices: Tensor
    out_indices: Tensor
    neighbours: Tensor
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
    def num_in(self) -> int:
        """Number of input rows."""
        return self.in_indices.shape[0]

    @property
    def num_out(self) -> int:
        """Number of output rows."""
        return self.out_indices.shape[0]

    @property
    def kernel_volume(self) -> int:
        """Number of kernel offsets."""
        return self.neighbours.shape[1]

    @cached_property
    def inverse_neighbours(self) -> Tensor:
        """int32 ``[num_in, kernel_volume]``: the output row each input reaches, −1 where none."""
        if self.subm:
            # Row i sees j under offset k exactly where j sees i under the mirrored offset.
            return self.neighbours.flip(1)
        out_rows, offsets, in_rows = self._present()
        table = self.neighbours.new_full((self.num_in * self.kernel_volume,), -1)
        table.scatter_(0, in_rows * self.kernel_volume + offsets, out_rows.to(torch.int32))
        return table.view(self.num_in, self.kernel_volume)

    def _present(self) -> tuple[Tensor, Tensor, Tensor]:
        """``(out_rows, offsets, in_rows)`` of the table's entries, in its order."""
        flat = self.neighbours.reshape(-1)
        places = (flat >= 0).nonzero().view(-1)
        out_rows = torch.div(places, self.kernel_volume, rounding_mode="floor")
        in_rows = flat.index_select(0, places).long()
        return out_rows, places - out_rows * self.kernel_volume, in_rows

    @cached_property
    def pairs(self) -> tuple[Tensor, Tensor, list[int]]:
        """All pairs grouped by kernel offset: ``(in_rows, out_rows, bounds)``.

        Both int64 ``[num_pairs]``; pairs ``bounds[k] … bounds[k + 1]`` belong to offset ``k``,
        ascending in the output row.
        """
        by_offset = self.neighbours.t().contiguous()
        flat = by_offset.view(-1)
        places = (flat >= 0).nonzero().view(-1)
        in_rows = flat.index_select(0, places).long()
        out_rows = places % max(self.num_out, 1)
        return in_rows, out_rows, [0, *(by_offset >= 0).sum(1).cumsum(0).tolist()]

    @cached_property
    def num_pairs(self) -> int:
        """Number of (input, output, offset) triples: multiply-accumulates per channel pair.

        SubM counts both halves of the kernel and its centre, which spconv's ``indice_pair_num``
        does not.
        """
        return int((self.neighbours >= 0).sum())

    def inverse(self) -> Rulebook:
        """The rulebook of the inverse convolution: in and out exchanged, the same offsets.

        Its outputs are this rulebook's inputs, in their own order (spconv's
        ``SparseInverseConv``).
        """
        return Rulebook(
            in_indices=self.out_indices,
            out_indices=self.in_indices,
            neighbours=self.inverse_neighbours,
            batch_size=self.batch_size,
            in_shape=self.out_shape,
            out_shape=self.in_shape,
            kernel_size=self.kernel_size,
            stride=self.stride,
            padding=self.padding,
            dilation=self.dilation,
            output_padding=self.output_padding,
            subm=self.subm,
            transposed=not self.transposed,
        )


def build_rulebook(
    indices: Tensor,
    spatial_shape: Sequence[int],
    kernel_size: int | Sequence[int],
    stride: int | Sequence[int] = 1,
    padding: int | Sequence[int] = 0,
    dilation: int | Sequence[int] = 1,
    *,
    subm: bool,
    transposed: bool = False,
    output_padding: int | Sequence[int] = 0,
    batch_size: int | None = None,
    backend: str = "auto",
) -> Rulebook:
    """Find every (input row, output row, kernel offset) of a sparse convolution or pooling.

    Per axis, with ``k`` the kernel index: ``in = out·stride − padding + k·dilation``, and for a
    transposed convolution ``out = in·stride − padding + k·dilation``. An output exists where at
    least one input reaches it; a SubM convolution has its inputs' coordinates as outputs and its
    kernel centred, whatever ``padding`` says. The set of pairs equals that of
    ``spconv.pytorch.ops.get_indice_pairs``; unlike there the order of everything is fixed, the
    same on every device, backend and number of threads, and the input is checked.

    Grids of any size work: keys are int64 where they fit, dense ranks beyond, so nothing
    overflows up to ``(2³¹ − 1)`` voxels along each of four axes.

    Args:
        indices: int32 (or int64) ``[rows, 1 + ndim]``, ``ndim`` 1 to 4: batch index, then the
            coordinates in voxels in the order of ``spatial_shape``. Any memory layout.
        spatial_shape: Input grid in voxels per axis.
        kernel_size: One integer or one per axis, as all that follow; odd for SubM.
        stride: Voxels; 1 for SubM.
        padding: Voxels, not negative; ignored for SubM.
        dilation: Voxels between neighbouring kernel elements.
        subm: Submanifold convolution.
        transposed: Transposed convolution; the output grid follows spconv's rule
            ``(size − 1)·stride − 2·padding + kernel + output_padding``.
        output_padding: Voxels, transposed convolutions only.
        batch_size: Number of samples; ``None`` takes the largest batch index plus one.
        backend: ``"torch"`` (any device), ``"numba"`` (CPU) or ``"auto"``: numba for CPU tensors
            where it is installed. Grids too large for numba's bitmap (2²⁹ voxels) go to torch.

    Returns:
        The rulebook. Zero rows give an empty one.

    Raises:
        ValueError: Duplicate, negative or over-range coordinates, a batch index at or above
            ``batch_size`` (each with the first offending row), a wrong dtype or shape, a
            parameter out of range, an even SubM kernel, or an empty output grid.
        TypeError: ``indices`` is no tensor, or a parameter is no integer.
        ImportError: ``backend="numba"`` without numba.

    Example:
        >>> indices = torch.tensor([[0, 0, 0], [0, 0, 1], [0, 5, 5]], dtype=torch.int32)
        >>> rulebook = build_rulebook(indices, (8, 8), 3, subm=True, batch_size=1)
        >>> rulebook.neighbours[0].tolist()
        [-1, -1, -1, -1, 0, 1, -1, -1, -1]
        >>> down = build_rulebook(indices, (8, 8), 2, 2, subm=False, batch_size=1)
        >>> down.out_indices.tolist(), down.num_pairs
        ([[0, 0, 0], [0, 2, 2]], 3)
    """
    if backend not in _BACKENDS:
        raise ValueError(f"backend={backend!r}: expected one of {', '.join(_BACKENDS)}")
    rows = require_indices(indices, len(tuple(spatial_shape)))
    geometry = make_geometry(
        spatial_shape,
        kernel_size,
        stride,
        padding,
        dilation,
        output_padding,
        subm=subm,
        transposed=transposed,
        batch_size=infer_batch_size(rows) if batch_size is None else int(batch_size),
    )
    out_indices, neighbours = _choose_builder(backend, rows, geometry)(rows, geometry)
    in_indices = out_indices if subm else rows.to(torch.int32)
    return _assemble(in_indices, out_indices, neighbours, geometry)


def _choose_builder(
    backend: str, indices: Tensor, geometry: Geometry
) -> Callable[[Tensor, Geometry], tuple[Tensor, Tensor]]:
    if backend == "torch" or (backend == "auto" and indices.device.type != "cpu"):
        return build_torch
    try:
        from bevquant_sparse._rulebook_numba import build_numba, fits_bitmap
    except ImportError as error:
        if backend == "auto":
            return build_torch
        raise ImportError(
            'backend="numba" needs numba: pip install "bevquant-sparse[numba]", or use '
            'backend="auto"'
        ) from error
    if indices.device.type != "cpu":
        raise ValueError(
            f'backend="numba" works on CPU tensors; indices are on {indices.device}: use '
            'backend="auto"'
        )
    return build_numba if fits_bitmap(geometry) else build_torch


def _assemble(
    in_indices: Tensor, out_indices: Tensor, neighbours: Tensor, geometry: Geometry
) -> Rulebook:
    return Rulebook(
        in_indices=in_indices,
        out_indices=out_indices,
        neighbours=neighbours,
        batch_size=geometry.batch_size,
        in_shape=geometry.in_shape,
        out_shape=geometry.out_shape,
        kernel_size=geometry.kernel_size,
        stride=geometry.stride,
        padding=geometry.padding,
        dilation=geometry.dilation,
        output_padding=geometry.output_padding,
        subm=geometry.subm,
        transposed=geometry.transposed,
    )
