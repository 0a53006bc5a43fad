"""Integer kernels, sparse and dense, that compute exactly what an INT8 chip computes."""

from __future__ import annotations

from bevquant_int8sim._accumulator import AccumulatorOverflowError
from bevquant_int8sim._backends import BackendStatus, backend_report
from bevquant_int8sim._fixed_point import fixed_point_multiplier
from bevquant_int8sim._quantize import dequantize, quantize, quantize_bias
from bevquant_int8sim._requantize import requantize
from bevquant_int8sim._sparse_conv import int8_sparse_conv

__all__ = [
    "AccumulatorOverflowError",
    "BackendStatus",
    "backend_report",
    "dequantize",
    "fixed_point_multiplier",
    "int8_sparse_conv",
    "quantize",
    "quantize_bias",
    "requantize",
]
