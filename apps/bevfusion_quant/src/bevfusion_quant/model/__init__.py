"""mit-bevfusion's model: build it, fill it with random weights, or load a checkpoint."""

from bevfusion_quant.model._batch import Batch
from bevfusion_quant.model._build import build_lidar_branch, build_model
from bevfusion_quant.model._checkpoint import LoadReport, load_state_dict, load_weights
from bevfusion_quant.model._checkpoint_file import read_state_dict
from bevfusion_quant.model._config import (
    CONFIGS,
    BEVFusionConfig,
    CameraConfig,
    DecoderConfig,
    FuserConfig,
    LidarConfig,
)
from bevfusion_quant.model._fuser import ConvFuser
from bevfusion_quant.model._model import BEVFusion
from bevfusion_quant.model._parts import PART_PATHS, PARTS, STAGES, exclude_all_but
from bevfusion_quant.model._second import SECOND, SECONDFPN
from bevfusion_quant.model._trained import named_weights, trained_weights
from bevfusion_quant.model._weight_layout import LAYOUTS
from bevfusion_quant.model._weights import random_weights
from bevfusion_quant.model.head import HeadConfig

__all__ = [
    "CONFIGS",
    "LAYOUTS",
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
    "FuserConfig",
    "HeadConfig",
    "LidarConfig",
    "LoadReport",
    "build_lidar_branch",
    "build_model",
    "exclude_all_but",
    "load_state_dict",
    "load_weights",
    "named_weights",
    "random_weights",
    "read_state_dict",
    "trained_weights",
]
