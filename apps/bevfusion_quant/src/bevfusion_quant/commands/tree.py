"""`bevfusion-quant tree`: the modules at one stage of the job."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from bevfusion_quant._errors import InputError
from bevfusion_quant.options import ConfigName, PartBranch

if TYPE_CHECKING:
    from torch import nn

__all__ = ["Tree", "tree"]


@dataclass(frozen=True)
class Tree:
    """Print the module tree at one stage.

    Args:
        branch: Which part, as in `ptq`.
        stage: float, with BatchNorms folded, or with quantizers in place.
        config: Sizes of the model.
        quantize_head: With --branch all, quantizers in the head too.
    """

    branch: PartBranch = "lidar"
    stage: Literal["float", "fused", "quantized"] = "float"
    config: ConfigName = "nuscenes"
    quantize_head: bool = False

    def execute(self, command: str) -> str:
        """Answer the tree; `command` says nothing here."""
        if self.quantize_head and self.branch != "all":
            raise InputError(f"--quantize-head goes with --branch all, not with {self.branch}")
        return str(tree(self.stage, self.config, self.branch, quantize_head=self.quantize_head))


def tree(
    stage: str,
    config: str = "nuscenes",
    branch: PartBranch = "lidar",
    *,
    quantize_head: bool = False,
) -> nn.Module:
    """The part of the model that a stage is about, ready to be printed.

    The part alone for `camera`, `lidar`, `fuser`, `decoder` and `head`, the whole model for `all`.
    Of the LiDAR branch, the float stage is all of it (voxelize, backbone); folding and quantization
    rewrite the backbone, and the other stages are that alone. Quantizers are not calibrated.
    """
    from bevfusion.model import CONFIGS, PART_PATHS, build_model
    from bevfusion_quant.ptq import built_parts, example_batch, fuse_branch, quantize_branch

    sizes = CONFIGS[config]
    model = build_model(sizes, built_parts(branch))
    path = "" if branch == "all" else PART_PATHS[branch]
    if stage == "float":
        return model.get_submodule(path)
    if branch == "lidar":
        path += ".backbone"
    example = example_batch(sizes)
    fused = fuse_branch(model, example).model
    if stage == "fused":
        return fused.get_submodule(path)
    quantized = quantize_branch(fused, example, branch, with_head=quantize_head).model
    return quantized.get_submodule(path)
