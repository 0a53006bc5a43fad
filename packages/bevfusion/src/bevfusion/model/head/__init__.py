"""mit-bevfusion's TransFusion head: from the fused bird's-eye view to boxes."""

from bev_data.boxes import NUSCENES_CLASSES, Detections, rotated_iou
from bevfusion.model.head._config import NMS_KINDS, HeadConfig
from bevfusion.model.head._decode import decode
from bevfusion.model.head._head import TransFusionHead
from bevfusion.model.head._nms import circle_nms, rotated_nms
from bevfusion.model.head._queries import QueryPicker

__all__ = [
    "NMS_KINDS",
    "NUSCENES_CLASSES",
    "Detections",
    "HeadConfig",
    "QueryPicker",
    "TransFusionHead",
    "circle_nms",
    "decode",
    "rotated_iou",
    "rotated_nms",
]
