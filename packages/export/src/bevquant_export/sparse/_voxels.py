"""Coordinates of one resolution, and the pairs of convolutions on them."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import Tensor

from bevquant_export.sparse._graph import Conv, Pool
from bevquant_int8sim import plan_rulebook
from bevquant_sparse import Rulebook


@dataclass(frozen=True, eq=False)
class Voxels:
    """Voxels of a frame.

    Attributes:
        indices: int32 ``[rows, 4]``: batch, then the file's order.
        spatial_shape: Grid.
        batch_size: Frames.
        known: Rulebooks built so far, by geometry, with the voxels of their output.
    """

    indices: Tensor
    spatial_shape: tuple[int, ...]
    batch_size: int
    known: dict[object, tuple[Rulebook, Voxels]] = field(default_factory=dict)


def convolved(
    voxels: Voxels, conv: Conv | Pool, strided: dict[str, tuple[Rulebook, Voxels]]
) -> tuple[Rulebook, Voxels]:
    """Pairs of a convolution and the voxels of its output.

    Args:
        voxels: Those of its input.
        conv: The convolution.
        strided: Rulebook key to the pairs and input voxels of strided convolutions; added to.

    Raises:
        ValueError: Coordinates outside of the grid, or an inverse convolution without a partner.
    """
    if conv.inverse:
        if conv.rulebook not in strided:
            raise ValueError(
                f"{conv.name}: nothing to invert: no strided convolution before it has the "
                f"rulebook {conv.rulebook!r}"
            )
        rulebook, made = strided[conv.rulebook]
        if rulebook.kernel_size != conv.kernel_size:
            raise ValueError(f"{conv.name}: its kernel is not that of the one it inverts")
        rulebook = rulebook.inverse()
    else:
        rulebook, made = _built(voxels, conv)
        if not conv.subm and conv.rulebook:
            strided[conv.rulebook] = (rulebook, voxels)
    return rulebook, made


def refuse_more(voxels: Voxels, conv: Conv) -> None:
    """Raise where a frame has more voxels than the bound of a convolution's output.

    Raises:
        ValueError: The message states the bound and what to do.
    """
    frames = torch.bincount(voxels.indices[:, 0].long())
    most = int(frames.max()) if len(frames) else 0
    if most > conv.output_bound:
        raise ValueError(
            f"{conv.name}: a frame has {most} output voxels, and the file's output_bound is "
            f"{conv.output_bound}: the engine would drop the rest; export with batches that hold "
            "such frames, or with more head_room"
        )


def _built(voxels: Voxels, conv: Conv | Pool) -> tuple[Rulebook, Voxels]:
    # A 1×1×1 kernel of stride 1 without padding moves nothing, whatever its kind: rows stay.
    ones = (1, 1, 1)
    still = conv.kernel_size == conv.stride == ones and not any(conv.padding)
    subm = conv.subm or still
    key = (conv.kernel_size, conv.stride, conv.padding, conv.dilation, subm)
    if key not in voxels.known:
        try:
            rulebook = plan_rulebook(
                voxels.indices,
                voxels.spatial_shape,
                conv.kernel_size,
                conv.stride,
                conv.padding,
                conv.dilation,
                subm=subm,
                batch_size=voxels.batch_size,
            )
        except ValueError as error:
            raise ValueError(f"{conv.name}: {error}") from error
        made = voxels
        if not subm:
            made = Voxels(rulebook.out_indices, rulebook.out_shape, voxels.batch_size)
        voxels.known[key] = rulebook, made
    return voxels.known[key]
