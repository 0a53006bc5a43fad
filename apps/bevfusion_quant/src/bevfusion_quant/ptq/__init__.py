"""Post-training quantization of BEVFusion or a part of it, whole or step by step."""

from bevfusion_quant.ptq._agreement import AgreementRow, DetectionTally, FoundRow, match
from bevfusion_quant.ptq._batches import FrameBatches
from bevfusion_quant.ptq._branches import (
    Branch,
    built_parts,
    is_detector,
    quantized_parts,
    reads_images,
)
from bevfusion_quant.ptq._compare import Comparison, LayerRow, compare_layers
from bevfusion_quant.ptq._config import PtqConfig
from bevfusion_quant.ptq._evaluate import EvaluateResult, run_evaluate
from bevfusion_quant.ptq._load_run import (
    LoadedRun,
    load_quantized,
    load_run,
    read_run_config,
)
from bevfusion_quant.ptq._poor_data import PoorData, data_findings, finding_lines, refuse_poor
from bevfusion_quant.ptq._quantizer_values import (
    QuantizerRow,
    QuantizerValues,
    watch_quantizers,
)
from bevfusion_quant.ptq._run import PtqResult, run_ptq
from bevfusion_quant.ptq._run_folder import free_name, run_folder, written_text
from bevfusion_quant.ptq._stage_maps import StageMaps, StageRow
from bevfusion_quant.ptq._stages import (
    Method,
    Stage,
    calibrate_branch,
    example_batch,
    fuse_branch,
    quantize_branch,
)
from bevfusion_quant.ptq._summary import agreement_text, layer_table, stage_table

__all__ = [
    "AgreementRow",
    "Branch",
    "Comparison",
    "DetectionTally",
    "EvaluateResult",
    "FoundRow",
    "FrameBatches",
    "LayerRow",
    "LoadedRun",
    "Method",
    "PoorData",
    "PtqConfig",
    "PtqResult",
    "QuantizerRow",
    "QuantizerValues",
    "Stage",
    "StageMaps",
    "StageRow",
    "agreement_text",
    "built_parts",
    "calibrate_branch",
    "compare_layers",
    "data_findings",
    "example_batch",
    "finding_lines",
    "free_name",
    "fuse_branch",
    "is_detector",
    "layer_table",
    "load_quantized",
    "load_run",
    "match",
    "quantize_branch",
    "quantized_parts",
    "read_run_config",
    "reads_images",
    "refuse_poor",
    "run_evaluate",
    "run_folder",
    "run_ptq",
    "stage_table",
    "watch_quantizers",
    "written_text",
]
