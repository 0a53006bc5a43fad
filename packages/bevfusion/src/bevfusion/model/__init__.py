"""mit-bevfusion's model: build it, fill it with random weights, or load a checkpoint."""

from bevfusion.model._build import (
    build_lidar_branch,
    build_model,
    example_batch,
    lidar_map,
    named_weights,
    prepared,
    random_weights,
    trained_weights,
)
from bevfusion.model._checkpoint import (
    LAYOUTS,
    LoadReport,
    load_state_dict,
    load_weights,
    read_state_dict,
)
from bevfusion.model._config import (
    CONFIGS,
    BEVFusionConfig,
    CameraConfig,
    DecoderConfig,
    FuserConfig,
    LidarConfig,
)
from bevfusion.model._model import PART_PATHS, PARTS, STAGES, Batch, BEVFusion, Detector, Sizes
from bevfusion.model._names import NAMINGS
from bevfusion.model._second import SECOND, SECONDFPN, ConvFuser
from bevfusion.model.head import HeadConfig

__all__ = [
    "CONFIGS",
    "LAYOUTS",
    "NAMINGS",
    "PARTS",
    "PART_PATHS",
    "SECOND",
    "SECONDFPN",
    "STAGES",
    "BEVFusion",
    "BEVFusionConfig",
    "Batch",
    "CameraConfig",
    "ConvFuser",
    "DecoderConfig",
    "Detector",
    "FuserConfig",
    "HeadConfig",
    "LidarConfig",
    "LoadReport",
    "Sizes",
    "build_lidar_branch",
    "build_model",
    "example_batch",
    "lidar_map",
    "load_state_dict",
    "load_weights",
    "named_weights",
    "prepared",
    "random_weights",
    "read_state_dict",
    "trained_weights",
]
