"""Integer kernels, sparse and dense, that compute exactly what an INT8 chip computes."""

from __future__ import annotations

from bevquant_int8sim._backends import BackendStatus, backend_report, choose_backend, usable_backend
from bevquant_int8sim._conv import (
    int8_conv1d,
    int8_conv2d,
    int8_conv3d,
    int8_conv_transpose2d,
    int8_linear,
)
from bevquant_int8sim._elementwise import (
    int8_add,
    int8_concat,
    int8_leaky_relu,
    int8_lookup,
    int8_relu,
    int8_relu6,
    lookup_table,
)
from bevquant_int8sim._plan_rulebook import plan_rulebook
from bevquant_int8sim._pool import int8_avg_pool, int8_max_pool, int8_resize
from bevquant_int8sim._quantize import dequantize, quantize, quantize_bias, requantize
from bevquant_int8sim._rounding import fixed_point_multiplier
from bevquant_int8sim._sample import int8_deform_conv2d, int8_deformable_attention, int8_grid_sample
from bevquant_int8sim._scales import AccumulatorOverflowError
from bevquant_int8sim._sparse_conv import int8_sparse_conv
from bevquant_int8sim._to_dense import int8_to_dense
from bevquant_int8sim.model import (
    FloatFallback,
    IntegerModel,
    Island,
    LayerComparison,
    LayerRow,
    LayerTable,
    Recorded,
    SparseOutput,
    compare,
    simulate,
)

__version__ = "0.2.0"
__all__ = [
    "AccumulatorOverflowError",
    "BackendStatus",
    "FloatFallback",
    "IntegerModel",
    "Island",
    "LayerComparison",
    "LayerRow",
    "LayerTable",
    "Recorded",
    "SparseOutput",
    "backend_report",
    "choose_backend",
    "compare",
    "dequantize",
    "fixed_point_multiplier",
    "int8_add",
    "int8_avg_pool",
    "int8_concat",
    "int8_conv1d",
    "int8_conv2d",
    "int8_conv3d",
    "int8_conv_transpose2d",
    "int8_deform_conv2d",
    "int8_deformable_attention",
    "int8_grid_sample",
    "int8_leaky_relu",
    "int8_linear",
    "int8_lookup",
    "int8_max_pool",
    "int8_relu",
    "int8_relu6",
    "int8_resize",
    "int8_sparse_conv",
    "int8_to_dense",
    "lookup_table",
    "plan_rulebook",
    "quantize",
    "quantize_bias",
    "requantize",
    "simulate",
    "usable_backend",
]
