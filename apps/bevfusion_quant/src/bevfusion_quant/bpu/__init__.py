"""BEVFusion for a Horizon BPU: dense parts in integers there, the rest in float on the CPU."""

from bevfusion_quant.bpu._compare import Models, compare_forms
from bevfusion_quant.bpu._prepare import SplitUnits
from bevfusion_quant.bpu._quantize import Forms, calibrating_form, for_march
from bevfusion_quant.bpu._run import (
    BpuResult,
    LoadedBpuRun,
    load_bpu_run,
    run_bpu,
    run_bpu_evaluate,
)
from bevfusion_quant.bpu._units import SplitModel, bpu_parts
from bevfusion_quant.options import BpuConfig, MarchName
from bevfusion_quant.results import (
    BpuComparison,
    BpuEstimate,
    BpuLayer,
    BpuOutcome,
    BpuStage,
    bpu_text,
)

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
