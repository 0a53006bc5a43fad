"""Fixed-point modules, and FloatFunctional under its documented path."""

from __future__ import annotations

from bevquant_hybrid.nn._functions import FLOAT_OPERATIONS, Arithmetic, FloatFunctional
from bevquant_hybrid.nn.quantized._others import (
    GLU,
    BatchNorm2d,
    Correlation,
    Div,
    LayerNorm,
    MultiScaleRoIAlign,
    fixed_point_form,
)
from bevquant_hybrid.nn.quantized._weighted import (
    Conv2d,
    Conv3d,
    ConvTranspose2d,
    FixedPoint,
    Linear,
)
from bevquant_hybrid.nn.quantized.avg_pool2d import AdaptiveAvgPool2d, AvgPool2d
from bevquant_hybrid.nn.quantized.functional_modules import QFunctional
from bevquant_hybrid.nn.quantized.interpolate import Interpolate
from bevquant_hybrid.nn.quantized.quantize import DeQuantize, Quantize
from bevquant_hybrid.nn.quantized.relu import ReLU, ReLU6
from bevquant_hybrid.nn.quantized.segment_lut import SegmentLUT

from .upsampling import Upsample, UpsamplingBilinear2d, UpsamplingNearest2d

__all__ = [
    "FLOAT_OPERATIONS",
    "GLU",
    "AdaptiveAvgPool2d",
    "Arithmetic",
    "AvgPool2d",
    "BatchNorm2d",
    "Conv2d",
    "Conv3d",
    "ConvTranspose2d",
    "Correlation",
    "DeQuantize",
    "Div",
    "FixedPoint",
    "FloatFunctional",
    "Interpolate",
    "LayerNorm",
    "Linear",
    "MultiScaleRoIAlign",
    "QFunctional",
    "Quantize",
    "ReLU",
    "ReLU6",
    "SegmentLUT",
    "Upsample",
    "UpsamplingBilinear2d",
    "UpsamplingNearest2d",
    "fixed_point_form",
]
