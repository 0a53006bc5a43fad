"""Sizes of CenterPoint: those of mmdetection3d and det3d, and small ones for seconds-long runs."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import ClassVar

from bevfusion.model import CONFIGS, DecoderConfig, LidarConfig
from bevfusion.model.head import NMS_KINDS, MapSizes

NUSCENES_TASKS = (
    ("car",), ("truck", "construction_vehicle"), ("bus", "trailer"), ("barrier",),
    ("motorcycle", "bicycle"), ("pedestrian", "traffic_cone"),
)  # fmt: skip
WAYMO_CLASSES = ("VEHICLE", "PEDESTRIAN", "CYCLIST")
BRANCHES = (("reg", 2), ("height", 1), ("dim", 3), ("rot", 2), ("vel", 2))
PARTS = ("lidar", "decoder", "head")


@dataclass(frozen=True)
class PillarConfig:
    """Grid and width of the pillar encoder: PillarFeatureNet and PointPillarsScatter.

    Axes are in the order x, y, z. A voxel is as high as the range.

    Attributes:
        name: Of the configuration.
        voxel_size: In metres.
        point_cloud_range: Low x, y, z, then high x, y, z [m].
        max_num_points: Points of a pillar that are read, the first ones.
        max_voxels: Most pillars of a frame, in training and in evaluation.
        in_channels: Columns of a point.
        feat_channels: Channels of a pillar, layer by layer.
    """

    name: str
    voxel_size: tuple[float, float, float]
    point_cloud_range: tuple[float, float, float, float, float, float]
    max_num_points: int = 20
    max_voxels: tuple[int, int] = (30000, 40000)
    in_channels: int = 5
    feat_channels: tuple[int, ...] = (64,)

    reads_points: ClassVar[bool] = True
    extent = LidarConfig.extent

    @property
    def sparse_shape(self) -> tuple[int, int, int]:
        """Pillars along x and y, and one along z."""
        low, high = self.point_cloud_range[:3], self.point_cloud_range[3:]
        x, y, z = (
            round((b - a) / size) for a, b, size in zip(low, high, self.voxel_size, strict=True)
        )
        return x, y, z

    @property
    def zyx(self) -> bool:
        """Coordinates are batch, z, y, x, as mmdetection3d's."""
        return True

    @property
    def decorated_channels(self) -> int:
        """Columns of a point as the encoder reads it: see `decorate`."""
        return self.in_channels + 6


