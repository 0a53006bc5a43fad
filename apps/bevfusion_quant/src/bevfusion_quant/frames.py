"""Frames named by the options, for running and training, and checks of their content."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from inspect import Parameter, signature
from types import MappingProxyType
from typing import TypeVar

from bev_data.cameras import CAMERA_NAMES
from bev_data.datasets import FrameList, dataset_cameras, find_dataset, open_dataset
from bev_data.points import Frame
from bevfusion import evaluation
from bevfusion.evaluation import PoorData
from bevfusion.training import FrameSource
from bevfusion_quant._errors import InputError, VerificationError
from bevfusion_quant.options import FrameOptions

Found = TypeVar("Found")
_LISTED = 8


class FrameBatches(evaluation.FrameBatches):
    """`bevfusion.evaluation.FrameBatches`, with the commands' option names in its errors."""

    advice = MappingProxyType(
        {
            "no cameras": "this branch reads images: give frames with cameras (--dataset street, "
            "pandaset, kitti, files or nuscenes), or quantize --branch lidar",
            "other cameras": "--cameras names the ones to use where a frame has fewer",
            "voxels alone": "give points, or quantize --branch lidar",
            "other grid": "choose the --config they were made for, or give points",
        }
    )


OF_POINTS = ("columns", "axes", "dtype", "intensity_scale", "key", "nonfinite")
"""Options of files of points: keywords of `bev_data.points.read_points`, which bear their names."""


_KEYWORDS = "classes conditions box_origin cameras metric output precisions budget".split()
_OTHERWISE = {"--cameras available": "--incomplete skip", "--cameras none": "--branch lidar"}


def as_options(message: str) -> str:
    """A message with the command's options in place of the keywords of Python's functions.

    Example:
        >>> as_options("a.bin: say columns=4 and dtype='float32', or set intensity_scale=")
        'a.bin: say --columns 4 and --dtype float32, or set --intensity-scale'
        >>> as_options("a.pcd: say columns='x,y,z,intensity:refl', or leave axes= out")
        'a.pcd: say --columns x,y,z,intensity:refl, or leave --axes out'
    """
    names = "|".join((*OF_POINTS, *_KEYWORDS))
    keyword = rf"(?<![\w/.=-])({names})=('?)((?:[\w.,:-]*[\w-])?)\2"

    def option(found: re.Match[str]) -> str:
        renamed = f"--{found[1].replace('_', '-')} {found[3]}".rstrip()
        return _OTHERWISE.get(renamed, renamed)

    return re.sub(keyword, option, message)


def street_size(config: str) -> str:
    """Size of the street's scans and images for a model: small for a small model."""
    return "tiny" if config == "tiny" else "nuscenes"


def frames_of(options: FrameOptions, *, with_cameras: bool, size: str) -> Sequence[Frame]:
    """Open the frames of `--points` or `--dataset`; `size` sets the street's scans and images."""
    if bool(options.points) == (options.dataset is not None):
        given = "frames given twice" if options.points else "no frames given"
        raise InputError(
            f"{given}: name LiDAR files with --points, or a data set with --dataset (street needs "
            "no files)"
        )
    if options.cameras and not with_cameras:
        raise InputError(
            f"--cameras {' '.join(options.cameras)}: the model reads no images; leave the option "
            "out, or choose a --branch with cameras"
        )
    reads = {} if options.dataset is None else _of_kind(options.dataset, _parameters)
    _refuse_options_of_others(options, reads)
    chosen = {name: getattr(options, name) for name in OF_POINTS}
    reading = {name: value for name, value in chosen.items() if value is not None}
    if options.dataset is None:
        from bev_data.points import read_frames

        return _part(read_frames(options.points, **reading), options)
    if options.dataset == "street":
        size = street_size(size)
        if options.cameras:
            _refuse_unmounted(options.cameras, size)
        return open_dataset(
            "street",
            count=options.count or 1,
            first_seed=options.first,
            size=size,
            cameras=size if with_cameras else None,
            conditions=options.conditions or "clear",
        )
    if not options.data and reads["path"].default is Parameter.empty:
        raise InputError(f"--dataset {options.dataset} needs --data, the folder that holds it")
    if options.dataset == "files":
        return _part(open_dataset("files", options.data, **reading), options)
    if len(options.data) > 1:
        raise InputError(f"--dataset {options.dataset} is one path, not {len(options.data)}")
    cameras = "available" if options.incomplete == "skip" else "all"
    stated = {
        "cameras": cameras if with_cameras else "none",
        "split": options.split,
        "version": options.data_version,
        "classes": _renamed(options.classes),
        "box_origin": options.box_origin,
    }
    settings = {name: value for name, value in stated.items() if value and name in reads}
    if "reading" in reads:
        settings |= {n: value for n, value in reading.items() if value != _default(n)}
    frames = open_dataset(options.dataset, next(iter(options.data), None), **settings)
    return _part(frames, options)


def _default(name: str) -> object:
    return FrameOptions.__dataclass_fields__[name].default


def _renamed(classes: Sequence[str]) -> dict[str, str]:
    """Mapping of names from texts such as "bus=truck"."""
    pairs = [text.partition("=") for text in classes]
    wrong = [f"{own}{sign}{name}" for own, sign, name in pairs if not own or not name]
    if wrong:
        raise InputError(f"--classes {wrong[0]}: expected NAME=NEW_NAME, such as bus=truck")
    return {own: name for own, _, name in pairs}


def _parameters(kind: str) -> Mapping[str, Parameter]:
    return signature(find_dataset(kind)).parameters


def _of_kind(kind: str, ask: Callable[[str], Found]) -> Found:
    """The registered kind of data set; its error names the option."""
    try:
        return ask(kind)
    except InputError as error:
        raise InputError(f"--dataset {kind}: {error}") from error


