"""Reading an mit-bevfusion state dict, `.pth` or safetensors, and loading it into the model.

How a checkpoint stores sparse weights is told from their shapes. Nothing is unpickled into code.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from bev_data import InputError
from bevfusion.model._parts import PART_PATHS
from bevquant_quantizers.documents import Checkpoint, DocumentError, read_checkpoint
from bevquant_sparse import WeightLayout, is_sparse_conv, layout_of, permute_weight, set_weight

if TYPE_CHECKING:
    from bevfusion.model._model import BEVFusion

LAYOUTS = ("RSCK", "KRSC", "KCRS")


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

# What the view transform derives from its configuration: a file's values must be the model's own.
_GEOMETRY = tuple(f"encoders.camera.vtransform.{name}" for name in ("dx", "bx", "nx", "frustum"))


@dataclass(frozen=True)
class LoadReport:
    """What a checkpoint gave.

    Attributes:
        loaded: Entries that the model took.
        not_used: Entries of parts that the model does not have.
        layout: How the file stores sparse weights; empty without a LiDAR branch.
    """

    loaded: tuple[str, ...]
    not_used: tuple[str, ...]
    layout: str


def load_weights(model: BEVFusion, path: str | Path, *, layout: str = "auto") -> LoadReport:
    """Load a `.pth` or `.safetensors` checkpoint into `model`, in place.

    See `load_state_dict` for the rules.
    """
    return load_state_dict(model, read_state_dict(path), layout=layout)


def load_state_dict(
    model: BEVFusion, state: Mapping[str, Tensor], *, layout: str = "auto"
) -> LoadReport:
    """Load an mit-bevfusion state dict into `model`, in place, or leave `model` as it was.

    Entries of the parts that `model` has must match it one to one; entries of other parts are
    reported as not used. `num_batches_tracked`, which no inference reads, may be absent.
    Floating-point weights are converted to the model's type. The view transform's geometry (`dx`,
    `bx`, `nx`, `frustum`) must be the one that the configuration gives.

    Args:
        model: From `build_model`.
        state: Tensors by name.
        layout: How the file stores sparse weights: "RSCK" ([k1, k2, k3, in, out]: spconv 1,
            mmdet3d, mit-bevfusion), "KRSC" ([out, k1, k2, k3, in]: spconv 2), "KCRS" ([out, in,
            k1, k2, k3]: torch Conv3d), or "auto":
            taken from the shapes if each and every convolution's shape allows one layout only, and
            all the same one.

    Raises:
        InputError: Missing, unexpected, misshapen, non-finite or contradicting entries, all in one
            message, with what the file seems to be instead; or shapes that leave the layout open.
    """
    if layout != "auto" and layout not in LAYOUTS:
        raise InputError(
            f"weight layout {layout!r} is unknown: use one of auto, {', '.join(LAYOUTS)}"
        )
    prefixes = tuple(f"{PART_PATHS[part]}." for part in model.parts)
    given = {name: t for name, t in state.items() if name.startswith(prefixes)}
    convs = {f"{path}.weight": m for path, m in model.named_modules() if is_sparse_conv(m)}
    wanted = model.state_dict()
    absent = [p for p in model.parts if not any(n.startswith(f"{PART_PATHS[p]}.") for n in given)]
    problems = [f"missing: every entry of {PART_PATHS[part]}" for part in absent]
    skipped = tuple(f"{PART_PATHS[part]}." for part in absent)
    expected = {name: t for name, t in wanted.items() if not name.startswith(skipped)}
    problems += _mismatches(expected, given, convs)
    others = tuple(f"{path}." for path in PART_PATHS.values())
    relevant = [n for n in state if n.startswith(prefixes) or not n.startswith(others)]
    if problems and (kind := kind_of(relevant, absent, state)):
        # Before the layout, which cannot be told from another model's weights.
        raise _refusal(model, state, problems, kind)
    present = {name: convs[name] for name in convs if name in given}
    source, misfits = _source_layout(present, given, layout)
    problems += misfits
    if problems:
        raise _refusal(model, state, problems, None)
    with torch.no_grad():
        for name, module in convs.items():
            set_weight(module, given[name].to(wanted[name].dtype), source)
        for name, target in wanted.items():
            if name in given and name not in convs and name not in _GEOMETRY:
                target.copy_(given[name])
    not_used = tuple(sorted(name for name in state if name not in given))
    return LoadReport(tuple(sorted(given)), not_used, source.name if convs else "")


def _mismatches(
    wanted: Mapping[str, Tensor], given: Mapping[str, Tensor], convs: Mapping[str, object]
) -> list[str]:
    """What is wrong apart from the sparse weights' shapes, one line for each entry."""
    problems = [
        f"missing: {name}"
        for name in wanted
        if name not in given and not name.endswith("num_batches_tracked")
    ]
    problems += [f"unexpected: {name}" for name in given if name not in wanted]
    for name, tensor in given.items():
        if name in wanted and name not in convs and tensor.shape != wanted[name].shape:
            problems.append(
                f"misshapen: {name} should be {list(wanted[name].shape)}, is {list(tensor.shape)}"
            )
        elif tensor.is_floating_point() and not bool(torch.isfinite(tensor).all()):
            problems.append(f"not finite: {name} holds NaN or Inf")
        elif name in _GEOMETRY and not torch.allclose(
            tensor.double(), wanted[name].double(), rtol=1e-4, atol=1e-4
        ):
            small = tensor.numel() <= 3
            values = f" is {tensor.tolist()}, here {wanted[name].tolist()}" if small else ""
            problems.append(f"another geometry: {name}{values}")
    return problems


