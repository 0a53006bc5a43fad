"""What a state dict that does not fit seems to be, from its names and shapes."""

from __future__ import annotations

from collections.abc import Mapping

from torch import Tensor, nn

__all__ = ["config_of", "kind_of"]

# A part of a name that only one kind of checkpoint has, and what that kind is.
_KINDS = (
    ("_amax", "this is a checkpoint with quantizers: give the float one it was made from"),
    (
        "img_backbone.",
        "these are mmdetection3d's names (img_backbone, pts_middle_encoder, …): convert the "
        "checkpoint to mit-bevfusion's names first",
    ),
    (
        "pts_middle_encoder.",
        "these are mmdetection3d's names (pts_middle_encoder, …): convert the checkpoint to "
        "mit-bevfusion's names first",
    ),
    (
        "encoders.camera.backbone.stages.",
        "this is a checkpoint of another configuration: its camera backbone is a Swin "
        "transformer, this one a ResNet",
    ),
    (
        "encoders.camera.backbone.patch_embed.",
        "this is a checkpoint of another configuration: its camera backbone is a transformer, "
        "this one a ResNet",
    ),
    (
        "encoders.lidar.backbone.pts_voxel_encoder.",
        "this is a checkpoint of another configuration: its LiDAR branch is PointPillars",
    ),
    (
        "heads.object.task_heads.",
        "this is a checkpoint of another configuration: its head is CenterPoint's, this one "
        "TransFusion's",
    ),
)
_ROOTS = ("encoders.", "fuser.", "decoder.", "heads.")


def kind_of(state: Mapping[str, Tensor]) -> str | None:
    """A sentence on what kind of checkpoint this is, if it is not one of this model family."""
    for fragment, sentence in _KINDS:
        if any(fragment in name for name in state):
            return sentence
    if not any(name.startswith(_ROOTS) for name in state):
        example = next(iter(state), "nothing")
        return f"is this a BEVFusion checkpoint? Its entries have other names, such as {example!r}"
    return None


def config_of(state: Mapping[str, Tensor], model: nn.Module) -> str | None:
    """The configuration whose sizes the entries have, if it is not the one `model` was built by.

    Sparse weights, whose layout is open, are not looked at.
    """
    from bevfusion_quant.model._build import build_model
    from bevfusion_quant.model._config import CONFIGS

    given = {name: t.shape for name, t in state.items() if t.ndim != 5}
    own = {name: t.shape for name, t in model.state_dict().items()}
    for name, config in CONFIGS.items():
        wanted = {key: t.shape for key, t in build_model(config).state_dict().items()}
        shared = wanted.keys() & given.keys()
        if len(shared) < 10 or all(wanted[key] == own[key] for key in shared & own.keys()):
            continue
        if all(given[key] == wanted[key] for key in shared):
            return name
    return None