def camera_names(options: FrameOptions) -> tuple[str, ...]:
    """The cameras to use: the named ones, or all of the data set."""
    if options.cameras:
        return options.cameras
    return CAMERA_NAMES if options.dataset is None else _of_kind(options.dataset, dataset_cameras)


def _part(frames: Sequence[Frame], options: FrameOptions) -> Sequence[Frame]:
    if options.first < 0 or options.count < 0:
        raise InputError(
            f"--first {options.first} --count {options.count}: neither may be negative"
        )
    if options.first >= len(frames):
        raise InputError(
            f"--first {options.first} of {len(frames)} frames: it must be from 0 to "
            f"{len(frames) - 1}"
        )
    if not options.first and not options.count:
        return frames
    return frames[options.first : options.first + options.count if options.count else None]


def _refuse_unmounted(names: Sequence[str], size: str) -> None:
    """Refuse cameras that the street's car lacks, before the slow rendering starts."""
    from bev_scenes import RIGS

    mounted = [mount.name for mount in RIGS[size].cameras]
    missing = [name for name in names if name not in mounted]
    if missing:
        raise InputError(
            f"--cameras {' '.join(missing)}: the street's car has {', '.join(mounted)}; name some "
            "of these, or leave it out for all"
        )


def _refuse_options_of_others(options: FrameOptions, reads: Mapping[str, Parameter]) -> None:
    source = f"--dataset {options.dataset}" if options.dataset else "--points"
    reads_files = options.dataset is None or "reading" in reads  # of `read_points`
    reads_cameras = "cameras" in reads and options.dataset != "nuscenes"  # which has all or none
    misplaced = {
        "--data": bool(options.data) and options.dataset in (None, "street"),
        "--conditions": options.conditions is not None and options.dataset != "street",
        "--split": options.split is not None and "split" not in reads,
        "--data-version": options.data_version is not None and "version" not in reads,
        "--classes": bool(options.classes) and "classes" not in reads,
        "--box-origin": options.box_origin is not None and "box_origin" not in reads,
        "--incomplete": options.incomplete != "refuse" and not reads_cameras,
    }
    for name in OF_POINTS:
        if getattr(options, name) != _default(name):
            misplaced[f"--{name.replace('_', '-')}"] = not reads_files
    wrong = [name for name, is_wrong in misplaced.items() if is_wrong]
    if wrong:
        raise InputError(f"{', '.join(wrong)}: {source} does not read it; leave it out")


FIRST_TRAINING_SEED = 1_000_000
HELD_OUT_FRAME = 28  # of a PandaSet sequence


def training_frames(options: FrameOptions, *, size: str, with_cameras: bool) -> FrameSource:
    """The frames to train on.

    | source | training frames |
    |---|---|
    | streets | seeds from 1,000,000 + `first`, 1,000 of them by default (elsewhere from 0) |
    | a PandaSet sequence | frames 0 to 27 |
    | other data sets | all that the options name |
    """
    if options.dataset == "street":
        count = options.count or 1000
        options = replace(options, first=FIRST_TRAINING_SEED + options.first, count=count)
    reading = {
        name: str(value)
        for name in "points dataset data first count conditions split data_version".split()
        if (value := getattr(options, name))
    }
    return FrameSource(
        ", ".join(f"{name} {value}" for name, value in reading.items()),
        partial(_half, options, size, with_cameras, held_out_part=False),
    )


def held_out(
    options: FrameOptions, *, size: str, with_cameras: bool, count: int
) -> FrameSource | None:
    """Frames for scores that training never sees; None where the data set has no split here.

    Streets: seeds 0 to `count` − 1. A PandaSet sequence: frames from 28.
    """
    if count == 0 or options.dataset not in ("street", "pandaset"):
        return None
    options = replace(options, first=0, count=count if options.dataset == "street" else 0)
    text = f"street, seeds 0 to {count - 1}" if options.dataset == "street" else "frames 28 on"
    return FrameSource(text, partial(_half, options, size, with_cameras, held_out_part=True))


def _half(
    options: FrameOptions, size: str, with_cameras: bool, held_out_part: bool
) -> Sequence[Frame]:
    frames = frames_of(options, with_cameras=with_cameras, size=size)
    if options.dataset != "pandaset":
        return frames
    assert isinstance(frames, FrameList)
    rows = [i for i, k in enumerate(frames.keys) if (int(k) >= HELD_OUT_FRAME) == held_out_part]
    if not rows:
        raise InputError(
            f"PandaSet frames {', '.join(frames.keys)}: none of them is "
            + (f"from {HELD_OUT_FRAME} on" if held_out_part else f"below {HELD_OUT_FRAME}")
        )
    return frames[rows[0] : rows[-1] + 1]


def finding_lines(findings: Sequence[PoorData]) -> tuple[str, ...]:
    """The first findings, one per line."""
    # Ranges by channel that are as they should be are on the page alone.
    shown = [finding for finding in findings if finding.poor or finding.kind != "channels"]
    listed = tuple(map(str, shown[:_LISTED]))
    more = len(shown) - _LISTED
    return (*listed, f"{more} more tensors: the page names them") if more > 0 else listed


def refuse_poor(findings: Sequence[PoorData], output: str) -> None:
    """End the command if the calibration cannot be right."""
    poor = [finding for finding in findings if finding.poor]
    if poor:
        more = f" (and {len(poor) - 1} more)" if len(poor) > 1 else ""
        raise VerificationError(
            f"the calibration cannot be right: {poor[0]}{more}: do not deploy this model, or say "
            "--allow-poor-calibration",
            output,
        )
