"""`bevfusion-quant tree`: the modules at one stage of the job."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

from bevfusion_quant._errors import InputError
from bevfusion_quant.options import AnyModelName, ConfigName, PartBranch

if TYPE_CHECKING:
    from torch import nn

__all__ = ["Tree", "tree"]


@dataclass(frozen=True)
class Tree:
    """Print a model's module tree: float, with folded batch norms, or quantized.

    Args:
        model: Detector, as in `ptq`. One in other code is traced with a street.
        branch: Part, as in `ptq`. Default: lidar of bevfusion, all of other detectors.
        stage: Stage of the job: float, fused (batch norms folded) or quantized.
        config: Sizes of the model, or FILE: the config.json or the folder of a run.
        quantize_head: Quantize the head too, with --branch all.
    """

    model: AnyModelName = "bevfusion"
    branch: PartBranch | None = None
    stage: Literal["float", "fused", "quantized"] = "float"
    config: ConfigName = "nuscenes"
    quantize_head: bool = False

    def execute(self, command: str) -> str:
        """Return the tree; `command` is not used."""
        branch = self.branch or ("lidar" if self.model == "bevfusion" else "all")
        if self.quantize_head and branch != "all":
            raise InputError(f"--quantize-head goes with --branch all, not with {branch}")
        quantize_head = self.quantize_head
        return str(tree(self.stage, self.config, branch, self.model, quantize_head=quantize_head))


def tree(
    stage: str,
    config: str = "nuscenes",
    branch: PartBranch = "lidar",
    model: str = "bevfusion",
    *,
    quantize_head: bool = False,
) -> nn.Module:
    """The part of the model at a stage, ready to be printed.

    A single part for a part, the whole model for `all`. The LiDAR branch at the float stage has
    voxelization and backbone; folding and quantization rewrite the backbone, so later stages show
    the backbone alone. Quantizers are not calibrated.
    """
    from bev_scenes import stored_street
    from bevfusion.detectors import build_detector, example_of
    from bevfusion_quant.ptq import fuse_branch, quantize_branch
    from bevfusion_quant.stages import built_parts, sizes_of

    sizes = sizes_of(model, config)
    built = build_detector(sizes, built_parts(branch, model))
    paths = [""] if branch == "all" else list(built.part_paths[branch])
    if stage == "float":
        return _below(built, paths)
    # Folding and quantization rewrite the backbone and leave the voxelization out.
    if built.stages.get(branch, "").startswith(f"{paths[0]}.") and branch == "lidar":
        paths = [built.stages[branch]]
    given: Any = built.arguments(stored_street())
    example = example_of(sizes, given)
    fused = fuse_branch(built, example).model
    if stage == "fused":
        return _below(fused, paths)
    return _below(quantize_branch(fused, example, branch, with_head=quantize_head).model, paths)


def _below(model: nn.Module, paths: list[str]) -> nn.Module:
    from torch import nn

    found = {path: model.get_submodule(path) for path in paths}
    return found[paths[0]] if len(found) == 1 else nn.ModuleDict(found)
