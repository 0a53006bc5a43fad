"""BEVFusion under mit-bevfusion's module names, its inputs, and the parts of any detector."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple, Protocol

import torch
from torch import Tensor, fx, nn

from bev_data import InputError
from bev_data.boxes import Detections
from bev_data.points import Frame

if TYPE_CHECKING:
    from collections.abc import Mapping

PARTS = ("camera", "lidar", "fuser", "decoder", "head")

PART_PATHS = {
    "camera": "encoders.camera",
    "lidar": "encoders.lidar",
    "fuser": "fuser",
    "decoder": "decoder",
    "head": "heads.object",
}
"""The module that holds each part; the model's entries of a state dict begin with its path."""


class FlowStep(NamedTuple):
    """A module between the sensors and the boxes."""

    name: str
    part: str
    path: str
    # Values: images, depth, voxels, or outputs of other steps.
    inputs: tuple[str, ...]
    # Name of its output. The last step of a stage has the stage's name.
    output: str


_STEPS = (
    FlowStep("camera backbone", "camera", "encoders.camera.backbone", ("images",), "pixels"),
    FlowStep("camera neck", "camera", "encoders.camera.neck", ("pixels",), "neck"),
    FlowStep("view transform", "camera", "encoders.camera.vtransform", ("neck", "depth"), "camera"),
    FlowStep("LiDAR encoder", "lidar", "encoders.lidar.backbone", ("voxels",), "lidar"),
    FlowStep("fuser", "fuser", "fuser", ("camera", "lidar"), "fuser"),
    FlowStep("decoder backbone", "decoder", "decoder.backbone", ("fuser",), "decoded"),
    FlowStep("decoder neck", "decoder", "decoder.neck", ("decoded",), "decoder"),
    FlowStep("head", "head", "heads.object", ("decoder",), "head"),
)
STAGES = {step.part: step.path for step in _STEPS}
"""The module whose output is the part's: a map [batch, channels, x, y], of the head a dict."""


