"""The one interface of every data set: a sequence that reads a frame when it is asked for."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, overload

from bev_data._errors import InputError
from bev_data.points import Frame


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
