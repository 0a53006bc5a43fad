"""The model at each stage: float, folded, quantized, calibrated."""

from __future__ import annotations

import copy
from collections.abc import Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Generic, Literal, TypeVar

import torch
from torch import nn

from bevfusion_quant.ptq._compare import Batch

if TYPE_CHECKING:
    from bevfusion_quant.model import BEVFusion, LidarConfig
    from bevquant_fusion import FusionResult
    from bevquant_qnn import QuantizeResult
    from bevquant_quantizers import CalibrationReport

__all__ = ["Method", "Stage", "calibrate_branch", "example_batch", "fuse_branch", "quantize_branch"]

Method = Literal["mse", "max", "entropy", "percentile"]


Result = TypeVar("Result")


@dataclass(frozen=True)
class Stage(Generic[Result]):
    """A branch, and what was done to get it."""

    model: BEVFusion
    result: Result


def example_batch(config: LidarConfig) -> Batch:
    """A few voxels in the middle of the grid: enough for a model to be traced with."""
    x, y, z = (n // 2 for n in config.sparse_shape)
    steps = torch.arange(8, dtype=torch.int32)
    coords = torch.stack([steps * 0, x + steps, y + steps % 3, z + steps % 2], dim=1)
    features = torch.linspace(-1, 1, 8 * config.in_channels).reshape(8, config.in_channels)
    return Batch(features, coords.contiguous(), 1)


def fuse_branch(model: BEVFusion, example: Batch) -> Stage[FusionResult]:
    """A copy of the float branch with every BatchNorm folded into its convolution."""
    from bevquant_fusion import fuse_model

    result = fuse_model(model.lidar["backbone"], example_inputs=example)
    return Stage(_with_backbone(model, result.model), result)


def quantize_branch(
    fused: BEVFusion, example: Batch, *, method: Method = "mse", exclude: Iterable[str] = ()
) -> Stage[QuantizeResult]:
    """A copy of the folded branch with quantizers in place, not calibrated yet.

    Args:
        fused: From `fuse_branch`; stays as it is.
        example: Anything the branch can run on.
        method: "max" puts running-maximum calibrators on activations, the others histograms.
        exclude: Paths or globs below the backbone to leave float, such as `conv_input.*`.
    """
    from bevquant_qnn import QuantConfig, quantize_model

    config = QuantConfig(
        input_calibrator="max" if method == "max" else "histogram", exclude=tuple(exclude)
    )
    backbone = copy.deepcopy(fused.lidar["backbone"])
    result = quantize_model(backbone, config, example_inputs=example)
    return Stage(_with_backbone(fused, result.model), result)


def calibrate_branch(
    model: BEVFusion, batches: Iterable[Batch], *, method: Method = "mse"
) -> CalibrationReport:
    """Find every quantizer's range from the batches, in place."""
    from bevquant_quantizers import calibrate

    return calibrate(model, batches, forward=_run, method=method)


def _run(model: nn.Module, batch: Any) -> Any:
    return model(*batch)


def _with_backbone(model: BEVFusion, backbone: nn.Module) -> BEVFusion:
    """The same branch around another backbone."""
    from bevfusion_quant.model import BEVFusion

    return BEVFusion(copy.deepcopy(model.lidar["voxelize"]), backbone).eval()
