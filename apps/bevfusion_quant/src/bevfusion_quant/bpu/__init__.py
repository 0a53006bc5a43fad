"""BEVFusion for a Horizon BPU: dense parts in integers there, the rest in float on the CPU."""

from bevfusion_quant.bpu._config import BpuConfig, bpu_parts
from bevfusion_quant.bpu._run import run_bpu, run_bpu_evaluate
from bevfusion_quant.bpu._save import LoadedBpuRun, load_bpu_run
from bevfusion_quant.bpu._write import BpuResult
from bevfusion_quant.options import MarchName
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
    "LoadedBpuRun",
    "MarchName",
    "bpu_parts",
    "bpu_text",
    "load_bpu_run",
    "run_bpu",
    "run_bpu_evaluate",
]
