"""Why a checkpoint does not fit a model: each entry, the checkpoint's kind, and the remedy."""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterable, Mapping, Sequence

import torch
from torch import Tensor, nn

from bev_data import InputError
from bevfusion.model._names import NAMINGS, Renamed

# What only the names of one kind of checkpoint have in them, and what that kind is.
_KINDS = (
    ("_amax", "this is a checkpoint with quantizers: give the float one it was made from"),
    (
        r"encoders\.camera\.backbone\.stages\..*\.w_msa\.",
        "this is a checkpoint of another configuration: its camera backbone is a Swin "
        "transformer; use --model bevfusion --config nuscenes-swint, for mmdetection3d's and "
        "OpenPCDet's files nuscenes-swint-mmdet3d",
    ),
    (
        r"encoders\.camera\.backbone\.(stages|patch_embed)\.",
        "this is a checkpoint of another configuration: its camera backbone is neither a ResNet "
        "nor a Swin transformer; its LiDAR parts fit a model without cameras (--branch "
        "lidar-detector)",
    ),
    (
        r"encoders\.camera\.backbone\.layer\d\.",
        "this is a checkpoint of another configuration: its camera backbone is a ResNet; use "
        "--model bevfusion --config nuscenes, for mmdetection3d's and OpenPCDet's files "
        "nuscenes-mmdet3d",
    ),
    (
        r"encoders\.lidar\.backbone\.pts_voxel_encoder\.",
        "this is a checkpoint of another configuration: its LiDAR branch is PointPillars",
    ),
    (
        r"heads\.object\.task_heads\.",
        "this is mit-bevfusion's CenterPoint, whose axes are x, y, z: no model here has its head "
        "with these",
    ),
    (
        r"^vtransform\.dtransform\.",
        "this is OpenPCDet's BEVFusion: build BEVFusion with the sizes nuscenes-mmdet3d, or of "
        "CenterPoint the LiDAR part alone",
    ),
    (
        r"^pts_middle_encoder\.shared_conv\.",
        "this is OpenPCDet's VoxelNeXt: no model here has its sparse head; conv_input and conv1 to "
        "conv6 alone fit an encoder of six stages",
    ),
    (
        r"\.conv_cls\.",
        "this checkpoint has an anchor head, as SECOND and PointPillars: no model here has one; "
        "build the model without its head, or quantize it in its own code (--model "
        "mmdet3d:CONFIG.py or openpcdet:CONFIG.yaml)",
    ),
    (
        r"\.feature_adapt_(cls|reg)\.",
        "this is CenterPoint with deformable heads (DCNSeparateHead): no model here has them; "
        "quantize it in its own code (--model mmdet3d:CONFIG.py)",
    ),
)

# Derived from the configuration: a file's values must be the model's own.
GEOMETRY = re.compile(
    r"^encoders\.camera\.vtransform\.(dx|bx|nx|frustum)$|\.w_msa\.relative_position_index$"
)
# Entries that a file may lack: no inference reads them, or every model has the same.
_OPTIONAL = ("num_batches_tracked", "relative_position_index")


def mismatches(
    wanted: Mapping[str, Tensor],
    given: Mapping[str, Tensor],
    convs: Mapping[str, object],
    renamed: Renamed,
) -> list[str]:
    """Mismatches other than the sparse weights' shapes, one line for each entry."""
    missing = [n for n in wanted if n not in given and not n.endswith(_OPTIONAL)]
    unexpected = [n for n in given if n not in wanted]
    near = _nearest(missing, unexpected)
    problems = [
        f"missing: {name}"
        + (
            f" {list(wanted[name].shape)}; the file's nearest: {_shown(near[name], renamed)}"
            if name in near
            else ""
        )
        for name in missing
    ]
    problems += [f"unexpected: {_shown(name, renamed)}" for name in unexpected]
    for name, tensor in given.items():
        if name in wanted and name not in convs and tensor.shape != wanted[name].shape:
            problems.append(
                f"misshapen: {name} should be {list(wanted[name].shape)}, is {list(tensor.shape)}"
            )
        elif (
            name in wanted
            and wanted[name].is_floating_point()
            and tensor.numel() == wanted[name].numel()
            and (fault := _fault_of(tensor, wanted[name].dtype))
        ):
            problems.append(fault.format(renamed.source[name]))
        elif (
            name in wanted
            and GEOMETRY.search(name)
            and not torch.allclose(tensor.double(), wanted[name].double(), rtol=1e-4, atol=1e-4)
        ):
            small = tensor.numel() <= 3
            values = f" is {tensor.tolist()}, here {wanted[name].tolist()}" if small else ""
            problems.append(f"another geometry: {name}{values}")
    return problems