def _refusal(
    model: BEVFusion, state: Mapping[str, Tensor], problems: list[str], kind: str | None
) -> InputError:
    parts = ", ".join(model.parts)
    advice = kind
    if advice is None and (config := config_of(state, model)) is not None:
        advice = f"this is a checkpoint of the sizes of config {config!r}: use that"
    return InputError(
        f"the state dict does not fit the model ({parts}); "
        + (f"{advice}; " if advice else "")
        + f"{len(problems)} problems:\n  "
        + "\n  ".join(problems)
        + (
            ""
            if advice
            else "\nuse the checkpoint's own --config, or a checkpoint trained with these sizes"
        )
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


def read_state_dict(
    path: str | Path, *, key: str | None = None, ema: bool | None = None
) -> dict[str, Tensor]:
    """The tensors of a checkpoint by name, on the CPU.

    Nothing in the file is executed. `bevquant_quantizers.documents.read_checkpoint` reads the file
    and says what else it holds.

    Args:
        path: Of mmengine, OpenPCDet, det3d, Lightning, torch or safetensors.
        key: Path of the entry to read, such as "state_dict"; by default the usual one.
        ema: True for averaged weights, False for the others; by default the usual ones.

    Raises:
        InputError: The file is missing, damaged, or holds something other than tensors by name.
    """
    return _read(path, key, ema).tensors


def _read(path: str | Path, key: str | None, ema: bool | None) -> Checkpoint:
    path = Path(path)
    if not path.is_file():
        raise InputError(f"no weights file at {path}: check the path given to --weights")
    try:
        return read_checkpoint(path, "state dict", key=key, ema=ema)
    except DocumentError as error:
        raise InputError(str(error)) from error


def _source_layout(
    convs: Mapping[str, nn.Module], given: Mapping[str, Tensor], layout: str
) -> tuple[WeightLayout, list[str]]:
    """The layout of the sparse weights, and a line for each one whose shape does not fit it.

    Args:
        convs: Sparse convolutions by the name of their weight.
        given: The file's tensors; every name of `convs` is in it.
        layout: One of `LAYOUTS`, or "auto".

    Raises:
        InputError: The shapes leave the layout open, or do not agree on one.
    """
    shapes = {name: _shapes(module) for name, module in convs.items()}
    fits = {
        name: {key for key, shape in shapes[name].items() if tuple(given[name].shape) == shape}
        for name in convs
    }
    hint = f"with --weight-layout ({', '.join(LAYOUTS)}; mit-bevfusion's files are RSCK)"
    if layout == "auto":
        votes = [keys for keys in fits.values() if keys]
        common = set.intersection(*votes) if votes else {"RSCK"}
        if not common:
            raise InputError(
                f"the sparse weights' shapes do not agree on one layout: say how the file stores "
                f"them {hint}"
            )
        open_names = [name for name, keys in fits.items() if len(keys) > 1]
        if open_names:
            raise InputError(
                f"the shape of {open_names[0]} ({list(given[open_names[0]].shape)}) fits more "
                f"than one weight layout ({', '.join(sorted(fits[open_names[0]]))}), so it cannot "
                f"be told from the file: say it {hint}"
            )
        layout = common.pop()
    misfits = [
        f"misshapen: {name} should be {list(shapes[name][layout])} ({layout}), "
        f"is {list(given[name].shape)}"
        for name in convs
        if layout not in fits[name]
    ]
    return WeightLayout[layout], misfits


def _shapes(module: nn.Module) -> dict[str, tuple[int, ...]]:
    """The shape of a convolution's weight in every layout a file may use."""
    weight = module.weight
    assert isinstance(weight, Tensor)
    own = layout_of(module)
    return {
        key: tuple(permute_weight(weight.detach(), own, WeightLayout[key]).shape) for key in LAYOUTS
    }
