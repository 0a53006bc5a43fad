"""Sets of voxels of a graph, and the nodes that find them and their neighbours."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

from bevquant_export.voxels._emit import Settings
from bevquant_export.voxels._window import Sizes, Window


@dataclass(frozen=True, eq=False)
class VoxelSet:
    """Voxels of one resolution."""

    voxels: str  # Tensor int64 ``[rows, 4]``
    grid: Sizes  # Spatial shape
    maker: str  # Node that made them, for names
    # Tables of neighbours by geometry, with the voxels of the result
    known: dict[object, tuple[str, VoxelSet]] = field(default_factory=dict)
    # Pillar map, once it is there: pillars, cells, each voxel's own cell
    map: list[str] = field(default_factory=list)
    # Tensor int64 ``[3]`` that holds the spatial shape where it is no constant; `grid` is
    # then that of the example. Empty where it is one
    open: str = ""

    @property
    def shape(self) -> Sizes | str:
        """The spatial shape as functions take it."""
        return self.open or self.grid

    @property
    def rows(self) -> str:
        """Name of their number, for shapes."""
        return "voxels" if self.maker == "input" else f"voxels of {self.maker}"

    @property
    def column(self) -> int:
        """The axis along which pillars run: the shortest, of several the last."""
        return min(range(3), key=lambda axis: (self.grid[axis], -axis))


class Surroundings:
    """Neighbours of convolutions; shared nodes are written once.

    `behind`, for a grid that is a tensor: the output grid of a convolution of this padding.
    """

    def __init__(
        self,
        call: Callable[..., list[str]],
        batch_size: str = "batch_size",
        behind: Callable[[str, Window, Sizes], str] | None = None,
    ) -> None:
        self.call, self.batch_size, self.behind = call, batch_size, behind
        self._strided: dict[str, tuple[Window, Sizes, VoxelSet, VoxelSet]] = {}

    def given(
        self, grid: Sizes, coords: str = "coords", maker: str = "input", open: str = ""
    ) -> VoxelSet:
        """Voxels at coordinates, checked to lie in the grid."""
        name = "voxels" if maker == "input" else f"{maker}.voxels"
        settings: Settings = {"spatial_shape": open or grid}
        (voxels,) = self.call("CheckedVoxels", [coords, self.batch_size], name, settings)
        return VoxelSet(voxels, grid, maker, open=open)

    def map_of(self, voxel_set: VoxelSet) -> list[str]:
        """Tensors of the pillar map."""
        if not voxel_set.map:
            made = self.call(
                f"PillarMap{voxel_set.column}",
                [voxel_set.voxels, self.batch_size],
                f"{voxel_set.maker}.map",
                {"spatial_shape": voxel_set.shape},
                made=3,
            )
            voxel_set.map.extend(made)
        return voxel_set.map

    def convolved(self, voxel_set: VoxelSet, conv: Window) -> tuple[str, VoxelSet]:
        """Table of rows that a convolution reads, and the voxels of its output."""
        if conv.inverse:
            return self._inverse(voxel_set, conv)
        padding, grid = conv.output_on(voxel_set.grid)
        if conv.geometry not in voxel_set.known:
            voxel_set.known[conv.geometry] = self._forward(voxel_set, conv, padding, grid)
        rows, made = voxel_set.known[conv.geometry]
        if not conv.subm and conv.rulebook:
            self._strided[conv.rulebook] = conv, padding, voxel_set, made
        return rows, made

    def _forward(
        self, voxel_set: VoxelSet, conv: Window, padding: Sizes, grid: Sizes
    ) -> tuple[str, VoxelSet]:
        made = voxel_set
        if not conv.keeps_voxels:
            open = ""
            if voxel_set.open:
                assert self.behind is not None
                open = self.behind(voxel_set.open, conv, padding)
            (voxels,) = self.call(
                "StridedVoxels",
                [voxel_set.voxels, self.batch_size],
                f"{conv.name}.voxels",
                {**_settings(conv, padding), "output_spatial_shape": open or grid},
            )
            made = VoxelSet(voxels, grid, conv.name, open=open)
        rows = self._rows("Neighbours", made, voxel_set, _settings(conv, padding), conv.name)
        return rows, made

    def _inverse(self, voxel_set: VoxelSet, conv: Window) -> tuple[str, VoxelSet]:
        if conv.rulebook not in self._strided:
            raise ValueError(
                f"{conv.name}: nothing to invert: no strided convolution before it has the "
                f"rulebook {conv.rulebook!r}"
            )
        partner, padding, before, behind = self._strided[conv.rulebook]
        if partner.kernel_size != conv.kernel_size:
            raise ValueError(f"{conv.name}: its kernel is not that of the one it inverts")
        if behind is not voxel_set:
            raise ValueError(
                f"{conv.name} inverts {partner.name}, but does not read the voxels that it made"
            )
        key = ("inverse", conv.rulebook, partner.name)
        if key not in voxel_set.known:
            settings = _settings(partner, padding)
            rows = self._rows("InverseNeighbours", before, voxel_set, settings, conv.name)
            voxel_set.known[key] = rows, before
        return voxel_set.known[key]

    def _rows(
        self, function: str, made: VoxelSet, read: VoxelSet, settings: Settings, name: str
    ) -> str:
        """Table of the rows of `read` for each voxel of `made`."""
        pillars, cells, _ = self.map_of(read)
        inputs = [made.voxels, pillars, cells]
        settings = {**settings, "spatial_shape": read.shape}
        return self.call(f"{function}{read.column}", inputs, f"{name}.rows", settings)[0]


def _settings(conv: Window, padding: Sizes) -> Settings:
    return {
        "kernel_size": conv.kernel_size,
        "stride": conv.stride,
        "padding": padding,
        "dilation": conv.dilation,
    }
