"""mit-bevfusion's model: build it, fill it with random weights, or load a checkpoint."""

from bevfusion_quant.model._batch import Batch
from bevfusion_quant.model._branch import BEVFusion, build_lidar_branch
from bevfusion_quant.model._checkpoint import LAYOUTS, LoadReport, load_state_dict, load_weights
from bevfusion_quant.model._checkpoint_file import read_state_dict
from bevfusion_quant.model._config import (
    CLASSES,
    CONFIGS,
    LIDAR_CONFIGS,
    BEVFusionConfig,
    CameraConfig,
    DecoderConfig,
    FuserConfig,
    HeadConfig,
    LidarConfig,
)
from bevfusion_quant.model._weights import random_weights

__all__ = [
    "CLASSES",
    "CONFIGS",
    "LAYOUTS",
    "LIDAR_CONFIGS",
    "BEVFusion",
    "BEVFusionConfig",
    "Batch",
    "CameraConfig",
    "DecoderConfig",
    "FuserConfig",
    "HeadConfig",
    "LidarConfig",
    "LoadReport",
    "build_lidar_branch",
    "load_state_dict",
    "load_weights",
    "random_weights",
    "read_state_dict",
]
