"""Fake quantizers and calibrators, compatible with pytorch-quantization."""

from __future__ import annotations

from . import calib, nn, tensor_quant
from ._fake_quant import fake_quantize
from ._tensor_quantizer import TensorQuantizer, uncalibrated
from .tensor_quant import QuantDescriptor

__all__ = [
    "QuantDescriptor",
    "TensorQuantizer",
    "calib",
    "fake_quantize",
    "nn",
    "tensor_quant",
    "uncalibrated",
]
