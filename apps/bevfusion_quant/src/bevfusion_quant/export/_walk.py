"""One frame through the set, file by file, whatever executes them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from torch import Tensor

from bevfusion.model.camera import splat
from bevfusion_quant.export._files import LIDAR, POOLED, FilePart

if TYPE_CHECKING:
    from bevfusion.model import Batch, BEVFusion

__all__ = ["Execute", "walk"]

Execute = Callable[[FilePart, tuple[Any, ...]], Sequence[Tensor]]
"""A file and its inputs → its outputs."""


def walk(
    files: Sequence[FilePart], execute: Execute, batch: Batch, model: BEVFusion
) -> tuple[dict[str, tuple[Any, ...]], dict[str, Tensor]]:
    """Run the files one behind the other; the pooling to the bird's-eye view is done here.

    Args:
        files: In order.
        execute: Runs one.
        batch: Voxels, images and geometry of one frame.
        model: Says how many cells the pooled map has.

    Returns:
        The inputs of each file by its name, and every tensor between the files by its own.
    """
    inputs: dict[str, tuple[Any, ...]] = {}
    tensors: dict[str, Any] = {"features": batch.features, "coords": batch.coords}
    if batch.images is not None and batch.depth is not None:
        tensors |= {
            "images": batch.images, "flat_images": batch.images.flatten(0, 1),
            "depth": batch.depth, "flat_depth": batch.depth.flatten(0, 1),
        }  # fmt: skip
    for file in files:
        if POOLED in file.inputs.values():
            tensors[POOLED] = _pooled(tensors, batch, model)
        args = tuple(tensors[name] for name in file.inputs.values())
        inputs[file.name] = (*args, batch.batch_size) if file.name == LIDAR else args
        made = execute(file, inputs[file.name])
        tensors |= zip(file.outputs.values(), made, strict=True)
    return inputs, tensors


def _pooled(tensors: dict[str, Any], batch: Batch, model: BEVFusion) -> Tensor:
    transform: Any = model.camera["vtransform"]
    context = tensors["context"].permute(0, 3, 1, 2)
    assert batch.cells is not None
    pooled = splat(
        tensors["depth_weights"], context, batch.cells, batch.batch_size, transform.counts
    )
    return pooled.contiguous()
