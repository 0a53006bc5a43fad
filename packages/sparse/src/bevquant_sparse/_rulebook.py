"""Rulebooks: which input row meets which output row under which kernel offset."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from bevquant_sparse._geometry import (
    INT32_MAX,
    Geometry,
    as_tuple,
    infer_batch_size,
    make_geometry,
    require_indices,
    to_int32,
)
from bevquant_sparse._operator import operator
from bevquant_sparse._rulebook_torch import build_torch
from bevquant_sparse._table import Table
from bevquant_sparse.runtime.eager import eager

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

    @property
    def inverse_neighbours(self) -> Tensor:
        """int32 ``[num_in, kernel_volume]``: the output row each input reaches, −1 where none."""
        return self.table.inverse

    @property
    def pairs(self) -> tuple[Tensor, Tensor, list[int]]:
        """All pairs grouped by kernel offset: ``(in_rows, out_rows, bounds)``.

        Both int64 ``[num_pairs]``; pairs ``bounds[k] … bounds[k + 1]`` belong to offset ``k``,
        ascending in the output row.
        """
        return self.table.pairs

    @property
    def num_pairs(self) -> int:
        """Number of (input, output, offset) triples: multiply-accumulates per channel pair.

        SubM counts both halves of the kernel and its centre, which spconv's ``indice_pair_num``
        does not.
        """
        return self.table.derive("num_pairs", lambda: int((self.neighbours >= 0).sum()))

    @property
    def geometry(self) -> Geometry:
        """The parameters alone."""
        return Geometry(
            self.batch_size, self.in_shape, self.out_shape, self.kernel_size, self.stride,
            self.padding, self.dilation, self.output_padding, self.subm, self.transposed,
        )  # fmt: skip

    @property
    def table(self) -> Table:
        """The part that kernels read."""
        return Table(self.neighbours, self.num_in, self.subm)

    @classmethod
    def identity(cls, indices: Tensor, spatial_shape: Sequence[int], batch_size: int) -> Rulebook:
        """That of a 1×…×1 kernel which moves nothing: every row meets itself, unchecked.

        Args:
            indices: int32 ``[rows, 1 + ndim]``.
            spatial_shape: Grid in voxels.
            batch_size: Number of samples.
        """
        shape = tuple(spatial_shape)
        ones, zeros = (1,) * len(shape), (0,) * len(shape)
        return cls(
            in_indices=indices, out_indices=indices, batch_size=batch_size,
            neighbours=identity_rulebook(indices, shape, batch_size), in_shape=shape,
            out_shape=shape, kernel_size=ones, stride=ones, padding=zeros,
            dilation=ones, output_padding=zeros, subm=True, transposed=False,
        )  # fmt: skip

    def inverse(self) -> Rulebook:
        """The rulebook of the inverse convolution: in and out exchanged, the same offsets.

        Its outputs are this rulebook's inputs, in their own order (spconv's
        ``SparseInverseConv``).
        """
        turned: dict[str, Any] = {
            "in_shape": self.out_shape, "out_shape": self.in_shape,
            "transposed": not self.transposed,
        }  # fmt: skip
        neighbours = _inverse_rulebook(self.neighbours, self.in_indices)
        geometry = vars(self.geometry) | turned
        return Rulebook(self.out_indices, self.in_indices, neighbours, **geometry)


@eager
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
    tiles: bool = False,
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
        tiles: For kernels that walk tiles of rows (`bevquant_sparse.tiles`): the table of
            neighbours is left until it is read, which makes the rest several times as fast. That
            is so on grids of three axes whose last one has at most 64 voxels, of kernels of at
            most 32 elements without dilation along the last axis, and of int32 coordinates on a
            CPU with numba; all else gets its table at once.

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
    shape = as_tuple("spatial_shape", spatial_shape, None, minimum=1)
    rows = require_indices(indices, len(shape))
    if batch_size is None:
        batch_size = infer_batch_size(rows)
    geometry = make_geometry(
        shape,
        kernel_size,
        stride,
        padding,
        dilation,
        output_padding,
        subm=subm,
        transposed=transposed,
        batch_size=as_tuple("batch_size", (batch_size,), 1, minimum=0)[0],
    )
    made = _pillars(rows, geometry) if tiles and backend != "torch" else None
    if made is None:
        return build_from_geometry(rows, geometry, backend)
    return TiledRulebook(rows, geometry, *made)


class TiledRulebook(Rulebook):
    """A rulebook that is asked for tiles; its table of neighbours is built only when read."""

    _tiles: Any
    _plans: dict[int, Any]

    def __init__(
        self, in_indices: Tensor, geometry: Geometry, out_indices: Tensor, tiles: Any
    ) -> None:
        fields = dict(in_indices=in_indices, out_indices=out_indices, **vars(geometry))
        for name, value in (*fields.items(), ("_tiles", tiles), ("_plans", {})):
            object.__setattr__(self, name, value)

    @cached_property
    def neighbours(self) -> Tensor:
        """As in `Rulebook`."""
        return build_from_geometry(self.in_indices, self.geometry, "auto").neighbours

    @property
    def kernel_volume(self) -> int:
        """Number of kernel offsets."""
        return math.prod(self.kernel_size)

    @cached_property
    def num_pairs(self) -> int:
        """As in `Rulebook`."""
        return int(self._tiles.num_pairs)

    def plan(self, tile_rows: int) -> Any:
        """The tiles of so many rows: a `bevquant_sparse.tiles.SparsePlan`."""
        if tile_rows not in self._plans:
            self._plans[tile_rows] = self._tiles.plan(tile_rows)
        return self._plans[tile_rows]


def _pillars(indices: Tensor, geometry: Geometry) -> tuple[Tensor, Any] | None:
    try:
        from bevquant_sparse._rulebook_pillars import build_pillars
    except ImportError:  # without numba
        return None
    return build_pillars(indices, geometry)


def build_from_geometry(indices: Tensor, geometry: Geometry, backend: str) -> Rulebook:
    """The rulebook of checked parameters, by the operators: they are what an export records."""
    rows = require_indices(indices, geometry.ndim)
    chosen = () if backend == "auto" else (backend,)
    where = (list(geometry.in_shape), geometry.batch_size)
    kernel, dilation = list(geometry.kernel_size), list(geometry.dilation)
    if geometry.subm:
        neighbours = _subm_rulebook(rows, *where, kernel, dilation, *chosen)
        # Narrowed after the operator has checked the range.
        out_indices = in_indices = to_int32(rows)
    else:
        out_indices, neighbours = _rulebook(
            rows,
            *where,
            kernel,
            list(geometry.stride),
            list(geometry.padding),
            dilation,
            list(geometry.output_padding),
            geometry.transposed,
            *chosen,
        )
        in_indices = to_int32(rows)
    return Rulebook(in_indices, out_indices, neighbours, **vars(geometry))


@operator(
    "subm_rulebook(Tensor indices, SymInt[] spatial_shape, SymInt batch_size, int[] kernel_size,"
    " int[] dilation, str backend='auto') -> Tensor"
)
def _subm_rulebook(
    indices: Tensor,
    spatial_shape: Sequence[int],
    batch_size: int,
    kernel_size: Sequence[int],
    dilation: Sequence[int],
    backend: str = "auto",
) -> Tensor:
    """Neighbours of a SubM convolution, whose output rows are ``indices``."""
    geometry = make_geometry(
        spatial_shape, kernel_size, 1, 0, dilation, 0,
        subm=True, transposed=False, batch_size=batch_size,
    )  # fmt: skip
    return _choose_builder(backend, indices, geometry)(indices, geometry)[1]


@_subm_rulebook.register_fake
def _(
    indices: Tensor, _shape: Sequence[int], _batch: int, kernel_size: Sequence[int], *_: object
) -> Tensor:
    return indices.new_empty((indices.shape[0], math.prod(kernel_size)), dtype=torch.int32)


@operator(
    "rulebook(Tensor indices, SymInt[] spatial_shape, SymInt batch_size, int[] kernel_size,"
    " int[] stride, int[] padding, int[] dilation, int[] output_padding, bool transposed,"
    " str backend='auto') -> (Tensor, Tensor)"
)
def _rulebook(
    indices: Tensor,
    spatial_shape: Sequence[int],
    batch_size: int,
    kernel_size: Sequence[int],
    stride: Sequence[int],
    padding: Sequence[int],
    dilation: Sequence[int],
    output_padding: Sequence[int],
    transposed: bool,
    backend: str = "auto",
) -> tuple[Tensor, Tensor]:
    """``(out_indices, neighbours)`` of every other convolution and of pooling."""
    geometry = make_geometry(
        spatial_shape, kernel_size, stride, padding, dilation, output_padding,
        subm=False, transposed=transposed, batch_size=batch_size,
    )  # fmt: skip
    out_indices, neighbours = _choose_builder(backend, indices, geometry)(indices, geometry)
    # An operator may not return its input, as builders do where there are no rows.
    return (out_indices.clone() if out_indices is indices else out_indices), neighbours


@_rulebook.register_fake
def _(
    indices: Tensor, _shape: Sequence[int], _batch: int, kernel_size: Sequence[int], *_: object
) -> tuple[Tensor, Tensor]:
    # A graph is for frames with voxels in them: forwards ask whether there are any.
    rows = torch.library.get_ctx().new_dynamic_size(min=1, max=INT32_MAX)
    return (
        indices.new_empty((rows, indices.shape[1]), dtype=torch.int32),
        indices.new_empty((rows, math.prod(kernel_size)), dtype=torch.int32),
    )


@operator("inverse_rulebook(Tensor neighbours, Tensor in_indices) -> Tensor")
def _inverse_rulebook(neighbours: Tensor, in_indices: Tensor) -> Tensor:
    """Neighbours of the inverse convolution, whose output rows are ``in_indices``."""
    return Table(neighbours, in_indices.shape[0], subm=False).inverse


@_inverse_rulebook.register_fake
def _(neighbours: Tensor, in_indices: Tensor) -> Tensor:
    return neighbours.new_empty((in_indices.shape[0], neighbours.shape[1]))


@operator("identity_rulebook(Tensor indices, SymInt[] spatial_shape, SymInt batch_size) -> Tensor")
def identity_rulebook(indices: Tensor, _shape: Sequence[int], _batch: int) -> Tensor:
    """Neighbours of a 1×…×1 kernel that moves nothing: every row meets itself, unchecked.

    The grid and the batch size are for readers of a captured graph.
    """
    rows = torch.arange(indices.shape[0], dtype=torch.int32, device=indices.device)
    return rows.unsqueeze(1)


@identity_rulebook.register_fake
def _(indices: Tensor, _shape: Sequence[int], _batch: int) -> Tensor:
    return indices.new_empty((indices.shape[0], 1), dtype=torch.int32)


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
            'backend="numba" needs numba: pip install numba, or use backend="auto"'
        ) from error
    if indices.device.type != "cpu":
        raise ValueError(
            f'backend="numba" works on CPU tensors; indices are on {indices.device}: use '
            'backend="auto"'
        )
    return build_numba if fits_bitmap(geometry) else build_torch
