"""Sets of voxels of a graph, and the nodes that find them and their neighbours."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch

from bevquant_export.sparse._graph import Conv
from bevquant_export.sparse.portable._emit import Emitter, Settings
from bevquant_sparse import build_rulebook

__all__ = ["Sites", "Surroundings"]

Sizes = tuple[int, ...]


@dataclass(frozen=True, eq=False)
class Sites:
    """Voxels of one resolution.

    Attributes:
        voxels: Tensor int64 ``[rows, 4]``.
        grid: Spatial shape.
        maker: Node that made them, for names.
        known: Tables of neighbours by geometry, with the voxels of the result.
        map: Pillar map, once it is there: pillars, cells, each voxel's own cell.
    """

    voxels: str
    grid: Sizes
    maker: str
    known: dict[object, tuple[str, Sites]] = field(default_factory=dict)
    map: list[str] = field(default_factory=list)

    @property
    def rows(self) -> str:
        """Name of their number, for shapes."""
        return "voxels" if self.maker == "input" else f"voxels of {self.maker}"

    @property
    def column(self) -> int:
        """The axis along which pillars run: the shortest, of several the last."""
        return min(range(3), key=lambda axis: (self.grid[axis], -axis))


class Surroundings:
    """Neighbours of convolutions; what several of them need is written once.

    Args:
        emitter: Takes the nodes.
    """

    def __init__(self, emitter: Emitter) -> None:
        self.emitter = emitter
        self._strided: dict[str, tuple[Conv, Sizes, Sites, Sites]] = {}

    def given(self, grid: Sizes) -> Sites:
        """The voxels of the input, checked."""
        (voxels,) = self.emitter.call(
            "CheckedVoxels", ["coords", "batch_size"], "voxels", {"spatial_shape": grid}
        )
        return Sites(voxels, grid, "input")

    def map_of(self, sites: Sites) -> list[str]:
        """Tensors of the pillar map."""
        if not sites.map:
            made = self.emitter.call(
                f"PillarMap{sites.column}",
                [sites.voxels, "batch_size"],
                f"{sites.maker}.map",
                {"spatial_shape": sites.grid},
                made=3,
            )
            sites.map.extend(made)
        return sites.map

    def convolved(self, sites: Sites, conv: Conv) -> tuple[str, Sites]:
        """Table of rows that a convolution reads, and the voxels of its output.

        Raises:
            ValueError: The convolution cannot be: its node is named.
        """
        if conv.inverse:
            return self._inverse(sites, conv)
        # A 1×1×1 kernel of stride 1 without padding moves nothing, whatever its kind: rows stay.
        ones = (1, 1, 1)
        still = conv.kernel_size == conv.stride == ones and not any(conv.padding)
        subm = conv.subm or still
        key = (conv.kernel_size, conv.stride, conv.padding, conv.dilation, subm)
        padding, grid = _geometry(sites, conv, subm=subm)
        if key not in sites.known:
            sites.known[key] = self._forward(sites, conv, padding, grid, subm=subm)
        rows, made = sites.known[key]
        if not conv.subm and conv.rulebook:
            self._strided[conv.rulebook] = conv, padding, sites, made
        return rows, made

    def _forward(
        self, sites: Sites, conv: Conv, padding: Sizes, grid: Sizes, *, subm: bool
    ) -> tuple[str, Sites]:
        settings: Settings = {
            "kernel_size": conv.kernel_size,
            "stride": conv.stride,
            "padding": padding,
            "dilation": conv.dilation,
        }
        made = sites
        if not subm:
            (voxels,) = self.emitter.call(
                "StridedVoxels",
                [sites.voxels, "batch_size"],
                f"{conv.name}.voxels",
                {**settings, "output_spatial_shape": grid},
            )
            made = Sites(voxels, grid, conv.name)
        pillars, cells, _ = self.map_of(sites)
        (rows,) = self.emitter.call(
            f"Neighbours{sites.column}",
            [made.voxels, pillars, cells],
            f"{conv.name}.rows",
            {**settings, "spatial_shape": sites.grid},
        )
        return rows, made

    def _inverse(self, sites: Sites, conv: Conv) -> tuple[str, Sites]:
        if conv.rulebook not in self._strided:
            raise ValueError(
                f"{conv.name}: nothing to invert: no strided convolution before it has the "
                f"rulebook {conv.rulebook!r}"
            )
        partner, padding, before, behind = self._strided[conv.rulebook]
        if partner.kernel_size != conv.kernel_size:
            raise ValueError(f"{conv.name}: its kernel is not that of the one it inverts")
        if behind is not sites:
            raise ValueError(
                f"{conv.name} inverts {partner.name}, but does not read the voxels that it made"
            )
        key = ("inverse", conv.rulebook, partner.name)
        if key not in sites.known:
            pillars, cells, _ = self.map_of(sites)
            (rows,) = self.emitter.call(
                f"InverseNeighbours{sites.column}",
                [before.voxels, pillars, cells],
                f"{conv.name}.rows",
                {
                    "spatial_shape": sites.grid,
                    "kernel_size": partner.kernel_size,
                    "stride": partner.stride,
                    "padding": padding,
                    "dilation": partner.dilation,
                },
            )
            sites.known[key] = rows, before
        return sites.known[key]


def _geometry(sites: Sites, conv: Conv, *, subm: bool) -> tuple[Sizes, Sizes]:
    """Padding and grid of the output: those of the rulebook, which checks them too."""
    nothing = torch.zeros(0, 4, dtype=torch.int32)
    sizes = (conv.kernel_size, conv.stride, conv.padding, conv.dilation)
    try:
        rulebook = build_rulebook(nothing, sites.grid, *sizes, subm=subm, batch_size=1)
    except ValueError as error:
        raise ValueError(f"{conv.name}: {error}") from error
    return tuple(rulebook.padding), tuple(rulebook.out_shape)
