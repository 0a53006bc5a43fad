"""Fixed-point modules, and FloatFunctional under its documented path."""

from __future__ import annotations

from bevquant_hybrid.nn._float_functional import FloatFunctional
from bevquant_hybrid.nn.quantized._correlation import Correlation
from bevquant_hybrid.nn.quantized._others import (
    GLU,
    AdaptiveAvgPool2d,
    AvgPool2d,
    BatchNorm2d,
    Div,
    LayerNorm,
    MultiScaleRoIAlign,
    SegmentLUT,
)
from bevquant_hybrid.nn.quantized._replace import fixed_point_form
from bevquant_hybrid.nn.quantized._weighted import Conv2d, Conv3d, ConvTranspose2d, Linear
from bevquant_hybrid.nn.quantized.functional_modules import QFunctional
from bevquant_hybrid.nn.quantized.quantize import DeQuantize, Quantize

__all__ = [
    "GLU",
    "AdaptiveAvgPool2d",
    "AvgPool2d",
    "BatchNorm2d",
    "Conv2d",
    "Conv3d",
    "ConvTranspose2d",
    "Correlation",
    "DeQuantize",
    "Div",
    "FloatFunctional",
    "LayerNorm",
    "Linear",
    "MultiScaleRoIAlign",
    "QFunctional",
    "Quantize",
    "SegmentLUT",
    "fixed_point_form",
]
