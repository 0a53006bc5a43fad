"""BEVFusion for a Horizon BPU: dense parts in integers there, the rest in float on the CPU."""

from bevfusion.deployment import SplitModel
from bevfusion_quant.bpu._compare import compare_forms
from bevfusion_quant.bpu._prepare import (
    Models,
    SplitUnits,
    bpu_parts,
    calibrating_form,
    for_march,
)
from bevfusion_quant.bpu._run import (
    BpuResult,
    LoadedBpuRun,
    load_bpu_run,
    run_bpu,
    run_bpu_evaluate,
)
from bevfusion_quant.bpu_outcome import BpuComparison, BpuOutcome, BpuStage, bpu_text
from bevfusion_quant.options import BpuConfig, MarchName
from bevquant_hybrid_tools.forms import BpuEstimate, BpuLayer, Forms

__all__ = [
    "BpuComparison",
    "BpuConfig",
    "BpuEstimate",
    "BpuLayer",
    "BpuOutcome",
    "BpuResult",
    "BpuStage",
    "Forms",
    "LoadedBpuRun",
    "MarchName",
    "Models",
    "SplitModel",
    "SplitUnits",
    "bpu_parts",
    "bpu_text",
    "calibrating_form",
    "compare_forms",
    "for_march",
    "load_bpu_run",
    "run_bpu",
    "run_bpu_evaluate",
]
