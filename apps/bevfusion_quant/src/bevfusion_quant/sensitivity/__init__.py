"""What each layer's rounding costs a finished run's model, and the precisions to give the layers.

`run_sensitivity` is the command, `measure_sensitivity` its measurement alone, `plan_within` the
estimated plan for a budget, `refine_within` the best measured one.
"""

from bevfusion.quantization import KeptScores
from bevfusion_quant.options import SensitivityOutput as Output
from bevfusion_quant.results import SensitivityOutcome, sensitivity_text
from bevfusion_quant.sensitivity._measure import measure_sensitivity, sensitivity_output
from bevfusion_quant.sensitivity._run import (
    SensitivityResult,
    parse_budget,
    plan_within,
    precisions_of,
    refine_within,
    run_sensitivity,
)

__all__ = [
    "KeptScores",
    "Output",
    "SensitivityOutcome",
    "SensitivityResult",
    "measure_sensitivity",
    "parse_budget",
    "plan_within",
    "precisions_of",
    "refine_within",
    "run_sensitivity",
    "sensitivity_output",
    "sensitivity_text",
]
