"""Loading a checkpoint of this or another project into a model.

`_names` translates the names. How a checkpoint stores sparse weights is found from their shapes.
Nothing is unpickled into code.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path

import torch
from torch import Tensor, nn

from bev_data import InputError
from bevfusion.model._misfits import GEOMETRY, kind_of, mismatches, refusal
from bevfusion.model._names import CONVERSIONS, NAMINGS, NORM_BEHIND, Renamed, best_naming, rename
from bevquant_graph import HtmlText
from bevquant_quantizers.documents import Checkpoint, DocumentError, read_checkpoint
from bevquant_sparse import WeightLayout, is_sparse_conv, layout_of, permute_weight, set_weight

LAYOUTS = ("RSCK", "KRSC", "KCRS")


@dataclass(frozen=True)
class LoadReport(HtmlText):
    """Result of loading a checkpoint.

    Attributes:
        loaded: Entries that the model took, by the model's names.
        not_used: Entries of parts that the model does not have, and those of no use in inference,
            by the file's names.
        layout: How the file stores sparse weights; empty without sparse convolutions.
        names: Naming of the file: a key of `NAMINGS`.
        rules: Each rule that translated names, with their number.
        converted: Entries with rearranged values, and the conversion.
        checkpoint: Other content of the file and the entry that was read; None if tensors were
            given.
    """

    loaded: tuple[str, ...]
    not_used: tuple[str, ...]
    layout: str
    names: str = "own"
    rules: Mapping[str, int] = field(default_factory=dict)
    converted: Mapping[str, str] = field(default_factory=dict)
    checkpoint: Checkpoint | None = None

    def __str__(self) -> str:
        lines = [str(self.checkpoint)] if self.checkpoint else []
        layout = f", sparse weights {self.layout}" if self.layout else ""
        names = "the model's own names" if self.names == "own" else f"names of {self.names}"
        lines.append(
            f"{len(self.loaded)} entries loaded, {len(self.not_used)} not used; {names}{layout}"
        )
        lines += [f"{count} names by {rule}" for rule, count in self.rules.items()]
        kinds = Counter(self.converted.values())
        lines += [f"{count} entries converted: {how}" for how, count in kinds.items()]
        return "\n".join(lines)


def load_weights(
    model: nn.Module,
    path: str | Path,
    *,
    layout: str = "auto",
    names: str = "auto",
    key: str | None = None,
    ema: bool | None = None,
) -> LoadReport:
    """Load a checkpoint file into `model`, in place.

    See `read_state_dict` for the files, `key` and `ema`, and `load_state_dict` for the rest.

    Raises:
        InputError: As these two.
    """
    held = _read(path, key, ema)
    old = str(held.facts.get("meta.mmdet3d_version", "")).startswith("0.")
    return replace(_load(model, held.tensors, layout, names, old), checkpoint=held)


def load_state_dict(
    model: nn.Module, state: Mapping[str, Tensor], *, layout: str = "auto", names: str = "auto"
) -> LoadReport:
    """Load a state dict of this or another project into `model`, in place.

    On an error the model is unchanged.

    Entries of the parts that `model` has must match it one to one; entries of other parts are
    reported as not used. `num_batches_tracked`, which inference does not read, may be absent.
    Floating-point weights are converted to the model's type. The view transform's geometry (`dx`,
    `bx`, `nx`, `frustum`) and the windows' `relative_position_index`, which may be absent, must
    agree with the configuration. Where a convolution of the file has a bias, the model's has none
    and a batch norm follows, the bias is subtracted from the norm's running mean: (x + b − m) / σ =
    (x − (m − b)) / σ.

    Args:
        model: From `build_model` or `build_centerpoint`, or another model under the same names.
        state: Tensors by name.
        layout: How the file stores sparse weights: "RSCK" ([k1, k2, k3, in, out]: spconv 1,
            mmdet3d, mit-bevfusion), "KRSC" ([out, k1, k2, k3, in]: spconv 2), "KCRS" ([out, in,
            k1, k2, k3]: torch Conv3d), or "auto":
            taken from the shapes, if every convolution's shape allows one and the same layout only.
        names: Naming of the state dict: a key of `NAMINGS`; or "auto": the one that finds most
            entries of the model.

    Raises:
        InputError: Missing, unexpected, misshapen, non-finite or contradicting entries, all in one
            message, with the nearest names and the probable kind of the file; or shapes that allow
            several layouts.
    """
    return _load(model, state, layout, names, False)


def _load(
    model: nn.Module, state: Mapping[str, Tensor], layout: str, names: str, old: bool
) -> LoadReport:
    for what, value, known in (("weight layout", layout, LAYOUTS), ("names", names, NAMINGS)):
        if value != "auto" and value not in known:
            raise InputError(f"{what} {value!r} is unknown: use one of auto, {', '.join(known)}")
    wanted = model.state_dict()
    renamed = best_naming(state, wanted, old=old) if names == "auto" else rename(state, names)
    _check_height(model, renamed)
    converted = _convert(model, renamed, wanted)
    fit = _fit(model, renamed, layout, state)
    with torch.no_grad():
        for name, module in fit.convs.items():
            set_weight(module, fit.given[name].to(wanted[name].dtype), fit.layout)
        for name, target in wanted.items():
            if name in fit.given and name not in fit.convs and not GEOMETRY.search(name):
                target.copy_(fit.given[name])
    unused = [renamed.source[n] for n in renamed.tensors if n not in fit.given]
    used = sorted(fit.given)
    return LoadReport(
        tuple(used),
        tuple(sorted([*unused, *renamed.dropped])),
        fit.layout.name if fit.convs else "",
        renamed.names,
        dict(renamed.rules),
        {name: how for name, how in converted.items() if name in fit.given},
    )


def _check_height(model: nn.Module, renamed: Renamed) -> None:
    """mit-bevfusion's head predicts the top of a box, mmdetection3d's its centre."""
    wanted = "centre" if renamed.names.endswith("-bevfusion") else "top"
    name = "heads.object.prediction_heads.0.height.1.weight"
    config = getattr(dict(model.named_modules()).get("heads.object"), "config", None)
    height = getattr(config, "height", wanted)
    if name in renamed.tensors and height != wanted:
        swin = any(".w_msa." in entry for entry in renamed.tensors)
        sizes = {"nuscenes": True, "swint": swin, "mmdet3d": wanted == "centre"}
        raise InputError(
            f"the checkpoint's head ({renamed.names}) predicts the {wanted} of boxes, the model's "
            f"HeadConfig.height is {height!r}: build the model with --config "
            f"{'-'.join(name for name, used in sizes.items() if used)}, or with height={wanted!r}"
        )


def _convert(model: nn.Module, renamed: Renamed, wanted: Mapping[str, Tensor]) -> dict[str, str]:
    modules = dict(model.named_modules())
    tensors, done = renamed.tensors, {}
    for name, how in renamed.conversions.items():
        if name in wanted:
            before = tensors[name]
            tensors[name] = CONVERSIONS[how](before, modules[name.rpartition(".")[0]])
            if tensors[name] is not before:
                done[name] = how
    # A convolution's bias in front of a batch norm does the same, taken off the mean.
    for name in [n for n in tensors if n not in wanted and re.search(NORM_BEHIND[0], n)]:
        mean = re.sub(*NORM_BEHIND, name)
        if mean in wanted and mean in tensors and tensors[mean].shape == tensors[name].shape:
            bias = tensors.pop(name)
            tensors[mean] = (tensors[mean].double() - bias.double()).to(tensors[mean].dtype)
            done[mean] = "bias of the convolution subtracted"
    return done


def _paths(model: nn.Module) -> dict[str, tuple[str, ...]]:
    """Begins of the names of each part's entries, of parts that are not built too."""
    paths = getattr(model, "part_paths", None)
    if paths is None:
        return {"model": ("",)}
    return {part: tuple(f"{path}." for path in begins) for part, begins in paths.items()}


