"""A detector in another framework's code, as the commands take it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
from torch import nn

from bev_data.boxes import Detections
from bev_data.points import Frame


@dataclass(frozen=True, eq=False)
class ForeignDetector:
    """A network, and what lies in front of it and behind it.

    Attributes:
        network: A float model in eval mode.
        arguments: From a frame to the network's positional arguments.
        boxes: From the network's output for a frame to boxes; None where only maps are compared.
        classes: Names of the classes, by the numbers in `Detections.labels`; empty where unknown,
            and boxes are then not compared with labels.
        notes: What a user has to know: what was passed over in a checkpoint, stand-ins in use.
    """

    network: nn.Module
    arguments: Callable[[Frame], tuple[Any, ...]]
    boxes: Callable[[Any, Frame], Detections] | None = None
    classes: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()

    def class_name(self, number: int) -> str:
        """Name of a class, or its number as text where the detector names none."""
        return self.classes[number] if self.classes else str(number)


def sorted_detections(
    boxes: npt.NDArray[np.floating[Any]], scores: npt.NDArray[np.floating[Any]],
    labels: npt.NDArray[np.integer[Any]], velocities: npt.NDArray[np.floating[Any]] | None = None,
) -> Detections:  # fmt: skip
    """Boxes in any order and with any yaw as `Detections`; velocities of 0 where there are none."""
    order = np.argsort(-scores, kind="stable")
    rows = boxes[order].astype(np.float32)
    rows[:, 6] -= 2 * np.pi * np.floor((rows[:, 6] + np.pi) / (2 * np.pi))
    if velocities is None:
        velocities = np.zeros((len(rows), 2))
    return Detections(
        rows, scores[order].astype(np.float32), labels[order].astype(np.int64),
        velocities[order].astype(np.float32),
    )  # fmt: skip
