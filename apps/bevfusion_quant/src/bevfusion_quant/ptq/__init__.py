"""Post-training quantization of the LiDAR branch, whole or step by step."""

from bevfusion_quant.ptq._batches import VoxelBatches
from bevfusion_quant.ptq._compare import Batch, Comparison, LayerRow, compare_layers
from bevfusion_quant.ptq._load_run import load_quantized
from bevfusion_quant.ptq._quantizer_values import (
    QuantizerRow,
    QuantizerValues,
    watch_quantizers,
)
from bevfusion_quant.ptq._run import PtqConfig, PtqResult, run_ptq
from bevfusion_quant.ptq._run_folder import free_name, run_folder
from bevfusion_quant.ptq._stages import (
    Method,
    Stage,
    calibrate_branch,
    example_batch,
    fuse_branch,
    quantize_branch,
)
from bevfusion_quant.ptq._summary import layer_table

__all__ = [
    "Batch",
    "Comparison",
    "LayerRow",
    "Method",
    "PtqConfig",
    "PtqResult",
    "QuantizerRow",
    "QuantizerValues",
    "Stage",
    "VoxelBatches",
    "calibrate_branch",
    "compare_layers",
    "example_batch",
    "free_name",
    "fuse_branch",
    "layer_table",
    "load_quantized",
    "quantize_branch",
    "run_folder",
    "run_ptq",
    "watch_quantizers",
]
