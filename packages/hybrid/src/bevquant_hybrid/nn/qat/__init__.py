"""QAT modules."""

from __future__ import annotations

from bevquant_hybrid.nn.qat._attention import LSTMCell, MultiheadAttention
from bevquant_hybrid.nn.qat._base import OutputQuantized
from bevquant_hybrid.nn.qat._composed import GroupNorm, Normalize, Softmax
from bevquant_hybrid.nn.qat._weighted import (
    Conv3d,
    ConvAdd3d,
    ConvAddReLU3d,
    ConvAddReLU63d,
    ConvReLU3d,
    ConvReLU63d,
    ConvTranspose2d,
    ConvTransposeAdd2d,
    ConvTransposeAddReLU2d,
    ConvTransposeAddReLU62d,
    ConvTransposeReLU2d,
    ConvTransposeReLU62d,
    Linear,
    LinearAdd,
    LinearAddReLU,
    LinearAddReLU6,
    LinearReLU,
    LinearReLU6,
    Weighted,
    WithBatchNorm,
)
from bevquant_hybrid.nn.qat.avg_pool2d import AdaptiveAvgPool2d, AvgPool2d
from bevquant_hybrid.nn.qat.batchnorm import BatchNorm2d, BatchNorm3d, SyncBatchNorm
from bevquant_hybrid.nn.qat.functional_modules import FloatFunctional
from bevquant_hybrid.nn.qat.interpolate import Interpolate
from bevquant_hybrid.nn.qat.relu import ReLU, ReLU6
from bevquant_hybrid.nn.qat.segment_lut import SegmentLUT
from bevquant_hybrid.nn.qat.stubs import DeQuantStub, QuantStub

from ._base import GLU, Correlation, Div, LayerNorm, MultiScaleRoIAlign, RMSNorm, Where
from ._replace import QatForms, float_form, has_qat_form, is_elementwise, is_qat, qat_form
from .conv2d import Conv2d, ConvAdd2d, ConvAddReLU2d, ConvAddReLU62d, ConvReLU2d, ConvReLU62d
from .upsampling import Upsample, UpsamplingBilinear2d, UpsamplingNearest2d

__all__ = [
    "GLU",
    "AdaptiveAvgPool2d",
    "AvgPool2d",
    "BatchNorm2d",
    "BatchNorm3d",
    "Conv2d",
    "Conv3d",
    "ConvAdd2d",
    "ConvAdd3d",
    "ConvAddReLU2d",
    "ConvAddReLU3d",
    "ConvAddReLU62d",
    "ConvAddReLU63d",
    "ConvReLU2d",
    "ConvReLU3d",
    "ConvReLU62d",
    "ConvReLU63d",
    "ConvTranspose2d",
    "ConvTransposeAdd2d",
    "ConvTransposeAddReLU2d",
    "ConvTransposeAddReLU62d",
    "ConvTransposeReLU2d",
    "ConvTransposeReLU62d",
    "Correlation",
    "DeQuantStub",
    "Div",
    "FloatFunctional",
    "GroupNorm",
    "Interpolate",
    "LSTMCell",
    "LayerNorm",
    "Linear",
    "LinearAdd",
    "LinearAddReLU",
    "LinearAddReLU6",
    "LinearReLU",
    "LinearReLU6",
    "MultiScaleRoIAlign",
    "MultiheadAttention",
    "Normalize",
    "OutputQuantized",
    "QatForms",
    "QuantStub",
    "RMSNorm",
    "ReLU",
    "ReLU6",
    "SegmentLUT",
    "Softmax",
    "SyncBatchNorm",
    "Upsample",
    "UpsamplingBilinear2d",
    "UpsamplingNearest2d",
    "Weighted",
    "Where",
    "WithBatchNorm",
    "float_form",
    "has_qat_form",
    "is_elementwise",
    "is_qat",
    "qat_form",
]
