"""A detector in another framework's code, as the commands take it."""

from __future__ import annotations

import copy
import re
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import numpy.typing as npt
import torch
from torch import nn
from torch.utils._pytree import tree_leaves, tree_map

from bev_data import InputError
from bev_data.boxes import Detections
from bev_data.datasets import detection_names
from bev_data.points import Frame, axes_motion, move_frame, move_objects
from bevfusion.centerpoint._model import METRES_IN_FLOAT
from bevfusion.model import Detector, load_weights
from bevquant_graph import called, own_inputs
from bevquant_qnn import gap
from bevquant_sparse import is_sparse_conv

FRAME_AXES, FORWARD = "right,forward,up", "forward,left,up"
DATASET_AXES = {
    "NuScenesDataset": FRAME_AXES, "NuScenesSegDataset": FRAME_AXES, "SUNRGBDDataset": FRAME_AXES,
    "ScanNetDataset": FRAME_AXES, "ScanNetSegDataset": FRAME_AXES, "S3DISDataset": FRAME_AXES,
    "S3DISSegDataset": FRAME_AXES, "KittiDataset": FORWARD, "SemanticKittiDataset": FORWARD,
    "WaymoDataset": FORWARD, "Argo2Dataset": FORWARD, "PandasetDataset": FORWARD,
    "CustomDataset": FORWARD, "ONCEDataset": "left,back,up",
}  # fmt: skip
"""Directions of x, y and z by the class of a data set, of mmdetection3d and of OpenPCDet.

Lyft's is absent: its scanners were mounted in several directions.
"""


@dataclass(frozen=True, eq=False)
class ForeignDetector:
    """A network with its input preparation and box decoding.

    Attributes:
        network: A float model in eval mode.
        arguments: From a frame to the network's positional arguments.
        boxes: From the network's output for a frame to boxes; None if only maps are compared.
        classes: Names of the classes, by the numbers in `Detections.labels`; empty where unknown,
            and boxes are then not compared with labels.
        notes: Facts for the user: entries of a checkpoint, stand-ins in use, axes.
        point_cloud_range: Smallest x, y, z and largest x, y, z that the network sees [m]: extent of
            pictures and of counted labels.
        axes: Directions of x, y and z that `arguments`, `boxes` and `point_cloud_range` have, as in
            `bev_data.points.read_points`; empty where unknown. `turned` is for frames.
    """

    network: nn.Module
    arguments: Callable[[Frame], tuple[Any, ...]]
    boxes: Callable[[Any, Frame], Detections] | None = None
    classes: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()
    point_cloud_range: tuple[float, float, float, float, float, float] = (
        -54.0, -54.0, -5.0, 54.0, 54.0, 3.0,
    )  # fmt: skip
    axes: str = FRAME_AXES

    def __deepcopy__(self, memo: dict[int, Any]) -> ForeignDetector:
        """Itself: copies of a model share it."""
        return self

    def turned(self) -> ForeignDetector:
        """The same for frames with x right, y forward, z up.

        A frame is turned to `axes` for `arguments` and `boxes`; boxes and range are turned back.
        Itself where the axes are those of frames, or unknown.

        Raises:
            InputError: `axes` are no directions.
        """
        back = axes_motion(self.axes or FRAME_AXES)
        if back is None:
            return self
        arguments, boxes = self.arguments, self.boxes
        there = np.linalg.inv(back).astype(np.float64)

        def moved_boxes(output: Any, frame: Frame) -> Detections:
            assert boxes is not None
            found = boxes(output, move_frame(frame, there))
            return move_objects(found, back) if isinstance(found, Detections) else found

        corners = np.reshape(self.point_cloud_range, (2, 3)) @ back[:3, :3].T
        # Turned, a lower corner may be an upper one.
        low, high = np.minimum(*corners).tolist(), np.maximum(*corners).tolist()
        note = (
            f"frames are turned from {FRAME_AXES} to its axes, {self.axes}; files of --points that "
            f"have these need --axes {self.axes}"
        )
        return replace(
            self,
            arguments=lambda frame: arguments(move_frame(frame, there)),
            boxes=boxes and moved_boxes,
            notes=(*self.notes, note),
            point_cloud_range=(*low, *high),
            axes=FRAME_AXES,
        )


def checkpoint_notes(model: nn.Module, checkpoint: str | Path) -> tuple[str, ...]:
    """Load a checkpoint into a model, and return the report's lines for `ForeignDetector.notes`."""
    return tuple(
        f"checkpoint: {line}" for line in str(load_weights(model, checkpoint)).splitlines()
    )


