"""A detector in another framework's code, as the commands take it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

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
