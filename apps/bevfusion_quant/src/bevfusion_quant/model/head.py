"""`bevfusion.model.head` under the name that it had here."""

from bevfusion.model.head import (
    NMS_KINDS,
    NUSCENES_CLASSES,
    Detections,
    HeadConfig,
    QueryPicker,
    TransFusionHead,
    circle_nms,
    decode,
    rotated_iou,
    rotated_nms,
)

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
