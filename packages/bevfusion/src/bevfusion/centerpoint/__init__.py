"""CenterPoint in plain PyTorch under mmdetection3d's names: voxels or pillars, nuScenes or Waymo.

`VOXEL_CONFIGS` and `PILLAR_CONFIGS` hold sizes, `build_centerpoint` makes the model, `decode` finds
boxes in its head's outputs. Parts shared with BEVFusion come from `bevfusion.model`.
"""

from bevfusion.centerpoint._config import (
    BRANCHES,
    NUSCENES_TASKS,
    PILLAR_CONFIGS,
    VOXEL_CONFIGS,
    WAYMO_CLASSES,
    CenterHeadConfig,
    CenterPointConfig,
    PillarConfig,
)
from bevfusion.centerpoint._decode import CENTER_OBJECTIVE, CenterLoss, center_loss, decode
from bevfusion.centerpoint._model import (
    CenterHead,
    CenterPoint,
    SeparateHead,
    build_centerpoint,
    example_voxels,
)
from bevfusion.centerpoint._pillars import (
    DecoratedPillars,
    PFNLayer,
    PillarFeatureNet,
    PointPillarsScatter,
    VoxelMeans,
    decorate,
)

__all__ = [
    "BRANCHES",
    "CENTER_OBJECTIVE",
    "NUSCENES_TASKS",
    "PILLAR_CONFIGS",
    "VOXEL_CONFIGS",
    "WAYMO_CLASSES",
    "CenterHead",
    "CenterHeadConfig",
    "CenterLoss",
    "CenterPoint",
    "CenterPointConfig",
    "DecoratedPillars",
    "PFNLayer",
    "PillarConfig",
    "PillarFeatureNet",
    "PointPillarsScatter",
    "SeparateHead",
    "VoxelMeans",
    "build_centerpoint",
    "center_loss",
    "decode",
    "decorate",
    "example_voxels",
]
