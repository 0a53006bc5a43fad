"""The one interface of every data set: frames read on demand, with or without pictures."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, get_args, overload

from bev_data._errors import InputError
from bev_data.points import Frame

# Frames with and without their pictures.

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


def one_folder(kind: str, path: object) -> Path:
    """The path of a data set that is one folder.

    Raises:
        InputError: nothing, several paths, or no folder.
    """
    if path is None:
        raise InputError(f"a data set of kind {kind!r} needs a path")
    if not isinstance(path, (str, os.PathLike)):
        raise InputError(f"a data set of kind {kind!r} is one folder, not several paths")
    if not Path(path).is_dir():
        raise InputError(f"{path}: no such folder; give the one that holds the data set")
    return Path(path)


class FrameList(Sequence[Frame]):
    """Frames read one at a time, again at every access.

    Holds only keys (file names, seeds, tokens), so a long list needs no memory. A slice is such a
    list too.

    Args:
        kind: the data set's kind, for messages.
        keys: argument of `read` for each frame.
        read: makes a frame from a key.
    """

    def __init__(self, kind: str, keys: Sequence[Any], read: Callable[[Any], Frame]) -> None:
        self.kind = kind
        self.keys = keys
        self._read = read

    def __len__(self) -> int:
        return len(self.keys)

    @overload
    def __getitem__(self, index: int) -> Frame: ...
    @overload
    def __getitem__(self, index: slice) -> FrameList: ...
    def __getitem__(self, index: int | slice) -> Frame | FrameList:
        if isinstance(index, slice):
            return FrameList(self.kind, self.keys[index], self._read)
        return self._read(self.keys[index])

    def __repr__(self) -> str:
        return f"FrameList({self.kind}, {len(self)} frames)"
