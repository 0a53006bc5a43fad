"""Quantization-aware training: a quantized run goes on learning with its rounding in place."""

from bevfusion_quant.qat._run import QatResult, read_trainable, run_qat
from bevfusion_quant.qat._trainer import QatConfig, Trainer
from bevquant_qnn import (
    FramePart,
    RangeFollower,
    StepSum,
    add_up,
    parts_in_order,
    weighted_layers,
)

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
