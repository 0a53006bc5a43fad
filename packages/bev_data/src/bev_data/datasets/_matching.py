"""Frames with and without their pictures."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from typing import Literal, get_args

from bev_data._errors import InputError

_LOG = logging.getLogger(__name__)
WhichCameras = Literal["all", "available", "none"]
"""Every frame must have its pictures; frames without are left out; no pictures are read."""


def check_which(cameras: str) -> None:
    """Refuse another word than the three.

    Raises:
        InputError: another word.
    """
    if cameras not in get_args(WhichCameras):
        raise InputError(
            f"cameras={cameras!r}: expected 'all' (every frame must have its images), 'available' "
            "(frames without are left out) or 'none' (points alone)"
        )


def with_cameras(
    where: object, frames: Sequence[str], lacking: Mapping[str, str], cameras: WhichCameras
) -> list[str]:
    """The frames to read.

    Args:
        where: the data set's folder, for messages.
        frames: names of all frames.
        lacking: what the frames without all their pictures lack.
        cameras: the caller's wish.

    Raises:
        InputError: "all", and a frame lacks something; or none is left.
    """
    kept = [frame for frame in frames if cameras == "none" or frame not in lacking]
    if len(kept) == len(frames):
        return kept
    first = next(frame for frame in frames if frame in lacking)
    found = (
        f"{where}: {len(frames) - len(kept)} of {len(frames)} LiDAR frames have no matching "
        f"images; frame {first} lacks {lacking[first]}"
    )
    if cameras == "all":
        raise InputError(
            f"{found}; add them, or read only frames with images (cameras='available') or points "
            "alone (cameras='none')"
        )
    if not kept:
        raise InputError(f"{found}, and no frame is left; read points alone with cameras='none'")
    _LOG.info("%s; such frames are left out", found)
    return kept