@dataclass(frozen=True)
class CenterHeadConfig(MapSizes):
    """Everything that `CenterHead` and `decode` need to know. The defaults are nuScenes'.

    Attributes:
        in_channels: Channels of the map, SECONDFPN's levels concatenated.
        tasks: Classes that share a sub-head, task by task.
        branches: Name and channels of each regression branch of a task.
        shared_channels: Width behind the convolution that all tasks share.
        branch_channels: Width inside each branch.
        map_size: Cells of the map along x and y.
        voxel_size: Metres along x and y.
        out_size_factor: Voxels per cell.
        origin: x and y [m] of the map's low corner.
        post_center_range: Boxes whose centre lies outside are dropped: low x, y, z, high x, y, z
            [m].
        score_threshold: Boxes with a score above it are kept, from 0 to 1.
        max_boxes: Most cells of a task that become boxes, the best ones.
        peak_kernel: Side of the square in which a cell must be the largest to become a box; 1 takes
            every cell, as mmdetection3d.
        nms: "none", "circle" or "rotated", among all classes of a task.
        nms_radius: For "circle", task by task: of centres no farther apart [m], the best one stays.
            mmdetection3d compares its `min_radius` with the squared distance.
        nms_iou: For "rotated": of boxes that overlap by more, the best one stays.
        nms_boxes: Most boxes of a task that stay.

    Raises:
        InputError: A setting outside its range, named.

    Example:
        >>> CenterHeadConfig().classes[:3], CenterHeadConfig().cell_size
        (('car', 'truck', 'construction_vehicle'), (0.6, 0.6))
    """

    in_channels: int = 512
    tasks: tuple[tuple[str, ...], ...] = NUSCENES_TASKS
    branches: tuple[tuple[str, int], ...] = BRANCHES
    shared_channels: int = 64
    branch_channels: int = 64
    map_size: tuple[int, int] = (180, 180)
    voxel_size: tuple[float, float] = (0.075, 0.075)
    out_size_factor: int = 8
    origin: tuple[float, float] = (-54.0, -54.0)
    post_center_range: tuple[float, float, float, float, float, float] = (
        -61.2, -61.2, -10.0, 61.2, 61.2, 10.0,
    )  # fmt: skip
    score_threshold: float = 0.1
    max_boxes: int = 500
    peak_kernel: int = 1
    nms: str = "rotated"
    nms_radius: tuple[float, ...] = (2.0, 12**0.5, 10**0.5, 1.0, 0.85**0.5, 0.175**0.5)
    nms_iou: float = 0.2
    nms_boxes: int = 83

    def __post_init__(self) -> None:
        for name in ("in_channels", "shared_channels", "branch_channels", "out_size_factor",
                     "max_boxes", "peak_kernel", "nms_boxes"):  # fmt: skip
            self._expect(name, getattr(self, name) >= 1, "at least 1")
        self._expect("peak_kernel", self.peak_kernel % 2 == 1, "odd")
        self._expect("tasks", len(set(self.classes)) == self.num_classes > 0, "distinct names")
        self._expect("nms", self.nms in NMS_KINDS, f"one of {', '.join(NMS_KINDS)}")
        self._expect("score_threshold", 0 <= self.score_threshold <= 1, "from 0 to 1")
        known = {"reg", "height", "dim", "rot"} <= {name for name, _ in self.branches}
        self._expect("branches", known, "reg, height, dim and rot at least")
        if self.nms == "circle":
            count = len(self.tasks)
            self._expect("nms_radius", len(self.nms_radius) == count, f"{count} radii, one a task")

    @property
    def classes(self) -> tuple[str, ...]:
        """Names of the classes, task after task."""
        return tuple(name for task in self.tasks for name in task)


@dataclass(frozen=True)
class CenterPointConfig:
    """Sizes of the whole model, of voxels (`LidarConfig`) or pillars (`PillarConfig`)."""

    name: str
    lidar: LidarConfig | PillarConfig
    decoder: DecoderConfig = field(default_factory=DecoderConfig)
    head: CenterHeadConfig = field(default_factory=CenterHeadConfig)

    @property
    def kind(self) -> str:
        """Name of the detector in `bevfusion.detectors.DETECTORS`."""
        return "centerpoint-pillars" if isinstance(self.lidar, PillarConfig) else "centerpoint"


_NUSCENES = (-51.2, -51.2, -5.0, 51.2, 51.2, 3.0)
_WAYMO, _WAYMO_PILLARS = (
    (-edge, -edge, -2.0, edge, edge, 4.0) for edge in (75.2, 74.88)
)  # fmt: skip
_WAYMO_HEAD = CenterHeadConfig(
    tasks=(WAYMO_CLASSES,),
    branches=BRANCHES[:-1],
    map_size=(188, 188),
    voxel_size=(0.1, 0.1),
    origin=_WAYMO[:2],
    post_center_range=(-80.0, -80.0, -10.0, 80.0, 80.0, 10.0),
    nms_radius=(2.0,),
    nms_iou=0.7,
    nms_boxes=500,
)
_TINY_HEAD = CenterHeadConfig(
    64, shared_channels=32, branch_channels=16, map_size=(80, 80), voxel_size=(0.3375, 0.3375),
    out_size_factor=4,
)  # fmt: skip
_AUTOWARE = (-76.8, -76.8)
_WIDTHS, _UP = (64, 128, 256), (128, 128, 128)