class ForeignSizes:
    """The properties of `bevfusion.model.Sizes` for a detector in other code.

    Args:
        name: As `load_detector` takes it.
        detector: From there.
    """

    kind = "foreign"

    def __init__(self, name: str, detector: ForeignDetector) -> None:
        self.name, self.detector = name, (detector := detector.turned())
        self.classes = detection_names(detector.classes)  # as those of frames' labels
        self.point_cloud_range = detector.point_cloud_range
        left, front, _, right, back, _ = detector.point_cloud_range
        self.extent = left, front, right, back

    def __str__(self) -> str:
        return self.name

    @property
    def lidar(self) -> ForeignSizes:
        """The seen volume: `extent`, `point_cloud_range`."""
        return self

    @property
    def head(self) -> ForeignSizes:
        """The detected `classes`."""
        return self


class ForeignModel(Detector):
    """The network of a `ForeignDetector` as a detector of one part; errors of its code are named.

    Args:
        detector: Whose network is copied.
    """

    part_paths: ClassVar = {"network": ("network",)}
    stages: ClassVar = {}
    folded_apart: ClassVar = ("network",)
    kind = ForeignSizes.kind

    def __init__(self, detector: ForeignDetector) -> None:
        super().__init__()
        # Quantizers are put into this copy; the user's network stays as it is.
        self.network = copy.deepcopy(detector.network)
        self.kept_in_float = {
            path + below: METRES_IN_FLOAT
            for path, module in self.named_modules()
            # Pillar encoders of mmdetection3d, OpenPCDet, det3d; the first layer on points of
            # others, whose further layers can have a quarter of the operations.
            for name, below in (("pfn_layers", ""), ("vfe_layers", ".vfe_layers.0"))
            if hasattr(module, name)
        }
        self._detector = detector.turned()
        self.eval()

    def forward(self, *arguments: Any) -> Any:
        """The network's output."""
        if torch.compiler.is_exporting():  # which looks at errors itself
            return self.network(*arguments)
        given = tree_map(_described, arguments)
        advice = (
            f"it was called with {given}: arguments must return forward's arguments, on the CPU"
        )
        # A batch runs many times, and forwards may write to it, as PillarFeatureNet does.
        return run_user_code(
            "forward of the model", self.network, *own_inputs(arguments), advice=advice
        )

    @property
    def finds_boxes(self) -> bool:
        """Whether the detector has `boxes`."""
        return self._detector.boxes is not None

    def boxes(self, output: Any, frame: Callable[[], Frame]) -> Detections:
        """Boxes as its own code makes them."""
        make = self._detector.boxes
        assert make is not None
        found = run_user_code("boxes of the model", make, output, frame())
        if not isinstance(found, Detections):
            raise InputError(
                f"boxes of the model returned {type(found).__name__}: return "
                "bev_data.boxes.Detections"
            )
        return _checked(found, self._detector.classes)

    def arguments(self, frame: Frame) -> tuple[Any, ...]:
        """The frame as its own code takes it."""
        given = run_user_code("arguments of the model", self._detector.arguments, frame)
        if not isinstance(given, tuple):
            raise InputError(
                f"arguments of the model returned {type(given).__name__} for {frame.name}: return "
                "a tuple of the network's positional arguments"
            )
        if any(isinstance(value, np.ndarray) for value in tree_leaves(given)):
            raise InputError(
                f"arguments of the model returned numpy.ndarray for {frame.name}: return "
                "torch.Tensor (torch.from_numpy)"
            )
        return given


def with_equal_rows(
    network: nn.Module, batches: Sequence[tuple[Any, ...]]
) -> tuple[list[tuple[Any, ...]], str]:
    """Arguments of several frames with as many pillars each as the fullest frame has.

    Files fix the number of rows of a network without sparse convolutions. The last row is repeated
    where that does not change the network's result, as where rows are written to cells of a map.
    Rows are those of the first tensor.

    Args:
        network: It is run on one of the frames, with and without repeated rows.
        batches: Its arguments, frame by frame.

    Returns:
        The arguments, and a note for the file's user; "" if rows are not repeated.
    """
    counts = [next(map(_rows, filter(_rows, tree_leaves(batch))), 0) for batch in batches]
    # Voxels of sparse convolutions may not be repeated.
    if max(counts) < 2 or any(map(is_sparse_conv, network.modules())):
        return list(batches), ""
    fewest, most = min(counts), max(counts)
    shortest = batches[counts.index(fewest)]
    with torch.no_grad():
        wanted = tree_leaves(called(network, shortest))
        try:
            more = called(network, _repeated(shortest, fewest, max(most, fewest + 1)))
        except (RuntimeError, ValueError, IndexError):  # its number of rows is fixed
            return list(batches), ""
    # Nor rows of a network that repeated ones change by more than the order of sums.
    if not all(map(_equal, wanted, tree_leaves(more))):
        return list(batches), ""
    longer = [_repeated(batch, n, most) for batch, n in zip(batches, counts, strict=True)]
    frames = f"{len(counts)} frames" if len(counts) > 1 else "one frame"
    return longer, (
        f"takes {most} rows (pillars), the most of {frames}: repeat any row of a frame with fewer, "
        "and export again with a frame of more"
    )