def _fault_of(tensor: Tensor, dtype: torch.dtype) -> str:
    """Numbers of an entry that a weight of that type does not hold; ``{}`` is its name."""
    if not tensor.is_floating_point():
        return f"no floats: {{}} holds {str(tensor.dtype).removeprefix('torch.')}"
    if bool(torch.isfinite(tensor.to(dtype)).all()):
        return ""
    return "not finite: {} holds NaN, Inf or numbers too large"


def _shown(name: str, renamed: Renamed) -> str:
    source, shape = renamed.source[name], list(renamed.tensors[name].shape)
    return f"{source} {shape}" + ("" if source == name else f" (here {name})")


def _nearest(missing: Sequence[str], unexpected: Sequence[str]) -> dict[str, str]:
    """The most alike of the unexpected names for each of the first missing ones."""
    found = {n: difflib.get_close_matches(n, unexpected, 1) for n in missing[:_COMPARED]}
    return {name: near[0] for name, near in found.items() if near}


_SHOWN = 10  # entries that do not fit, of a checkpoint that is recognised as another model's
_COMPARED = 20  # each costs a comparison with every unexpected name


def refusal(
    model: nn.Module, state: Mapping[str, Tensor], problems: list[str], kind: str | None
) -> InputError:
    """The error with every entry that does not fit, or the first ones of a recognised kind."""
    parts = ", ".join(getattr(model, "parts", [type(model).__name__]))
    advice = kind
    if advice is None and (config := config_of(state, model)) is not None:
        advice = f"this is a checkpoint of the sizes of config {config!r}: use that"
    shown = problems[:_SHOWN] if advice else problems
    more = [f"and {len(problems) - len(shown)} more"] if len(shown) < len(problems) else []
    return InputError(
        f"the state dict does not fit the model ({parts}); "
        + (f"{advice}; " if advice else "")
        + f"{len(problems)} problem{'s' * (len(problems) > 1)}:\n  "
        + "\n  ".join(shown + more)
        + (
            ""
            if advice
            else "\ngive a float checkpoint that trained without them"
            if all(problem.startswith(("not finite", "no floats")) for problem in problems)
            else "\nuse the checkpoint's own --config, or a checkpoint trained with these sizes"
        )
    )


def kind_of(
    names: Iterable[str],
    absent: Sequence[str],
    state: Iterable[str],
    paths: Mapping[str, tuple[str, ...]],
    own: Iterable[str],
) -> str | None:
    """A sentence on the kind of checkpoint, if it belongs to another kind of model."""
    names, state = list(names), list(state)
    # A kind whose names the model has too is the model's own.
    for pattern, sentence in _KINDS:
        if any(re.search(pattern, name) for name in names) and not any(
            re.search(pattern, name) for name in own
        ):
            return sentence
    held = [part for part, begins in paths.items() if any(n.startswith(begins) for n in state)]
    if not held:
        example = next(iter(state), "nothing")
        rests: dict[str, set[str]] = {}
        for name in state:
            first, _, rest = name.partition(".")
            rests.setdefault(first, set()).add(rest)
        if len(rests) > 1 and len(set(map(frozenset, rests.values()))) == 1:
            return (
                f"it holds one model's entries under {' and '.join(rests)}: save those of one of "
                "them, their names without this prefix"
            )
        return (
            "it is probably no checkpoint of such a model: none of its entries has a name of "
            f"{', '.join(NAMINGS)}; the first is {example!r}"
        )
    if absent:
        return (
            f"the checkpoint holds {', '.join(held)} and nothing of {', '.join(absent)}: give one "
            "that was trained with these parts, or build the model without them"
        )
    return None


def config_of(state: Mapping[str, Tensor], model: nn.Module) -> str | None:
    """The configuration whose sizes the entries have, if it is not the one `model` was built by."""
    from bevfusion.model._build import build_model
    from bevfusion.model._config import CONFIGS

    # Sparse weights are not looked at: their layout is open.
    given = {name: t.shape for name, t in state.items() if t.ndim != 5}
    own = {name: t.shape for name, t in model.state_dict().items()}
    if not any(name.startswith(("encoders.", "decoder.")) for name in own):
        return None
    for name, config in CONFIGS.items():
        wanted = {key: t.shape for key, t in build_model(config).state_dict().items()}
        shared = wanted.keys() & given.keys()
        if len(shared) < 10 or all(wanted[key] == own[key] for key in shared & own.keys()):
            continue
        if all(given[key] == wanted[key] for key in shared):
            return name
    return None
