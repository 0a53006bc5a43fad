"""The names that options take.

What another package owns is named here once more, since that package imports torch;
tests/test_choices.py holds each list to its owner's.
"""

from __future__ import annotations

from typing import Literal

__all__ = [
    "Backend",
    "Branch",
    "ConfigName",
    "Cpu",
    "DatasetKind",
    "ExportTarget",
    "MarchName",
    "Method",
    "PartBranch",
    "Precision",
    "Rounding",
    "SensitivityMetric",
    "SensitivityOutput",
    "Target",
    "TrainedBranch",
    "WeightLayout",
]

ConfigName = Literal["nuscenes", "tiny"]
"""`bevfusion.model.CONFIGS`."""

PartBranch = Literal["camera", "lidar", "fuser", "decoder", "head", "all"]
Branch = Literal[PartBranch, "lidar-detector", "camera-detector"]
"""What is quantized; `ptq._branches` says which parts that means."""

TrainedBranch = Literal["lidar", "camera", "all"]

DatasetKind = Literal["street", "pandaset", "kitti", "files", "nuscenes"]
"""What `bev_data.datasets.open_dataset` knows, and the streets of `bev_scenes`."""

WeightLayout = Literal["auto", "RSCK", "KRSC", "KCRS"]
"""Of `bevquant_sparse.WeightLayout` those that checkpoints of BEVFusion have."""

Method = Literal["mse", "max", "entropy", "percentile"]
"""Of `bevquant_quantizers.calibrate`."""

Rounding = Literal["nearest", "gptq"]
"""Of `bevquant_qnn.round_weights`."""

Precision = Literal["int4", "int8", "int16"]
"""Of `bevquant_qnn.PrecisionPlan`, beside float."""

SensitivityMetric = Literal["sqnr", "kl", "mAP"]
SensitivityOutput = Literal["map", "heatmap"]

Target = Literal["nvidia", "bpu"]

MarchName = Literal["bayes", "bernoulli2", "bayes-e"]
"""Of `bevquant_hybrid.march` those whose estimates and partition the app knows."""

Backend = Literal["auto", "amx", "vnni", "portable", "torch"]
"""Kernels of `bevquant_int8sim`."""

ExportTarget = Literal[
    "tensorrt", "tensorrt10", "tensorrt11", "onnxruntime", "openvino", "autoware", "bpu"
]

Cpu = Literal["vnni", "any"]
"""Of `bevquant_export`: CPUs that files are written for."""
