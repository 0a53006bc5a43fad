"""Options of the commands: read from the command line, stored in runs, passed by callers.

The configurations (`ptq.PtqConfig`, `bpu.BpuConfig`, `train.TrainConfig`, `qat.QatConfig`) are
these classes with every default resolved. The commands (`commands`) add frames and a folder for the
run. Help texts are the docstrings. Nothing here imports torch, so `--help` is fast.
"""

from bevfusion_quant.options._choices import (
    AnyModelName,
    Backend,
    Branch,
    ConfigName,
    Cpu,
    DatasetKind,
    ExportTarget,
    MarchName,
    Method,
    ModelName,
    PartBranch,
    Precision,
    Rounding,
    SensitivityMetric,
    SensitivityOutput,
    Target,
    TrainedBranch,
    WeightLayout,
)
from bevfusion_quant.options._help import saved_options
from bevfusion_quant.options._run import (
    BootstrapOptions,
    BpuConfig,
    DryRun,
    FrameOptions,
    Place,
    PtqConfig,
    PtqOptions,
    RunOptions,
    ShownOptions,
    TargetOptions,
    check_options,
    config_from,
    free_name,
)
from bevfusion_quant.options._training import QatOptions, TrainingOptions, TrainOptions

__all__ = [
    "AnyModelName",
    "Backend",
    "BootstrapOptions",
    "BpuConfig",
    "Branch",
    "ConfigName",
    "Cpu",
    "DatasetKind",
    "DryRun",
    "ExportTarget",
    "FrameOptions",
    "MarchName",
    "Method",
    "ModelName",
    "PartBranch",
    "Place",
    "Precision",
    "PtqConfig",
    "PtqOptions",
    "QatOptions",
    "Rounding",
    "RunOptions",
    "SensitivityMetric",
    "SensitivityOutput",
    "ShownOptions",
    "Target",
    "TargetOptions",
    "TrainOptions",
    "TrainedBranch",
    "TrainingOptions",
    "WeightLayout",
    "check_options",
    "config_from",
    "free_name",
    "saved_options",
]
