"""What is handed to the page must fit together; what does not is named."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    from bevfusion_quant.report._content import (
        ReportBoxes,
        ReportContent,
        ReportScene,
        ReportStage,
    )

__all__ = ["check"]


def check(content: ReportContent) -> None:
    """Refuse content that cannot be drawn.

    Raises:
        ValueError: Naming the field, what was expected and what came.
    """
    names = [stage.name for stage in content.stages]
    twice = sorted({name for name in names if names.count(name) > 1})
    if twice:
        raise ValueError(f"two stages are named {twice[0]!r}: give each stage its own name")
    for stage in content.stages:
        _check_stage(stage)
    if content.scene is not None:
        _check_scene(content.scene)
    for index, values in enumerate(content.quantizers):
        if not values.paths:
            raise ValueError(f"quantizers[{index}].paths is empty: expected at least one path")


def _check_stage(stage: ReportStage) -> None:
    where = f"stage {stage.name!r}"
    wanted = np.shape(stage.float_map)
    allowed = (2,) if stage.extent is not None else (2, 3)
    if len(wanted) not in allowed or 0 in wanted:
        shapes = "[X, Y]" if stage.extent is not None else "[rows, columns] or [cameras, …]"
        raise ValueError(f"{where}: float_map has shape {wanted}, expected {shapes}, none empty")
    for name in ("quantized_map", "difference_map"):
        values = getattr(stage, name)
        if values is not None and np.shape(values) != wanted:
            raise ValueError(
                f"{where}: {name} has shape {np.shape(values)}, float_map {wanted}: "
                "reduce both the same way"
            )
    if stage.extent is not None:
        _check_extent(where, stage.extent)


def _check_scene(scene: ReportScene) -> None:
    shape = np.shape(scene.points)
    if len(shape) != 2 or shape[1] < 3:
        raise ValueError(f"scene.points has shape {shape}, expected [points, 3 or more]")
    _check_extent("scene", scene.extent)
    for name in ("labels", "float_detections", "quantized_detections", "integer_detections"):
        boxes: ReportBoxes | None = getattr(scene, name)
        if boxes is not None:
            _check_boxes(f"scene.{name}", boxes)


def _check_extent(where: str, extent: Any) -> None:
    left, bottom, right, top = extent
    if not (left < right and bottom < top):
        raise ValueError(
            f"{where}: extent is {tuple(extent)}, expected smallest x, smallest y, "
            "largest x, largest y"
        )


def _check_boxes(where: str, boxes: ReportBoxes) -> None:
    shape = np.shape(boxes.boxes)
    if len(shape) != 2 or shape[1] != 7:
        raise ValueError(f"{where}.boxes has shape {shape}, expected [objects, 7]")
    for name in ("names", "scores"):
        values = getattr(boxes, name)
        if values is not None and len(values) != shape[0]:
            raise ValueError(
                f"{where}: {shape[0]} boxes but {len(values)} {name}: one is needed for each"
            )
