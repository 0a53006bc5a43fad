"""mit-bevfusion's TransFusion head: from the fused bird's-eye view to boxes."""

from bev_data.boxes import NUSCENES_CLASSES, Detections, rotated_iou
from bevfusion.model.head._config import NMS_KINDS, ConvUnit, HeadConfig, MapSizes
from bevfusion.model.head._decode import circle_nms, decode, greedy_nms, rotated_nms, valid_rows
from bevfusion.model.head._head import (
    DecoderLayer,
    QueryPicker,
    TransFusionHead,
    best_queries,
    local_maxima,
)

__all__ = [
    "NMS_KINDS",
    "NUSCENES_CLASSES",
    "ConvUnit",
    "DecoderLayer",
    "Detections",
    "HeadConfig",
    "MapSizes",
    "QueryPicker",
    "TransFusionHead",
    "best_queries",
    "circle_nms",
    "decode",
    "greedy_nms",
    "local_maxima",
    "rotated_iou",
    "rotated_nms",
    "valid_rows",
]