@dataclass(frozen=True)
class _Fit:
    given: Mapping[str, Tensor]
    convs: Mapping[str, nn.Module]
    layout: WeightLayout


def _fit(model: nn.Module, renamed: Renamed, layout: str, state: Mapping[str, Tensor]) -> _Fit:
    """The entries that the model takes."""
    paths = _paths(model)
    parts = tuple(getattr(model, "parts", paths))
    tensors, wanted = renamed.tensors, model.state_dict()
    prefixes = tuple(begin for part in parts for begin in paths[part])
    given = {name: t for name, t in tensors.items() if name.startswith(prefixes)}
    convs = {f"{path}.weight": m for path, m in model.named_modules() if is_sparse_conv(m)}
    own = {p: {n for n in wanted if n.startswith(paths[p])} for p in parts}
    absent = [p for p in parts if own[p] and not any(n.startswith(paths[p]) for n in given)]
    problems = [f"missing: every entry of {paths[part][0].rstrip('.')}" for part in absent]
    expected = {n: t for n, t in wanted.items() if not any(n in own[p] for p in absent)}
    problems += mismatches(expected, given, convs, renamed)
    others = tuple(begin for begins in paths.values() for begin in begins)
    relevant = [n for n in tensors if n.startswith(prefixes) or not n.startswith(others)]
    if problems and (kind := kind_of(relevant, absent, tensors, paths, wanted)):
        # Before the layout, which cannot be told from another model's weights.
        raise refusal(model, tensors, problems, kind)
    present = {name: convs[name] for name in convs if name in given}
    source, misfits = _source_layout(present, given, layout)
    problems += misfits
    if problems:
        raise refusal(model, tensors, problems, None)
    return _Fit(given, present, source)


def read_state_dict(
    path: str | Path, *, key: str | None = None, ema: bool | None = None
) -> dict[str, Tensor]:
    """The tensors of a checkpoint by name, on the CPU.

    Nothing in the file is executed. `bevquant_quantizers.documents.read_checkpoint` reads the file
    and lists its other content.

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
        return read_checkpoint(
            path, "state dict", key=key, ema=ema, option="`key` (--weight-entry)"
        )
    except DocumentError as error:
        raise InputError(str(error)) from error


def _source_layout(
    convs: Mapping[str, nn.Module], given: Mapping[str, Tensor], layout: str
) -> tuple[WeightLayout, list[str]]:
    """The layout of the sparse weights, and a line for each one whose shape does not fit it."""
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
                f"than one weight layout ({', '.join(sorted(fits[open_names[0]]))}), so the "
                f"file is ambiguous: give the layout {hint}"
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
