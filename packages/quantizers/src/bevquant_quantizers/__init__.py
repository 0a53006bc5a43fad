"""Fake quantizers and calibrators, compatible with pytorch-quantization."""

from __future__ import annotations

from . import calib, documents, nn, plugins, ranks, tensor_quant
from ._adopt import adopt_quantizers
from ._affine import AffineQuantizer
from ._blocks import Blocks, fake_quantize_blocks, quantize_blocks
from ._calibrate import calibrate
from ._calibrator_state import calibrator_state, load_calibrator_state
from ._distributed import PeerError, all_merge, merge
from ._fake_quant import fake_quantize
from ._findings import CalibrationFinding
from ._float_ranges import FloatRange, float_ranges
from ._format import Format, NumBits, format_of
from ._ranges import load_ranges, save_ranges
from ._report import CalibrationReport, QuantizerReport
from ._select import (
    NamedQuantizer,
    named_quantizers,
    quantization_disabled,
    quantization_enabled,
    select,
    uncalibrated,
)
from ._watch import QuantizerRow, QuantizerValues, watch_quantizers, watching_quantizers
from .documents import DocumentError, JsonDocument, write_whole
from .nn import TensorQuantizer
from .tensor_quant import QuantDescriptor

__version__ = "0.2.0"
__all__ = [
    "AffineQuantizer",
    "Blocks",
    "CalibrationFinding",
    "CalibrationReport",
    "DocumentError",
    "FloatRange",
    "Format",
    "JsonDocument",
    "NamedQuantizer",
    "NumBits",
    "PeerError",
    "QuantDescriptor",
    "QuantizerReport",
    "QuantizerRow",
    "QuantizerValues",
    "TensorQuantizer",
    "adopt_quantizers",
    "all_merge",
    "calib",
    "calibrate",
    "calibrator_state",
    "documents",
    "fake_quantize",
    "fake_quantize_blocks",
    "float_ranges",
    "format_of",
    "load_calibrator_state",
    "load_ranges",
    "merge",
    "named_quantizers",
    "nn",
    "plugins",
    "quantization_disabled",
    "quantization_enabled",
    "quantize_blocks",
    "ranks",
    "save_ranges",
    "select",
    "tensor_quant",
    "uncalibrated",
    "watch_quantizers",
    "watching_quantizers",
    "write_whole",
]
