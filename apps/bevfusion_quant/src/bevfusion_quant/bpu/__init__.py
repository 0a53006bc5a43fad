"""BEVFusion for a Horizon BPU: dense parts in integers there, the rest in float on the CPU."""

from bevfusion_quant.bpu._config import BpuConfig, MarchName, bpu_parts
from bevfusion_quant.bpu._estimate import BpuEstimate
from bevfusion_quant.bpu._load import LoadedBpuRun, load_bpu_run
from bevfusion_quant.bpu._outcome import BpuOutcome
from bevfusion_quant.bpu._rows import BpuComparison, BpuLayer, BpuStage
from bevfusion_quant.bpu._run import run_bpu, run_bpu_evaluate
from bevfusion_quant.bpu._text import bpu_text
from bevfusion_quant.bpu._write import BpuResult

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
