"""A quantized model in integer arithmetic: what an INT8 chip computes, beside float and fake."""

from bevfusion.quantization import (
    FloatIsland,
    IntegerStage,
    SavedPart,
    Simulation,
    in_integers,
    integer_stages,
)
from bevfusion_quant.integer._simulation import (
    Lowered,
    check_backend,
    lower_model,
    simulate_model,
)
from bevfusion_quant.integer._text import QUERIES, simulation_text
from bevfusion_quant.options import Backend

__all__ = [
    "QUERIES",
    "Backend",
    "FloatIsland",
    "IntegerStage",
    "Lowered",
    "SavedPart",
    "Simulation",
    "check_backend",
    "in_integers",
    "integer_stages",
    "lower_model",
    "simulate_model",
    "simulation_text",
]
