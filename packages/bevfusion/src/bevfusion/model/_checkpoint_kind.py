"""What a state dict that does not fit seems to be, from its names and shapes."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from torch import Tensor, nn

from bevfusion.model._parts import PART_PATHS

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


def kind_of(names: Iterable[str], absent: Sequence[str], state: Iterable[str]) -> str | None:
    """A sentence on what kind of checkpoint this is, if it is not one of such a model.

    Args:
        names: Entries of the parts that the model has, and those of no part.
        absent: Parts of the model of which there is no entry.
        state: All entries.
    """
    names, state = list(names), list(state)
    for fragment, sentence in _KINDS:
        if any(fragment in name for name in names):
            return sentence
    held = [
        part
        for part, path in PART_PATHS.items()
        if any(name.startswith(f"{path}.") for name in state)
    ]
    if not held:
        example = next(iter(state), "nothing")
        return f"is this a BEVFusion checkpoint? Its entries have other names, such as {example!r}"
    if absent:
        return (
            f"the checkpoint holds {', '.join(held)} and nothing of {', '.join(absent)}: give one "
            "that was trained with these parts, or build the model without them"
        )
    return None


def config_of(state: Mapping[str, Tensor], model: nn.Module) -> str | None:
    """The configuration whose sizes the entries have, if it is not the one `model` was built by.

    Sparse weights, whose layout is open, are not looked at.
    """
    from bevfusion.model._build import build_model
    from bevfusion.model._config import CONFIGS

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