def _rows(value: Any) -> int:
    return len(value) if isinstance(value, torch.Tensor) and value.dim() else 0


def _repeated(batch: tuple[Any, ...], rows: int, most: int) -> tuple[Any, ...]:
    """The tensors of `rows` rows with their last row repeated."""

    def longer(value: Any) -> Any:
        if _rows(value) != rows:
            return value
        return torch.cat([value, value[-1:].expand(most - rows, *value.shape[1:])])

    made: tuple[Any, ...] = tree_map(longer, batch)
    return made


def _equal(want: Any, got: Any) -> bool:
    """Whether two results differ by float32 sums in another order alone."""
    if not isinstance(want, torch.Tensor):
        return True
    if not isinstance(got, torch.Tensor) or want.shape != got.shape:
        return False
    _, largest, size = gap(want, got)
    return largest <= 1e-5 * size


def run_user_code(name: str, function: Callable[..., Any], *given: Any, advice: str = "") -> Any:
    """Result of the user's code."""
    try:
        return function(*given)
    except InputError:
        raise
    except Exception as error:
        more = f"; {advice}" if advice else ""
        raise InputError(f"{name} raised {user_error(error)}{more}") from error


def _described(value: Any) -> str:
    """Type and shape of a tensor, the class of anything else."""
    if isinstance(value, torch.Tensor):
        return f"{str(value.dtype).removeprefix('torch.')} {list(value.shape)}"
    return type(value).__name__


def user_error(error: Exception) -> str:
    """An exception of a user's code in a line: class, text, file and line."""
    frames = traceback.extract_tb(error.__traceback__)[1:]
    ours = "/torch/|/bevfusion/|/bevquant_|<frozen |/importlib/"
    own = [f for f in frames if not re.search(ours, f.filename)]
    place = "".join(f" ({f.filename}:{f.lineno})" for f in own[-1:])
    first = str(error).strip().partition("\n")[0]  # torch lists the overloads behind it
    return f"{type(error).__name__}: {first}{place}"


def _checked(found: Detections, classes: Sequence[str]) -> Detections:
    """The boxes, if their arrays belong together."""
    count = len(found.boxes)
    wanted = {"boxes": (count, 7), "scores": (count,), "labels": (count,), "velocities": (count, 2)}
    for name, shape in wanted.items():
        array = getattr(found, name)
        if not isinstance(array, np.ndarray) or array.shape != shape:
            got = f"shape {array.shape}" if isinstance(array, np.ndarray) else type(array).__name__
            raise InputError(
                f"boxes of the model: {name} is {got}, expected a numpy array of shape "
                f"{list(shape)} (bev_data.boxes.Detections)"
            )
    if classes and count and not 0 <= found.labels.min() <= found.labels.max() < len(classes):
        raise InputError(
            f"boxes of the model: labels from {found.labels.min()} to {found.labels.max()}, "
            f"expected 0 to {len(classes) - 1} for the classes {', '.join(classes)}"
        )
    return found


def sorted_detections(
    boxes: npt.NDArray[np.floating[Any]], scores: npt.NDArray[np.floating[Any]],
    labels: npt.NDArray[np.integer[Any]], velocities: npt.NDArray[np.floating[Any]] | None = None,
) -> Detections:  # fmt: skip
    """Boxes in any order and with any yaw as `Detections`; missing velocities are 0."""
    order = np.argsort(-scores, kind="stable")
    if velocities is None:
        velocities = np.zeros((len(boxes), 2))
    found = Detections.of_rows(order, boxes, scores, labels, velocities)
    # To −π … π.
    found.boxes[:, 6] -= 2 * np.pi * np.floor((found.boxes[:, 6] + np.pi) / (2 * np.pi))
    return found
