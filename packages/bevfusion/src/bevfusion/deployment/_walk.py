"""The files in sequence, and the tensors between them."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import Tensor

from bevfusion.deployment._autoware import node_box
from bevfusion.deployment._files import LIFTED, PADDED, PILLARS, POOLED, FilePart
from bevfusion.model import Batch, Detector
from bevfusion.model.camera import splat
from bevfusion.model.head import Detections

Execute = Callable[[FilePart, tuple[Any, ...]], Sequence[Tensor]]
"""A file and its inputs → its outputs."""

STAGE_ENDS = {
    "neck": "neck", "camera": "camera", "lidar": "lidar", "fused": "fuser", "middle": "decoder",
}  # fmt: skip
"""What lies between the files at the end of a stage of the model, to the stage."""

BETWEEN = {POOLED: LIFTED, PADDED: frozenset({"features"}), "lidar": frozenset({PILLARS})}
"""Tensors that `walk` makes where no file does, and those that they are made of."""


def walk(
    files: Sequence[FilePart],
    execute: Execute,
    batch: Batch,
    model: Detector,
    *,
    known: Mapping[str, Tensor] | None = None,
    wanted: Iterable[str] | None = None,
) -> tuple[dict[str, tuple[Any, ...]], dict[str, Tensor]]:
    """Run the files in sequence; the pooling to the bird's-eye view is done here.

    Args:
        files: In order.
        execute: Runs one.
        batch: Voxels, images and geometry of one frame.
        model: Gives the number of cells of the pooled map.
        known: Tensors made before by the same parts of the model.
        wanted: Tensors to make, with their producers only; all by default.

    Returns:
        The inputs of each file by its name, as far as they are made, and every tensor between the
        files by name.
    """
    inputs: dict[str, tuple[Any, ...]] = {}
    tensors: dict[str, Any] = {"features": batch.features, "coords": batch.coords}
    if batch.images is not None and batch.depth is not None:
        tensors |= {
            "images": batch.images, "flat_images": batch.images.flatten(0, 1),
            "depth": batch.depth, "flat_depth": batch.depth.flatten(0, 1),
        }  # fmt: skip
    tensors |= known or {}
    makes = {name for file in files for name in file.outputs.values()}
    needed = _needed(files, makes if wanted is None else wanted, tensors)
    for file in files:
        for name in needed.intersection(file.inputs.values(), BETWEEN).difference(tensors):
            if BETWEEN[name].issubset(tensors):
                tensors[name] = _MAKERS[name](tensors, batch, model)
        if not tensors.keys() >= set(file.inputs.values()):
            continue
        args = tuple(tensors[name] for name in file.inputs.values())
        inputs[file.name] = (*args, batch.batch_size) if file.sparse else args
        if needed.intersection(file.outputs.values()):
            made = execute(file, inputs[file.name])
            tensors |= zip(file.outputs.values(), made, strict=True)
    return inputs, tensors


def _needed(files: Sequence[FilePart], wanted: Iterable[str], known: Mapping[str, Any]) -> set[str]:
    """Missing tensors that `wanted` or its producers read."""
    needed = set(wanted) - known.keys()
    # Backwards: what a needed file reads is needed too.
    for file in reversed(files):
        for name in needed.intersection(BETWEEN):
            needed |= BETWEEN[name] - known.keys()
        if needed.intersection(file.outputs.values()):
            needed |= set(file.inputs.values()) - known.keys()
    return needed


@contextmanager
def watching(model: Detector) -> Iterator[dict[str, Tensor]]:
    """Collect the tensors between the files from the model's own next run: `known`, for `walk`.

    Of a model of `build_model`, whose dense weights lie channels last, these equal the outputs of
    the files' parts bit for bit, in any memory order.
    """
    found: dict[str, Tensor] = {}

    def keep(name: str, value: Any) -> None:
        if name not in found:
            found[name] = (value[0] if isinstance(value, tuple | list) else value).contiguous()

    built: Any = model
    makers: dict[str, Any] = {}
    with ExitStack() as stack:
        if "camera" in model.parts:
            makers["camera"] = view = built.camera["vtransform"]
            hook = view.downsample.register_forward_pre_hook(lambda _, args: keep(POOLED, args))
            stack.callback(hook.remove)
        if "lidar" in model.parts:
            makers["lidar"] = built.lidar["backbone"]
        if "decoder" in model.parts:
            makers["middle"] = model.get_submodule(model.stages["decoder"])
        for name, module in makers.items():
            hook = module.register_forward_hook(lambda _, __, made, name=name: keep(name, made))
            stack.callback(hook.remove)
        yield found


def _scattered(tensors: dict[str, Any], batch: Batch, model: Detector) -> Tensor:
    # The padding has no cells.
    filled = tensors[PILLARS][: len(batch.coords)]
    scattered: Tensor = model.lidar["backbone"](filled, batch.coords, batch.batch_size)
    return scattered


def _padded(tensors: dict[str, Any], batch: Batch, model: Detector) -> Tensor:
    features: Tensor = tensors["features"]
    most = model.lidar["voxelize"].max_voxels[1]
    return torch.cat([features, features.new_zeros(most - len(features), *features.shape[1:])])


def _pooled(tensors: dict[str, Any], batch: Batch, model: Detector) -> Tensor:
    built: Any = model
    transform = built.camera["vtransform"]
    context = tensors["context"].permute(0, 3, 1, 2)
    assert batch.cells is not None
    pooled = splat(
        tensors["depth_weights"], context, batch.cells, batch.batch_size, transform.counts
    )
    return pooled.contiguous()


_MAKERS = {POOLED: _pooled, PADDED: _padded, "lidar": _scattered}


def between(files: Sequence[FilePart]) -> set[str]:
    """Tensors that a file reads or a stage ends with."""
    return {name for file in files for name in file.inputs.values()}.union(STAGE_ENDS)


def file_boxes(model: Detector, tensors: Mapping[str, Tensor]) -> Detections:
    """Boxes from the outputs of the files, of BEVFusion's head.bbox with scores multiplied out.

    Args:
        model: Whose head decodes.
        tensors: That `walk` made.
    """
    if model.kind != "bevfusion":
        maps = dict(tensors)
        if "node_dim_0" in maps:
            maps["dim_0"], maps["rot_0"] = node_box(maps["node_dim_0"], maps["node_rot_0"])
        boxes: Detections = model.head.decode(maps)[0]
        return boxes
    score = tensors["score"]
    outputs: dict[str, Any] = {name: tensors[name] for name in ("rot", "dim", "height", "vel")}
    outputs["center"] = tensors["reg"]
    outputs["query_labels"] = score.argmax(1)
    outputs["query_heatmap_score"] = score
    outputs["heatmap"] = torch.full_like(score, torch.inf)  # of which the sigmoid is 1
    found: Detections = model.head.decode(outputs)[0]
    return found
