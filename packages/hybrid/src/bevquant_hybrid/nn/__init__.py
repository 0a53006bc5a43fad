"""Float modules in place of functions, and their QAT and fixed-point forms."""

from __future__ import annotations

from bevquant_hybrid.nn import functional, intrinsic, qat, quantized
from bevquant_hybrid.nn._correlation import Correlation
from bevquant_hybrid.nn._functions import (
    Acos,
    Acosh,
    Asin,
    Asinh,
    Atan,
    Atanh,
    Ceil,
    Cos,
    Cosh,
    Div,
    Erf,
    Exp,
    Floor,
    GridSample,
    HardLog,
    Interpolate,
    LayerNorm,
    Pow,
    Reciprocal,
    RMSNorm,
    Selu,
    Sin,
    Sinh,
    Sqrt,
    Tan,
)
from bevquant_hybrid.nn._pillars import PointPillarsScatter
from bevquant_hybrid.nn._rcnn import AnchorGenerator, RcnnPostProcess
from bevquant_hybrid.nn._roi_align import MultiScaleRoIAlign
from bevquant_hybrid.nn.bgr_to_yuv444 import BgrToYuv444
from bevquant_hybrid.nn.detection_post_process import DetectionPostProcess
from bevquant_hybrid.nn.detection_post_process_v1 import DetectionPostProcessV1

__all__ = [
    "Acos",
    "Acosh",
    "AnchorGenerator",
    "Asin",
    "Asinh",
    "Atan",
    "Atanh",
    "BgrToYuv444",
    "Ceil",
    "Correlation",
    "Cos",
    "Cosh",
    "DetectionPostProcess",
    "DetectionPostProcessV1",
    "Div",
    "Erf",
    "Exp",
    "Floor",
    "GridSample",
    "HardLog",
    "Interpolate",
    "LayerNorm",
    "MultiScaleRoIAlign",
    "PointPillarsScatter",
    "Pow",
    "RMSNorm",
    "RcnnPostProcess",
    "Reciprocal",
    "Selu",
    "Sin",
    "Sinh",
    "Sqrt",
    "Tan",
    "functional",
    "intrinsic",
    "qat",
    "quantized",
]
