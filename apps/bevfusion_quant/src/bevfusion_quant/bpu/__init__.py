"""BEVFusion for a Horizon BPU: dense parts in integers there, the rest in float on the CPU."""

from bevfusion.deployment import SplitComparison as BpuComparison
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
from bevfusion_quant.bpu_outcome import BpuOutcome
from bevfusion_quant.options import BpuConfig
from bevquant_hybrid_tools.forms import BpuEstimate, BpuLayer

__all__ = [
    "BpuComparison",
    "BpuConfig",
    "BpuEstimate",
    "BpuLayer",
    "BpuOutcome",
    "BpuResult",
    "BpuStage",
    "LoadedBpuRun",
    "Models",
    "SplitUnits",
    "bpu_parts",
    "calibrating_form",
    "compare_forms",
    "for_march",
    "load_bpu_run",
    "run_bpu",
    "run_bpu_evaluate",
]
