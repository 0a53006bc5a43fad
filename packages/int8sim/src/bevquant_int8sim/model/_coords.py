"""The voxels that the features of a sparse tensor lie on, and the rulebooks built for them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import astuple, dataclass
from typing import Annotated, Any

import torch
from msgspec import Meta
from torch import Tensor

from bevquant_int8sim._plan_rulebook import plan_rulebook
from bevquant_int8sim._to_dense import int8_to_dense
from bevquant_quantizers.documents import Size
from bevquant_sparse import Rulebook, sparse_avg_pool, sparse_max_pool

Extent = Annotated[int, Meta(ge=1, le=2**31 - 1)]
COORD_TYPES = frozenset((torch.int32, torch.int64, torch.float32, torch.float64))
"""Types that hold every coordinate; float16 rounds those above 2,048."""
_POOLS = {"max_pool": sparse_max_pool, "avg_pool": sparse_avg_pool}  # by the operator's name


@dataclass(frozen=True)
class Geometry:
    """Settings of a sparse convolution, apart from its weight."""

    kernel_size: tuple[Extent, ...]
    stride: tuple[Extent, ...]
    padding: tuple[Size, ...]
    dilation: tuple[Extent, ...]
    output_padding: tuple[Size, ...]
    subm: bool
    transposed: bool
    inverse: bool

    def numbers(self) -> tuple[Any, ...]:
        """Its fields in order, as constants of a step."""
        return astuple(self)

    @property
    def keeps_rows(self) -> bool:
        """A 1×…×1 kernel that moves nothing: every row meets itself."""
        return (
            all(k == 1 for k in self.kernel_size)
            and all(s == 1 for s in self.stride)
            and (self.subm or not any(self.padding + self.output_padding))
        )


class Coords:
    """The voxels of one frame at one resolution, and the rulebooks between them and others.

    A rulebook follows from the coordinates and the geometry alone, so each is built once, whatever
    the layers that use it call it. Names (`indice_key`) serve inverse convolutions, which go back
    to the coordinates that a strided convolution of the same name came from.

    Args:
        indices: int32 ``[rows, 1 + ndim]``: batch, then the coordinates.
        spatial_shape: Grid in voxels.
        batch_size: Number of frames.
    """

    def __init__(self, indices: Tensor, spatial_shape: Sequence[int], batch_size: int) -> None:
        self.indices = indices
        self.spatial_shape = [int(size) for size in spatial_shape]
        self.batch_size = int(batch_size)
        self._rulebooks: dict[Geometry, tuple[Rulebook, Coords]] = {}
        self._origins: dict[str, tuple[Rulebook, Coords]] = {}

    def convolved(self, geometry: Geometry, key: str | None, name: str) -> tuple[Rulebook, Coords]:
        """The rulebook of a convolution on these coordinates, and the coordinates of its output.

        Raises:
            ValueError: The coordinates do not fit the grid, or an inverse convolution has nothing
                to invert; the message starts with `name`.
        """
        if geometry.inverse and not (geometry.keeps_rows and key not in self._origins):
            return self._inverse(geometry, key, name)
        if geometry not in self._rulebooks:
            try:
                self._rulebooks[geometry] = self._built(geometry)
            except ValueError as error:
                raise ValueError(f"{name}: {error}") from error
        rulebook, coords = self._rulebooks[geometry]
        if key is not None and coords is not self:
            coords._origins[key] = (rulebook, self)
        return rulebook, coords

    def _built(self, geometry: Geometry) -> tuple[Rulebook, Coords]:
        if geometry.keeps_rows:
            indices = self.indices.to(torch.int32)
            return Rulebook.identity(indices, self.spatial_shape, self.batch_size), self
        rulebook = plan_rulebook(
            self.indices,
            self.spatial_shape,
            geometry.kernel_size,
            geometry.stride,
            geometry.padding,
            geometry.dilation,
            output_padding=geometry.output_padding if geometry.transposed else 0,
            subm=geometry.subm,
            transposed=geometry.transposed,
            batch_size=self.batch_size,
        )
        if geometry.subm:
            return rulebook, self
        coords = Coords(rulebook.out_indices, rulebook.out_shape, self.batch_size)
        # Inverse convolutions further on may go back past this one.
        coords._origins = dict(self._origins)
        return rulebook, coords

    def _inverse(self, geometry: Geometry, key: str | None, name: str) -> tuple[Rulebook, Coords]:
        if key is None or key not in self._origins:
            raise ValueError(
                f"{name}: nothing to invert under indice_key={key!r}; an inverse convolution "
                "undoes the strided convolution that ran before it under the same indice_key"
            )
        rulebook, coords = self._origins[key]
        if rulebook.kernel_size != geometry.kernel_size:
            raise ValueError(
                f"{name}: its kernel size {geometry.kernel_size} is not the "
                f"{rulebook.kernel_size} of the convolution that it inverts"
            )
        return rulebook.inverse(), coords


@dataclass(frozen=True, eq=False)
class SparseOutput:
    """A sparse tensor that an integer model returns.

    Attributes:
        features: float ``[rows, channels]``.
        indices: int32 ``[rows, 1 + ndim]``.
        spatial_shape: Grid in voxels.
        batch_size: Number of frames.
    """

    features: Tensor
    indices: Tensor
    spatial_shape: list[int]
    batch_size: int

    def dense(self) -> Tensor:
        """Zero-filled grid ``[batch, channels, *spatial_shape]``."""
        return dense(self.features, self.indices, self.spatial_shape, self.batch_size)


def convolved_coords(coords: Coords, key: str | None, *geometry: Any) -> Coords:
    """The coordinates behind a convolution or pooling of this geometry."""
    return coords.convolved(Geometry(*geometry), key, "a rulebook")[1]


def pooled(features: Tensor, coords: Coords, kind: str, key: str | None, *geometry: Any) -> Tensor:
    """One of `_POOLS` over the voxels of each window; integers stay integers."""
    rulebook, _ = coords.convolved(Geometry(*geometry), key, "a pooling")
    pool = _POOLS.get(kind)
    if pool is None:
        raise ValueError(f"{kind!r} is no pooling over voxels: expected one of {', '.join(_POOLS)}")
    if features.is_floating_point():
        return pool(features, rulebook)
    made: Tensor = pool(features.double(), rulebook).to(features.dtype)
    return made


def coords_of(tensor: Any) -> Coords:
    """The coordinates of an spconv-style sparse tensor."""
    return Coords(tensor.indices, tensor.spatial_shape, tensor.batch_size)


def dense(
    features: Tensor, indices: Tensor, spatial_shape: Sequence[int], batch_size: int
) -> Tensor:
    """`bevquant_sparse.to_dense` of integers or floats, in the memory order of `int8_to_dense`."""
    if not features.is_floating_point():
        return int8_to_dense(features, indices, spatial_shape, batch_size)
    sizes = [int(batch_size), *(int(size) for size in spatial_shape)]
    if len(indices):
        low, high = indices.amin(0).tolist(), indices.amax(0).tolist()
        if min(low) < 0 or any(h >= size for h, size in zip(high, sizes, strict=True)):
            raise ValueError(
                f"to_dense: coordinates {low} … {high} lie outside of batch size and grid {sizes}"
            )
    grid = features.new_zeros(*sizes[:-1], features.shape[1], sizes[-1])
    grid.movedim(-2, -1)[indices.long().unbind(1)] = features
    return grid.movedim(-2, 1)
