"""The names that options take.

What packages can add, engines and kinds of data, are entry points, whose names are read without
importing any of them. Other names that a package owns are closed lists in code that imports torch:
they stand here once more, and tests/test_choices.py holds each to its owner's.
"""

from __future__ import annotations

from importlib.metadata import entry_points
from typing import TYPE_CHECKING, Annotated, Literal, TypeAlias

from tyro.constructors import PrimitiveConstructorSpec

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


def _installed(group: str) -> PrimitiveConstructorSpec[str]:
    """The names that installed packages have in a group of entry points, for the help.

    Any name is taken: a program may have registered one, and the registry refuses what it lacks.
    """
    return PrimitiveConstructorSpec(
        nargs=1,
        metavar="{" + ",".join({entry.name: None for entry in entry_points(group=group)}) + "}",
        instance_from_str=lambda given: given[0],
        is_instance=lambda value: isinstance(value, str),
        str_from_instance=lambda name: [name],
    )


ConfigName = Literal["nuscenes", "tiny"]
"""`bevfusion.model.CONFIGS`."""

PartBranch = Literal["camera", "lidar", "fuser", "decoder", "head", "all"]
Branch = Literal[PartBranch, "lidar-detector", "camera-detector"]
"""What is quantized; `ptq._branches` says which parts that means."""

TrainedBranch = Literal["lidar", "camera", "all"]

if TYPE_CHECKING:
    DatasetKind: TypeAlias = str
    ExportTarget: TypeAlias = str
else:
    DatasetKind = Annotated[str, _installed("bevquant.datasets")]
    ExportTarget = Annotated[str, _installed("bevquant.targets")]

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

Cpu = Literal["vnni", "any"]
"""Of `bevquant_export`: CPUs that files are written for."""
