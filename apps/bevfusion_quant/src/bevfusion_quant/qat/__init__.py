"""Quantization-aware training: a quantized run goes on learning with its rounding in place."""

from bevfusion_quant.qat._config import QatConfig
from bevfusion_quant.qat._frame_part import FramePart, StepSum, add_up
from bevfusion_quant.qat._run import QatResult, run_qat

__all__ = [
    "FramePart",
    "QatConfig",
    "QatResult",
    "StepSum",
    "add_up",
    "run_qat",
]
