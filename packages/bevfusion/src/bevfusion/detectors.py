"""Detectors by name: building, training and evaluation of each kind.

A row of `DETECTORS` holds all that a program needs to know of a model. Sizes name their row by
`kind`. `find_detector` also makes the row of a detector in its own code.

Example:
    >>> from bevfusion.detectors import DETECTORS, build_detector
    >>> list(DETECTORS)
    ['bevfusion', 'centerpoint', 'centerpoint-pillars']
    >>> sizes = DETECTORS["centerpoint-pillars"].configs["tiny"]
    >>> build_detector(sizes, ("lidar", "decoder")).parts
    ('lidar', 'decoder')
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Mapping
from contextlib import redirect_stdout
from dataclasses import dataclass
from io import StringIO
from pathlib import Path
from types import MappingProxyType
from typing import Any

from bev_data import InputError
from bevfusion.centerpoint import (
    CENTER_OBJECTIVE,
    PILLAR_CONFIGS,
    VOXEL_CONFIGS,
    build_centerpoint,
    example_voxels,
)
from bevfusion.frameworks import ForeignModel, ForeignSizes, load_detector, user_error
from bevfusion.model import CONFIGS, PARTS, Batch, Detector, Sizes, build_model, example_batch
from bevfusion.training import TRANSFUSION_OBJECTIVE, Objective

__all__ = [
    "DETECTORS",
    "DetectorKind",
    "build_detector",
    "example_of",
    "find_detector",
    "is_foreign",
    "kind_of",
]

_LOG = logging.getLogger(__name__)


@dataclass(frozen=True)
class DetectorKind:
    """One row of the table.

    Attributes:
        configs: Sizes by name.
        build: Maps sizes and parts to a float model.
        example: A small batch for sizes, for capturing; None for a detector in its own code, which
            is captured with a frame.
        parts: Parts of a whole model, in the order of execution.
        objective: Training objective; None for a detector in its own code.
        head_in_float: Whether the head stays float when everything is quantized.
    """

    configs: Mapping[str, Any]
    build: Callable[[Any, Iterable[str]], Detector]
    example: Callable[[Any], Batch] | None
    parts: tuple[str, ...]
    objective: Objective | None
    head_in_float: bool


def _centerpoint(configs: Mapping[str, Any]) -> DetectorKind:
    parts = ("lidar", "decoder", "head")
    return DetectorKind(configs, build_centerpoint, example_voxels, parts, CENTER_OBJECTIVE, False)


DETECTORS: Mapping[str, DetectorKind] = MappingProxyType(
    {
        "bevfusion": DetectorKind(
            CONFIGS, build_model, example_batch, PARTS, TRANSFUSION_OBJECTIVE, True
        ),
        "centerpoint": _centerpoint(VOXEL_CONFIGS),
        "centerpoint-pillars": _centerpoint(PILLAR_CONFIGS),
    }
)
"""By the name that `--model` takes."""


def is_foreign(name: str) -> bool:
    """Whether a name belongs to a detector in its own code, for `load_detector`."""
    return ":" in name


def find_detector(name: str, weights: Path | None = None) -> DetectorKind:
    """The row of a detector by name; a detector in its own code is loaded.

    Args:
        name: A name in `DETECTORS`, or for `bevfusion.frameworks.load_detector`.
        weights: The checkpoint of a detector in its own code. Default: its own weights.

    Raises:
        InputError: An unknown detector, or one that cannot be loaded.
    """
    if is_foreign(name):
        try:
            with redirect_stdout(StringIO()):  # mmengine prints
                sizes = ForeignSizes(name, load_detector(name, weights))
        except InputError:
            raise
        except Exception as error:
            raise InputError(f"--model {name}: building it raised {user_error(error)}") from error
        for note in sizes.detector.notes:
            _LOG.info("--model %s: %s", name, note)
        return kind_of(sizes)
    if name not in DETECTORS:
        raise InputError(
            f"--model {name}: expected one of {', '.join(DETECTORS)}, mmdet3d:CONFIG.py, "
            "openpcdet:CONFIG.yaml or package.module:function"
        )
    return DETECTORS[name]


def kind_of(sizes: Sizes) -> DetectorKind:
    """The row of these sizes."""
    if isinstance(sizes, ForeignSizes):
        detector = sizes.detector
        return DetectorKind(
            {"nuscenes": sizes}, lambda *_: ForeignModel(detector), None, ("network",), None, False
        )
    return DETECTORS[sizes.kind]


def build_detector(sizes: Sizes, parts: Iterable[str] | None = None) -> Detector:
    """A float model of the given sizes, in eval mode.

    Args:
        sizes: Sizes of any kind.
        parts: Parts to build. Default: all.

    Raises:
        InputError: Parts that cannot run together, or sizes that contradict each other.
    """
    kind = kind_of(sizes)
    return kind.build(sizes, kind.parts if parts is None else parts)


def example_of(sizes: Sizes, like: Batch | None = None) -> Batch:
    """A small batch for capturing a model of these sizes.

    Args:
        sizes: Sizes of any kind.
        like: The example has the sensors of this batch. Default: all sensors. For a detector in its
            own code the example is this batch.

    Raises:
        ValueError: A detector in its own code without a batch.
    """
    make = kind_of(sizes).example
    if make is None:
        if like is None:
            raise ValueError(f"{sizes.name}: a batch is needed to trace a detector in other code")
        return like
    example = make(sizes)
    absent: dict[str, Any] = {
        name: None for name, value in (like or example)._asdict().items() if value is None
    }
    return example._replace(**absent)
