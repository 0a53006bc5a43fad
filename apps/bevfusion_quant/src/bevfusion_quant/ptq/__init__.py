"""Post-training quantization of BEVFusion or a part of it, whole or step by step."""

from bev_data.metrics import AgreementRow, DetectionTally, FoundRow, agreement_text, match
from bevfusion.evaluation import PoorData, data_findings
from bevfusion.model import example_batch
from bevfusion.quantization import (
    Comparison,
    StageMaps,
    StageRow,
    compare_layers,
    layer_table,
    stage_table,
)
from bevfusion.quantization import calibrate_detector as calibrate_branch
from bevfusion_quant.frames import FrameBatches, finding_lines, refuse_poor
from bevfusion_quant.options import Branch, Method, PtqConfig, free_name
from bevfusion_quant.ptq._run import EvaluateResult, PtqResult, run_evaluate, run_ptq
from bevfusion_quant.run import run_folder, written_text
from bevfusion_quant.saved_run import LoadedRun, load_quantized, load_run, read_run_config
from bevfusion_quant.stages import (
    Stage,
    built_parts,
    fuse_branch,
    is_detector,
    quantize_branch,
    quantized_parts,
    reads_images,
)
from bevquant_qnn import LayerRow
from bevquant_quantizers import QuantizerRow, QuantizerValues, watch_quantizers

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
