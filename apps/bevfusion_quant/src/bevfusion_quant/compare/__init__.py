"""Several finished runs of one float model, judged by the same labels in one pass."""

from bevfusion_quant.compare._comparison import ComparedRun, Comparison, comparison_text
from bevfusion_quant.compare._run import CompareResult, names_of, run_compare

__all__ = [
    "CompareResult",
    "ComparedRun",
    "Comparison",
    "comparison_text",
    "names_of",
    "run_compare",
]
