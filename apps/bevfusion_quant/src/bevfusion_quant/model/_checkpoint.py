"""Loading an mit-bevfusion state dict into the LiDAR branch, sparse weight layout included."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from bevfusion_quant._errors import InputError
from bevfusion_quant.model._checkpoint_file import read_state_dict
from bevquant_sparse import WeightLayout, is_sparse_conv, layout_of, permute_weight, set_weight

if TYPE_CHECKING:
    from bevfusion_quant.model._branch import BEVFusion

__all__ = ["LAYOUTS", "LoadReport", "load_state_dict", "load_weights"]

LAYOUTS = ("RSCK", "KRSC", "KCRS")
BRANCH = "encoders.lidar."


@dataclass(frozen=True)
class LoadReport:
    """What a checkpoint gave: entries loaded, those of other branches, weight layout."""

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

    Entries under `encoders.lidar.` must match the branch one to one; entries elsewhere (camera,
    fuser, decoder, heads) are reported as not used. `num_batches_tracked`, which no inference
    reads, may be absent. Floating-point weights are converted to float32.

    Args:
        model: From `build_lidar_branch`.
        state: Tensors by name.
        layout: How the file stores sparse weights: "RSCK" ([k1, k2, k3, in, out]: spconv 1,
            mmdet3d, mit-bevfusion), "KRSC" ([out, k1, k2, k3, in]: spconv 2), "KCRS" ([out, in,
            k1, k2, k3]: torch Conv3d), or "auto":
            taken from the shapes if each and every convolution's shape allows one layout only, and
            all the same one.

    Raises:
        InputError: Missing, unexpected, misshapen or non-finite entries, all in one message; or
            shapes that leave the layout open.
    """
    if layout != "auto" and layout not in LAYOUTS:
        raise InputError(
            f"weight layout {layout!r} is unknown: use one of auto, {', '.join(LAYOUTS)}"
        )
    convs = {f"{path}.weight": m for path, m in model.named_modules() if is_sparse_conv(m)}
    wanted = model.state_dict()
    given = {name: t for name, t in state.items() if name.startswith(BRANCH)}
    problems = [f"missing: {name}" for name in _missing(wanted, given)]
    problems += [f"unexpected: {name}" for name in given if name not in wanted]
    present = {name: convs[name] for name in convs if name in given}
    source, misfits = _source_layout(present, given, layout)
    problems += misfits
    for name, tensor in given.items():
        if name in wanted and name not in convs and tensor.shape != wanted[name].shape:
            problems.append(_misshapen(name, list(wanted[name].shape), tensor))
        elif tensor.is_floating_point() and not bool(torch.isfinite(tensor).all()):
            problems.append(f"not finite: {name} holds NaN or Inf")
    if problems:
        hint = (
            "" if given else f" (no entry starts with {BRANCH!r}: is this a BEVFusion checkpoint?)"
        )
        raise InputError(
            f"the state dict does not fit the LiDAR branch{hint}; {len(problems)} entries are "
            "wrong:\n  "
            + "\n  ".join(problems)
            + "\nuse the checkpoint's own --config, or a checkpoint trained with these sizes"
        )
    with torch.no_grad():
        for name, module in convs.items():
            set_weight(module, given[name].float(), source)
        for name, target in wanted.items():
            if name not in convs and name in given:
                target.copy_(given[name])
    not_used = tuple(sorted(name for name in state if not name.startswith(BRANCH)))
    return LoadReport(tuple(sorted(given)), not_used, source.name)


def _missing(wanted: Mapping[str, Tensor], given: Mapping[str, Tensor]) -> list[str]:
    return [n for n in wanted if n not in given and not n.endswith("num_batches_tracked")]


def _misshapen(name: str, expected: object, tensor: Tensor) -> str:
    return f"misshapen: {name} should be {expected}, is {list(tensor.shape)}"


def _source_layout(
    convs: Mapping[str, nn.Module], given: Mapping[str, Tensor], layout: str
) -> tuple[WeightLayout, list[str]]:
    """The layout of the sparse weights, and those whose shape does not fit it."""
    shapes = {name: _shapes(module) for name, module in convs.items()}
    fits = {
        name: {key for key, shape in shapes[name].items() if tuple(given[name].shape) == shape}
        for name in convs
    }
    if layout == "auto":
        votes = [keys for keys in fits.values() if keys]
        common = set.intersection(*votes) if votes else {"RSCK"}
        if not common:
            raise InputError(
                "the sparse weights' shapes do not agree on one layout: say how the file stores "
                "them "
                f"with --weight-layout ({', '.join(LAYOUTS)}; mit-bevfusion's files are RSCK)"
            )
        open_names = [name for name, keys in fits.items() if len(keys) > 1]
        if open_names:
            raise InputError(
                f"the shape of {open_names[0]} ({list(given[open_names[0]].shape)}) fits more "
                "than one "
                f"weight layout ({', '.join(sorted(fits[open_names[0]]))}), so it cannot be told "
                "from "
                f"the file: say it with --weight-layout ({', '.join(LAYOUTS)}; mit-bevfusion's "
                "files "
                "are RSCK)"
            )
        layout = common.pop()
    misfits = []
    for name in convs:
        if layout not in fits[name]:
            expected = f"{list(shapes[name][layout])} ({layout})"
            misfits.append(_misshapen(name, expected, given[name]))
    return WeightLayout[layout], misfits


def _shapes(module: nn.Module) -> dict[str, tuple[int, ...]]:
    """The shape of a convolution's weight in every layout a file may use."""
    weight = module.weight
    assert isinstance(weight, Tensor)
    own = layout_of(module)
    return {
        key: tuple(permute_weight(weight.detach(), own, WeightLayout[key]).shape) for key in LAYOUTS
    }
