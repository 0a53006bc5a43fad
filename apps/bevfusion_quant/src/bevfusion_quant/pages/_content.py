"""Content of a run's page, and its checks."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt

from bev_data.cameras import Camera
from bev_data.metrics import Accuracy, AgreementRow
from bevfusion.deployment import ExportedSet
from bevfusion.quantization import SensitivityOutcome, short_path
from bevfusion_quant.bpu_outcome import BpuOutcome
from bevfusion_quant.integer import Simulation
from bevquant_qnn import LayerRow
from bevquant_quantizers import QuantizerValues

Map = npt.NDArray[np.floating[Any]]
Extent = tuple[float, float, float, float]
LOW_SQNR_DB = 20.0  # layers below are looked at
USELESS_DB = 6.0
"""SQNR at which the error has half the size of the values."""
KEPT_BOXES = 0.8
"""Share of float boxes kept with which a layer below it does not prove a useless model: on maps of
pillars most places are empty, and their small constant values make up most of the error."""
GRID = (
    "CAM_FRONT_LEFT", "CAM_FRONT", "CAM_FRONT_RIGHT", "CAM_BACK_LEFT", "CAM_BACK", "CAM_BACK_RIGHT",
)  # fmt: skip


@dataclass(frozen=True)
class ReportFigure:
    """One more headline figure: `ReportFigure("NDS", "0.412", "float 0.415")`."""

    label: str
    value: str
    note: str = ""


@dataclass(frozen=True, eq=False)
class ReportBoxes:
    """Objects to draw on the scene.

    Attributes:
        boxes: float [objects, 7], centre x, y, z, length, width, height [m] and yaw [rad],
            counter-clockwise from +x to the direction of the length, LiDAR frame.
        names: The class of each box.
        scores: float [objects], 0 … 1, where these are detections.
    """

    boxes: npt.NDArray[np.floating[Any]]
    names: Sequence[str]
    scores: npt.NDArray[np.floating[Any]] | None = None


@dataclass(frozen=True, eq=False)
class ReportScene:
    """The frame that is drawn.

    Attributes:
        name: The frame's name.
        points: float [points, ≥3], x, y, z [m] in the LiDAR frame: points, or centres of voxels.
        extent: Range of the bird's-eye view: smallest x, smallest y, largest x, largest y [m].
        kind: Kind of `points`: "points" or "voxels".
        labels: Labelled objects.
        float_detections: Detections of the float model.
        quantized_detections: Detections of the quantized model.
        cameras: Pictures taken with the points; boxes are projected into them.
        integer_detections: Detections of the integer model.
    """

    name: str
    points: npt.NDArray[np.floating[Any]]
    extent: Extent = (-54.0, -54.0, 54.0, 54.0)
    kind: str = "points"
    labels: ReportBoxes | None = None
    float_detections: ReportBoxes | None = None
    quantized_detections: ReportBoxes | None = None
    cameras: Sequence[Camera] = ()
    integer_detections: ReportBoxes | None = None


@dataclass(frozen=True, eq=False)
class ReportStage:
    """Feature maps of one stage: the float model's, the quantized model's, their difference.

    A bird's-eye map is float [X, Y]: x to the right, y forward, over `extent`. Without an extent a
    map lies in image space, float [rows, columns] with the first row on top, or
    [cameras, rows, columns] in the order of the scene's cameras. NaN is an empty cell.

    Attributes:
        name: Short and unique: "camera", "lidar", "fuser", "decoder", "head".
        title: One line: "Fused bird's-eye view".
        float_map: The float model's map.
        quantized_map: The quantized model's map, same shape.
        difference_map: Where it is more than quantized − float, as the norm over channels of the
            difference; None stands for quantized − float.
        extent: Smallest x, smallest y, largest x, largest y [m], or None for image space.
        quantity: What float and quantized values are, for the colour bar.
        difference_quantity: What difference values are.
        sqnr_db: 10·log10(Σ float² / Σ (quantized − float)²) over the whole tensor; None where the
            two are equal, or unknown.
        cosine: Cosine of the two tensors seen as vectors; None where unknown.
    """

    name: str
    title: str
    float_map: Map
    quantized_map: Map
    difference_map: Map | None = None
    extent: Extent | None = None
    quantity: str = "L2 norm over channels"
    difference_quantity: str = "quantized − float"
    sqnr_db: float | None = None
    cosine: float | None = None


@dataclass(frozen=True, eq=False)
class ReportContent:
    """Content of the page. Every field but the title may be empty; its section is then left out.

    Attributes:
        title: Name of the run.
        config: Name of the sizes: "nuscenes" or "tiny".
        command: The command line that repeats the run.
        versions: Version by package.
        settings: Further settings: method, seed, weights, branch, threads.
        frames: Names of the compared frames.
        seconds: Seconds by step, "total" included.
        peak_memory_mib: Largest resident memory of the process.
        figures: Further headline figures, shown after the built-in ones.
        notes: Facts about a model in other code, such as the entries of its checkpoint.
        left_out: Results that were not measured, with reasons.
        agreement: Float boxes kept by the quantized model.
        scene: The frame that is drawn.
        stages: Feature maps in the order of execution.
        layers: The layer table in the order of execution.
        quantizers: Observed values and range of each quantizer.
        fusion: Folded batch norms: "fused" [{conv, bn, how}], "skipped" [{bn, reason}],
            optionally "largest_relative_change".
        quantization: Quantized layers: "quantized" [{path, kind, was}],
            "shared" [{tensor, readers, reason}], "skipped" [{path, reason}].
        calibration: Calibrated ranges: "quantizers" [{names, method, amax, …, warnings}],
            "warnings".
        integers: Result of the integer model.
        bpu: For a run for a BPU: plan, comparison, estimate.
        accuracy: Scores of the models against labels.
        export: The written ONNX files, and the result of their checks.
        sensitivity: Quantization loss of each layer, and the plan.
        remedy: Layers that in float would make a useless result usable, as a text.
        low_sqnr_db: Layers below this value are counted and marked.
    """

    title: str
    config: str = ""
    command: str = ""
    versions: Mapping[str, str] = field(default_factory=dict)
    settings: Mapping[str, object] = field(default_factory=dict)
    frames: Sequence[str] = ()
    seconds: Mapping[str, float] = field(default_factory=dict)
    peak_memory_mib: float | None = None
    figures: Sequence[ReportFigure] = ()
    notes: Sequence[str] = ()
    left_out: Sequence[str] = ()
    agreement: Sequence[AgreementRow] = ()
    scene: ReportScene | None = None
    stages: Sequence[ReportStage] = ()
    layers: Sequence[LayerRow] = ()
    quantizers: Sequence[QuantizerValues] = ()
    fusion: Mapping[str, Any] | None = None
    quantization: Mapping[str, Any] | None = None
    calibration: Mapping[str, Any] | None = None
    integers: Simulation | None = None
    bpu: BpuOutcome | None = None
    accuracy: Accuracy | None = None
    export: ExportedSet | None = None
    sensitivity: SensitivityOutcome | None = None
    remedy: str = ""
    low_sqnr_db: float = LOW_SQNR_DB


def arranged(names: Sequence[str]) -> list[int]:
    """Indices of cameras in display order: front left to right, then back, then others."""
    place = {name: index for index, name in enumerate(GRID)}
    return sorted(range(len(names)), key=lambda i: (place.get(names[i], len(GRID)), i))


def known_levels(layers: Sequence[LayerRow]) -> list[tuple[float, str]]:
    """SQNR and name of each layer with a known SQNR; minus infinity for values not finite."""
    pairs = ((row.sqnr_db, row.layer) for row in layers)
    return [(level, layer) for level, layer in pairs if level is not None and level < math.inf]


def unusable(
    layers: Sequence[LayerRow], agreement: Sequence[AgreementRow] = (), remedy: str = ""
) -> str:
    """Why the quantized model cannot be used, and the remedy; empty for a usable one.

    Args:
        layers: The layer table, in the order of execution.
        agreement: Float and quantized boxes. Where `KEPT_BOXES` are kept the result is unclear.
        remedy: Measured remedy, with its reason. Without one, a layer below `USELESS_DB` counts.
    """
    known = known_levels(layers)
    low = [layer for level, layer in known if level < USELESS_DB]
    if not (low or remedy):
        return ""
    near = next((row for row in agreement if row.distance == 1.0), None)
    kept = ""
    # Where most boxes are kept, the result is unclear.
    if near is not None and near.matched >= KEPT_BOXES * near.float_detections > 0:
        kept = f"{near.matched} of {near.float_detections} boxes are kept"
    if remedy:
        return f"unclear: {kept}, yet {remedy}" if kept else f"NOT usable: {remedy}"
    level, worst = min(known)
    place = "" if low[0] == worst else f", after {short_path(low[0])}, the first below that"
    said = f"{level:.1f} dB SQNR against float"
    half = f", and below {USELESS_DB:g} dB the error is over half of the values"
    if level == -math.inf:
        said, half = "infinite or NaN values, which float does not have", ""
    first = next((layer for layer in low if layer != "output"), "")
    exclude = f"keep it in float (--exclude {short_path(first)}), " if first else ""
    if kept:
        return (
            f"unclear: {short_path(worst)} has {said}{place}, yet "
            f"{kept}; judge boxes by labels "
            f"(bevfusion-quant evaluate), {exclude}or try --bias-correction"
        )
    return (
        f"NOT usable: {short_path(worst)} has {said}{half}{place}; {exclude}calibrate with more "
        "frames like those of use, or try --bias-correction or another --method"
    )


def check(content: ReportContent) -> None:
    """Refuse content that cannot be drawn, and name the field."""
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
