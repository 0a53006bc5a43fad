"""Quantization-aware training: a quantized run goes on learning with its rounding in place."""

from bevfusion_quant.qat._run import QatResult, read_trainable, run_qat
from bevfusion_quant.qat._trainer import (
    FramePart,
    QatConfig,
    StepSum,
    Trainer,
    add_up,
    parts_in_order,
)
from bevquant_qnn import RangeFollower, weighted_layers

__all__ = [
    "FramePart",
    "QatConfig",
    "QatResult",
    "RangeFollower",
    "StepSum",
    "Trainer",
    "add_up",
    "parts_in_order",
    "read_trainable",
    "run_qat",
    "weighted_layers",
]