VOXEL_CONFIGS: dict[str, CenterPointConfig] = {
    "nuscenes": CenterPointConfig(
        "centerpoint-nuscenes",
        LidarConfig("nuscenes", (0.075, 0.075, 0.2), (1440, 1440, 41), zyx=True),
    ),
    "nuscenes-voxel01": CenterPointConfig(
        "centerpoint-nuscenes-voxel01",
        LidarConfig(
            "nuscenes-voxel01", (0.1, 0.1, 0.2), (1024, 1024, 41), _NUSCENES,
            max_voxels=(90000, 120000), zyx=True,
        ),
        head=CenterHeadConfig(
            map_size=(128, 128), voxel_size=(0.1, 0.1), origin=_NUSCENES[:2]
        ),
    ),
    "waymo": CenterPointConfig(
        "centerpoint-waymo",
        LidarConfig(
            "waymo", (0.1, 0.1, 0.15), (1504, 1504, 41), _WAYMO,
            max_num_points=5, max_voxels=(150000, 200000), zyx=True,
        ),
        head=_WAYMO_HEAD,
    ),
    "tiny": CenterPointConfig(
        "centerpoint-tiny",
        replace(CONFIGS["tiny"].lidar, zyx=True),
        DecoderConfig(128, (1, 1), (32, 64), (1, 2), (32, 32), (2, 4)),
        _TINY_HEAD,
    ),
}  # fmt: skip
"""By size: mmdetection3d's voxels of 0.075 and 0.1 m for nuScenes, det3d's for Waymo, a small one.
"""

PILLAR_CONFIGS: dict[str, CenterPointConfig] = {
    "nuscenes": CenterPointConfig(
        "centerpoint-pillars-nuscenes",
        PillarConfig("nuscenes", (0.2, 0.2, 8.0), _NUSCENES),
        DecoderConfig(64, (3, 5, 5), _WIDTHS, (2, 2, 2), _UP, (0.5, 1, 2)),
        CenterHeadConfig(
            384, map_size=(128, 128), voxel_size=(0.2, 0.2), out_size_factor=4,
            origin=_NUSCENES[:2],
        ),
    ),
    "waymo": CenterPointConfig(
        "centerpoint-pillars-waymo",
        PillarConfig(
            "waymo", (0.32, 0.32, 6.0), _WAYMO_PILLARS, max_voxels=(32000, 60000),
            feat_channels=(64, 64),
        ),
        DecoderConfig(64, (3, 5, 5), _WIDTHS, (1, 2, 2), _UP, (1, 2, 4)),
        replace(
            _WAYMO_HEAD, in_channels=384, map_size=(468, 468), voxel_size=(0.32, 0.32),
            out_size_factor=1, origin=_WAYMO_PILLARS[:2],
        ),
    ),
    "autoware": CenterPointConfig(
        "centerpoint-pillars-autoware",
        PillarConfig(
            "autoware", (0.32, 0.32, 10.0), (*_AUTOWARE, -4.0, 76.8, 76.8, 6.0),
            max_num_points=32, max_voxels=(40000, 40000), feat_channels=(32, 32),
        ),
        DecoderConfig(32, (3, 5, 5), _WIDTHS, (1, 2, 2), _UP, (1, 2, 4)),
        CenterHeadConfig(
            384, (("car", "truck", "bus", "bicycle", "pedestrian"),), map_size=(480, 480),
            voxel_size=(0.32, 0.32), out_size_factor=1, origin=_AUTOWARE,
            post_center_range=(-200.0, -200.0, -10.0, 200.0, 200.0, 10.0), nms="circle",
            nms_radius=(1.0,),
        ),
    ),
    "tiny": CenterPointConfig(
        "centerpoint-pillars-tiny",
        PillarConfig(
            "tiny", (0.675, 0.675, 8.0), CONFIGS["tiny"].lidar.point_cloud_range,
            max_voxels=(6000, 8000), feat_channels=(32,),
        ),
        DecoderConfig(32, (1, 1, 1), (16, 32, 64), (1, 2, 2), (16, 16, 32), (0.5, 1, 2)),
        replace(_TINY_HEAD, voxel_size=(0.675, 0.675), out_size_factor=2),
    ),
}  # fmt: skip
"""By size, as `VOXEL_CONFIGS`, with pillars: mmdetection3d's of 0.2 m, det3d's of 0.32 m, and those
that Autoware's node reads.
"""
