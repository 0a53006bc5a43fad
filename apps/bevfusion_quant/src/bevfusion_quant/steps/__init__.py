"""The steps of the job one by one, from a float model to a calibrated one, on disk and back."""

from bevfusion.model import example_batch
from bevfusion.quantization import expand_patterns
from bevfusion_quant.steps._branches import (
    built_parts,
    is_detector,
    quantized_parts,
    reads_images,
    why_float,
)
from bevfusion_quant.steps._load_run import (
    LoadedRun,
    ModelSettings,
    frames_for_run,
    load_quantized,
    load_run,
    read_model_settings,
    read_run_config,
    refuse_unfolded,
    save_model,
)
from bevfusion_quant.steps._plan import (
    PLAN_FILE,
    apply_plan,
    before_calibration,
    planned_layers,
    read_plan,
    refuse_in_files,
)
from bevfusion_quant.steps._stages import (
    Stage,
    calibrate_branch,
    fill_weights,
    fuse_branch,
    keep_batch_norms,
    quantize_as,
    quantize_branch,
    round_branch,
    run_batch,
)

__all__ = [
    "PLAN_FILE",
    "LoadedRun",
    "ModelSettings",
    "Stage",
    "apply_plan",
    "before_calibration",
    "built_parts",
    "calibrate_branch",
    "example_batch",
    "expand_patterns",
    "fill_weights",
    "frames_for_run",
    "fuse_branch",
    "is_detector",
    "keep_batch_norms",
    "load_quantized",
    "load_run",
    "planned_layers",
    "quantize_as",
    "quantize_branch",
    "quantized_parts",
    "read_model_settings",
    "read_plan",
    "read_run_config",
    "reads_images",
    "refuse_in_files",
    "refuse_unfolded",
    "round_branch",
    "run_batch",
    "save_model",
    "why_float",
]
