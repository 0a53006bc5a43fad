"""BEVFusion for a Horizon BPU: dense parts in integers there, the rest in float on the CPU."""

from bevfusion.deployment import SplitComparison as BpuComparison
from bevfusion.deployment import SplitModel
from bevfusion.deployment import SplitStage as BpuStage
from bevfusion_quant.bpu._prepare import (
    Models,
    SplitUnits,
    bpu_parts,
    calibrating_form,
    compare_forms,
    for_march,
)
from bevfusion_quant.bpu._run import (
    BpuResult,
    LoadedBpuRun,
    load_bpu_run,
    run_bpu,
    run_bpu_evaluate,
)
from bevfusion_quant.bpu_outcome import BpuOutcome, bpu_text
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