def check_parts(parts: Iterable[str]) -> tuple[str, ...]:
    """The parts in the order in which they run."""
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
        steps: Modules in the order of execution; none of a detector in other code.
        stages: The module whose output is the part's map, or of the head its dict.
        folded_apart: Modules with a forward of their own, in which batch norms are folded one after
            the other.
        chooses: Those of them whose outputs depend on choices as small as rounding, so that they
            cannot be compared one by one.
        kept_in_float: Modules that quantizing the whole model leaves in float, and why.
        map_axes: Of bird's-eye maps behind batch and channels: "xy" or "yx".
    """

    part_paths: ClassVar[Mapping[str, tuple[str, ...]]]
    steps: tuple[FlowStep, ...] = ()
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
    def flow(self) -> tuple[FlowStep, ...]:
        """`steps` of the built parts. In place of an absent fuser's map a step reads the sensor's.

        Example:
            >>> from bevfusion.model import CONFIGS, build_model
            >>> [s.inputs for s in build_model(CONFIGS["tiny"], ("lidar", "decoder")).flow]
            [('voxels',), ('lidar',), ('decoded',)]
        """
        parts = self.parts
        alone = {} if "fuser" in parts else {"fuser": parts[0]}
        return tuple(
            step._replace(inputs=tuple(alone.get(name, name) for name in step.inputs))
            for step in self.steps
            if step.part in parts
        )

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
            output: The model's output for the frame.
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


class Batch(NamedTuple):
    """Positional inputs of `BEVFusion`: voxels, and for the camera branch images with geometry.

    Attributes:
        features: float [voxels, channels]: mean x, y, z in metres, intensity, time.
        coords: int32 [voxels, 4]: batch, x, y, z in voxels.
        batch_size: Number of frames.
        images: float [batch, cameras, 3, height, width], normalised.
        depth: float [batch, cameras, 1, height, width]: metres to the LiDAR point that a pixel
            shows, 0 where it shows none.
        cells: int64 [batch · cameras · depth bins · feature height · feature width]: the cell of
            the bird's-eye view, batch included, that each frustum point lies in; −1 outside.
    """

    features: Tensor
    coords: Tensor
    batch_size: int
    images: Tensor | None = None
    depth: Tensor | None = None
    cells: Tensor | None = None

    def to(self, device: torch.device | str) -> Batch:
        """The same with its tensors on a device."""
        tensors: dict[str, Any] = {
            name: value.to(device)
            for name, value in self._asdict().items()
            if isinstance(value, Tensor)
        }
        return self._replace(**tensors)


_STRIDE = 8  # of the feature map that is lifted

fx.wrap("check_camera")


class BEVFusion(Detector):
    """mit-bevfusion's detector, whole or in part: sensors, fuser, decoder, head.

    `encoders.camera.{backbone, neck, vtransform}`, `encoders.lidar.{voxelize, backbone}`, `fuser`,
    `decoder.{backbone, neck}` and `heads.object`; parts that are not built are absent.
    `build_model` makes it. Called with the members of a `Batch`, it returns the head's dict of
    tensors, or without a head the last part's bird's-eye-view map, float [batch, channels, x, y].

    Args:
        camera: backbone, neck and vtransform.
        lidar: voxelize and backbone.
        fuser: Joins the two maps; required with both sensors.
        decoder: backbone and neck.
        head: Returns the dict.
    """

    part_paths = MappingProxyType({part: (PART_PATHS[part],) for part in PARTS})
    steps = _STEPS
    stages = MappingProxyType(STAGES)
    folded_apart = tuple(step.path for step in _STEPS)
    chooses = ("heads.object",)
    kind = "bevfusion"

    def __init__(
        self,
        *,
        camera: Mapping[str, nn.Module] | None = None,
        lidar: Mapping[str, nn.Module] | None = None,
        fuser: nn.Module | None = None,
        decoder: Mapping[str, nn.Module] | None = None,
        head: nn.Module | None = None,
    ) -> None:
        super().__init__()
        sensors = {"camera": camera, "lidar": lidar}
        self.encoders = nn.ModuleDict(
            {name: nn.ModuleDict(parts) for name, parts in sensors.items() if parts is not None}
        )
        self.fuser = fuser
        self.decoder = None if decoder is None else nn.ModuleDict(decoder)
        self.heads = None if head is None else nn.ModuleDict({"object": head})

    @property
    def camera(self) -> nn.ModuleDict:
        """The camera branch: backbone, neck and vtransform."""
        return self._sensor("camera")

    @property
    def lidar(self) -> nn.ModuleDict:
        """The LiDAR branch: voxelize and backbone."""
        return self._sensor("lidar")

    @property
    def head(self) -> Any:
        """The detection head, whose `decode` turns the model's outputs into boxes."""
        if self.heads is None:
            raise LookupError(f"this model has no head, only {', '.join(self.parts)}")
        return self.heads["object"]

    def forward(
        self,
        features: Tensor | None,
        coords: Tensor | None,
        batch_size: int,
        images: Tensor | None = None,
        depth: Tensor | None = None,
        cells: Tensor | None = None,
    ) -> Any:
        """Run the parts that are built.

        Args:
            features: float [voxels, channels]; may be None without a LiDAR branch.
            coords: int32 [voxels, 4] as batch, x, y, z.
            batch_size: Number of frames.
            images: float [batch, cameras, 3, height, width]; read by the camera branch alone.
            depth: float [batch, cameras, 1, height, width] in metres.
            cells: int64 [batch · cameras · depth bins · height / 8 · width / 8], from
                `camera["vtransform"].cells`.

        Raises:
            InputError: An input is missing that one of the branches reads, or the camera branch's
                inputs do not fit each other or its configuration.
        """
        maps = []
        if "camera" in self.encoders:
            require("camera", images=images, depth=depth, cells=cells)
            maps.append(self._camera_map(images, depth, cells, batch_size))
        if "lidar" in self.encoders:
            require("LiDAR", features=features, coords=coords)
            maps.append(self.encode_lidar(features, coords, batch_size))
        x = maps[0] if self.fuser is None else self.fuser(*maps)
        if self.decoder is not None:
            x = self.decoder["neck"](self.decoder["backbone"](x))
        return x if self.heads is None else self.heads["object"](x)

    def _camera_map(self, images: Any, depth: Any, cells: Any, batch_size: int) -> Any:
        camera = self.camera
        frustum: Any = camera["vtransform"].frustum
        check_camera(images, depth, cells, batch_size, frustum)
        x = camera["neck"](camera["backbone"](images.flatten(0, 1)))[0]
        return camera["vtransform"](x.unflatten(0, (batch_size, -1)), depth, cells)

    def _sensor(self, name: str) -> nn.ModuleDict:
        if name not in self.encoders:
            raise LookupError(f"this model has no {name} branch, only {', '.join(self.parts)}")
        sensor = self.encoders[name]
        assert isinstance(sensor, nn.ModuleDict)
        return sensor


def require(branch: str, **inputs: Tensor | None) -> None:
    """Refuse a call without an input that the branch reads."""
    missing = [name for name, value in inputs.items() if value is None]
    if missing:
        raise InputError(
            f"the {branch} branch reads {', '.join(inputs)}, and {', '.join(missing)} is missing: "
            f"give the whole Batch, or build the model without its {branch.lower()} part"
        )


def check_camera(
    images: Tensor, depth: Tensor, cells: Tensor, batch_size: int, frustum: Tensor
) -> None:
    """Refuse camera inputs whose shapes do not fit each other or the frustum."""
    bins, rows, columns = frustum.shape[:3]
    height, width = rows * _STRIDE, columns * _STRIDE
    size = f"{height}, {width}"
    if images.ndim != 5 or images.shape[0] != batch_size or images.shape[1] < 1:
        raise InputError(
            f"images are {list(images.shape)}: expected [{batch_size}, cameras, 3, {size}], one "
            "entry for each frame of the batch and at least one camera"
        )
    if tuple(images.shape[2:]) != (3, height, width):
        raise InputError(
            f"images are {list(images.shape)}: this configuration takes 3 channels of "
            f"{height} × {width} pixels; prepare_cameras brings images of any size to that"
        )
    cameras = images.shape[1]
    if tuple(depth.shape) != (batch_size, cameras, 1, height, width):
        raise InputError(
            f"depth is {list(depth.shape)} for images {list(images.shape)}: expected "
            f"[{batch_size}, {cameras}, 1, {size}], one depth image for each camera image"
        )
    points = batch_size * cameras * bins * rows * columns
    if tuple(cells.shape) != (points,):
        raise InputError(
            f"cells are {list(cells.shape)}: {batch_size} frames of {cameras} cameras have "
            f"{points} frustum points; compute them with the view transform's `cells` from the "
            "same cameras"
        )
