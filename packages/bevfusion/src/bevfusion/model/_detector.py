"""The parts of any detector and their paths, for quantization, deployment and evaluation."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from types import MappingProxyType
from typing import Any, ClassVar, Protocol

from torch import nn

from bev_data import InputError
from bev_data.boxes import Detections
from bev_data.points import Frame

PARTS = ("camera", "lidar", "fuser", "decoder", "head")

PART_PATHS = {
    "camera": "encoders.camera",
    "lidar": "encoders.lidar",
    "fuser": "fuser",
    "decoder": "decoder",
    "head": "heads.object",
}
"""The module that holds each part; the model's entries of a state dict begin with its path."""

STAGES = {
    "camera": "encoders.camera.vtransform",
    "lidar": "encoders.lidar.backbone",
    "fuser": "fuser",
    "decoder": "decoder.neck",
    "head": "heads.object",
}
"""The module whose output is the part's: a map [batch, channels, x, y], of the head a dict."""


def check_parts(parts: Iterable[str]) -> tuple[str, ...]:
    """The parts in the order in which they run.

    Raises:
        InputError: An unknown part, or parts that cannot run together; the message says why.
    """
    given = set(parts)
    unknown = sorted(given - set(PARTS))
    if unknown:
        raise InputError(f"unknown parts {unknown}: the model consists of {', '.join(PARTS)}")
    chosen = tuple(part for part in PARTS if part in given)
    sensors = given & {"camera", "lidar"}
    problem = None
    if not sensors:
        problem = "none of them reads a sensor: add camera or lidar"
    elif len(sensors) == 2 and "fuser" not in given:
        problem = "camera and lidar make two maps, and nothing joins them: add fuser, or drop one"
    elif len(sensors) == 1 and "fuser" in given:
        missing = ({"camera", "lidar"} - sensors).pop()
        problem = f"the fuser joins two maps: add {missing}, or drop fuser"
    elif "head" in given and "decoder" not in given:
        problem = "the head reads the decoder's map: add decoder, or drop head"
    if problem is not None:
        raise InputError(f"the parts {', '.join(chosen) or '(none)'} cannot run alone: {problem}")
    return chosen


class Sizes(Protocol):
    """Sizes of a detector of any kind."""

    @property
    def name(self) -> str:
        """Unique among all kinds; the weights that come with the package have it."""

    @property
    def kind(self) -> str:
        """Name of the detector in `bevfusion.detectors.DETECTORS`."""

    @property
    def lidar(self) -> Any:
        """The grid: `extent`, `sparse_shape`, `in_channels`, `zyx`, `reads_points`."""

    @property
    def head(self) -> Any:
        """The head's sizes: `classes`, `map_size`, `cell_size`, `origin`."""


class Detector(nn.Module):
    """A model made of parts, called with the members of a `Batch`.

    The tables are keyed by the names in `PARTS`, in the order in which the parts run.

    Attributes:
        kind: Name of the detector in `bevfusion.detectors.DETECTORS`.
        part_paths: The modules that hold each part; entries of a state dict begin with their paths.
        stages: The module whose output is the part's map, or of the head its dict.
        folded_apart: Modules with a forward of their own, in which batch norms are folded one after
            the other.
        chooses: Those of them whose outputs depend on choices as small as rounding, so that they
            cannot be compared one by one.
        kept_in_float: Modules that quantizing the whole model leaves in float, and why.
        map_axes: Of bird's-eye maps behind batch and channels: "xy" or "yx".
    """

    part_paths: ClassVar[Mapping[str, tuple[str, ...]]]
    stages: ClassVar[Mapping[str, str]]
    folded_apart: ClassVar[tuple[str, ...]]
    chooses: ClassVar[tuple[str, ...]] = ()
    kept_in_float: Mapping[str, str] = MappingProxyType({})
    map_axes: ClassVar[str] = "xy"
    kind: str

    @property
    def parts(self) -> tuple[str, ...]:
        """The parts that are built, in the order in which they run."""
        built = {path for path, _ in self.named_modules()}
        return tuple(part for part, paths in self.part_paths.items() if built.issuperset(paths))

    @property
    def lidar(self) -> Any:
        """The LiDAR branch by name: voxelize and backbone.

        Raises:
            LookupError: It is not built.
        """
        raise NotImplementedError

    @property
    def head(self) -> Any:
        """The detection head, whose `decode` turns the model's outputs into boxes.

        Raises:
            LookupError: It is not built.
        """
        raise NotImplementedError

    @property
    def finds_boxes(self) -> bool:
        """Whether its outputs become boxes."""
        return "head" in self.parts

    def boxes(self, output: Any, frame: Callable[[], Frame]) -> Detections:
        """The boxes of one frame.

        Args:
            output: What the model returned for the frame.
            frame: Returns the frame, for a model that needs it.
        """
        found: Detections = self.head.decode(output)[0]
        return found

    def arguments(self, frame: Frame) -> tuple[Any, ...] | None:
        """The arguments of a call; None of a model that takes a `Batch`."""
        return None

    def encode_lidar(self, features: Any, coords: Any, batch_size: int) -> Any:
        """The map of the LiDAR branch, which `forward` makes of a batch's voxels."""
        return self.lidar["backbone"](features, coords, batch_size)

    def paths_outside(self, chosen: Iterable[str]) -> tuple[str, ...]:
        """The modules of all parts but the chosen ones: `exclude` of `bevquant_qnn.QuantConfig`.

        Args:
            chosen: Parts to quantize.

        Raises:
            InputError: A chosen part that the model does not have.

        Example:
            >>> from bevfusion.model import CONFIGS, build_model
            >>> model = build_model(CONFIGS["tiny"], ("camera", "decoder", "head"))
            >>> model.paths_outside(("decoder",))
            ('encoders.camera', 'heads.object')
        """
        wanted = set(chosen)
        absent = sorted(wanted.difference(self.parts))
        if absent:
            raise InputError(
                f"parts {absent} cannot be quantized: the model has {', '.join(self.parts)} only"
            )
        left = (self.part_paths[part] for part in self.parts if part not in wanted)
        return tuple(path for paths in left for path in paths)
