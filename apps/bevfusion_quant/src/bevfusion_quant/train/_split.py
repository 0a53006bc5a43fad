"""Which frames are trained on, and which are kept for judging."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import partial

from bev_data.datasets import FrameList
from bev_data.points import Frame
from bevfusion.training import FrameSource
from bevfusion_quant._errors import InputError
from bevfusion_quant.frames import frames_of
from bevfusion_quant.options import FrameOptions

FIRST_TRAINING_SEED = 1_000_000
HELD_OUT_FRAME = 28  # of a PandaSet sequence


def training_frames(options: FrameOptions, *, size: str, with_cameras: bool) -> FrameSource:
    """The frames to train on.

    Of streets, those of the seeds from 1,000,000 + `first` on, 1,000 of them unless `count` says
    otherwise: `demo`, `ptq` and `evaluate` count from 0. Of a PandaSet sequence, the frames
    numbered below 28. Of other data sets all that the options name.

    Args:
        options: Where the frames are.
        size: Of the street's scan and images.
        with_cameras: Whether images are read.
    """
    if options.dataset == "street":
        count = options.count or 1000
        options = replace(options, first=FIRST_TRAINING_SEED + options.first, count=count)
    reading = {
        name: str(value)
        for name in ("points", "dataset", "data", "first", "count", "split", "data_version")
        if (value := getattr(options, name))
    }
    return FrameSource(
        ", ".join(f"{name} {value}" for name, value in reading.items()),
        partial(_open, options, size, with_cameras, held_out_part=False),
    )


def held_out(
    options: FrameOptions, *, size: str, with_cameras: bool, count: int
) -> FrameSource | None:
    """Frames to judge by that training never sees; None where the data set is not split here.

    Of streets, the seeds 0 to `count` − 1; of a PandaSet sequence, the frames from 28 on.
    """
    if count == 0 or options.dataset not in ("street", "pandaset"):
        return None
    options = replace(options, first=0, count=count if options.dataset == "street" else 0)
    text = f"street, seeds 0 to {count - 1}" if options.dataset == "street" else "frames 28 on"
    return FrameSource(text, partial(_open, options, size, with_cameras, held_out_part=True))


def _open(
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
