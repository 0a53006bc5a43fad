"""Evaluation rules: counted boxes and matching limits. Default: nuScenes' detection task."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

from bev_data._errors import InputError

ERRORS = ("ATE", "ASE", "AOE", "AVE")
"""Errors of true positives, in the order of their columns; boxes carry no attributes for AAE."""

# nuScenes' detection challenge, configuration detection_cvpr_2019.
_RANGES = {
    "car": 50.0, "truck": 50.0, "bus": 50.0, "trailer": 50.0, "construction_vehicle": 50.0,
    "pedestrian": 40.0, "motorcycle": 40.0, "bicycle": 40.0,
    "traffic_cone": 30.0, "barrier": 30.0,
}  # fmt: skip


@dataclass(frozen=True)
class DetectionRules:
    """Settings of the detection metrics; the defaults are those of nuScenes' challenge.

    https://www.nuscenes.org/object-detection, configuration `detection_cvpr_2019`.

    Attributes:
        class_ranges: Boxes whose centre is this far from `origin` or farther, seen from above, do
            not count [m]. A class without an entry has 50 m.
        origin: x and y from which ranges are measured [m]. nuScenes measures from the middle of the
            car's rear axle, (0, −0.94) in the frame of its scanner.
        distances: A detection is a true positive if its centre is nearer than this to a label's,
            seen from above [m].
        error_distance: The distance in `distances` whose true positives define the errors [m].
        min_recall: The curve up to this recall does not count.
        min_precision: Precision below this counts as 0.
        overlaps: A detection is a true positive of the BEV AP if its rotated box overlaps a
            label's by more (intersection over union, seen from above).
        min_points: Labels with fewer LiDAR points inside do not count, if their number is known.
            nuScenes counts a radar's points too.
        extent: Low x and y, high x and y [m]; boxes with the centre outside do not count. None for
            no limit but the range.
        absent: Treatment of a class without labels in the means: "left out", or "zero", average
            precision 0 and errors of 1, as in nuScenes' own tables.
        racks: Names of labels in which objects of some classes do not count, neither as labels nor
            as detections: bicycle racks.

    Raises:
        InputError: A setting is outside its range; named.

    Example:
        >>> DetectionRules().class_ranges["pedestrian"]
        40.0
    """

    class_ranges: Mapping[str, float] = field(default_factory=lambda: dict(_RANGES))
    origin: tuple[float, float] = (0.0, 0.0)
    distances: tuple[float, ...] = (0.5, 1.0, 2.0, 4.0)
    error_distance: float = 2.0
    min_recall: float = 0.1
    min_precision: float = 0.1
    overlaps: tuple[float, ...] = (0.5, 0.7)
    min_points: int = 1
    extent: tuple[float, float, float, float] | None = None
    absent: Literal["left out", "zero"] = "left out"
    racks: Mapping[str, tuple[str, ...]] = field(
        default_factory=lambda: {"static_object.bicycle_rack": ("bicycle", "motorcycle")}
    )

    def __post_init__(self) -> None:
        ranges = self.class_ranges.values()
        self._expect("class_ranges", all(reach > 0 for reach in ranges), "positive")
        self._expect("distances", all(d > 0 for d in self.distances), "positive")
        self._expect("distances", len(set(self.distances)) == len(self.distances), "distinct")
        self._expect("error_distance", self.error_distance in self.distances, "one of distances")
        self._expect("min_recall", 0 <= self.min_recall < 1, "from 0 to below 1")
        self._expect("min_precision", 0 <= self.min_precision < 1, "from 0 to below 1")
        self._expect("overlaps", all(0 < o < 1 for o in self.overlaps), "between 0 and 1")
        self._expect("overlaps", len(set(self.overlaps)) == len(self.overlaps), "distinct")
        self._expect("absent", self.absent in ("left out", "zero"), "'left out' or 'zero'")

    def _expect(self, name: str, holds: bool, what: str) -> None:
        if not holds:
            raise InputError(f"DetectionRules.{name} must be {what}, not {getattr(self, name)!r}")

    def reach(self, name: str) -> float:
        """The range of a class [m]."""
        return self.class_ranges.get(name, 50.0)
