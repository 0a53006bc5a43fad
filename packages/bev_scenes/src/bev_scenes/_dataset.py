"""Procedural streets as a data set, one for each seed."""

from __future__ import annotations

import inspect
from typing import Any

from bev_data import InputError
from bev_data.datasets import FrameList
from bev_data.points import Frame
from bev_scenes._frame import street_frame

__all__ = ["open_streets"]


def open_streets(
    path: None = None, *, count: int = 1, first_seed: int = 0, **options: Any
) -> FrameList:
    """Streets of consecutive seeds, rendered when asked for.

    Args:
        path: none; a street needs no file.
        count: how many.
        first_seed: of the first one.
        options: keyword arguments of `street_frame`, such as cameras="nuscenes".

    Raises:
        InputError: a path, no frames, a negative seed, or an option that `street_frame` lacks.
    """
    if path is not None:
        raise InputError(f"{path}: a street is made from a seed; leave the path out")
    if count < 1 or first_seed < 0:
        raise InputError(
            f"count={count}, first_seed={first_seed}: at least one street, and no negative seed"
        )
    known = [name for name in inspect.signature(street_frame).parameters if name != "seed"]
    unknown = [name for name in options if name not in known]
    if unknown:
        raise InputError(
            f"{', '.join(unknown)}: a street has count, first_seed, {', '.join(known)}"
        )

    def read(seed: int) -> Frame:
        try:
            return street_frame(seed, **options)
        except ValueError as error:
            raise InputError(f"street {seed}: {error}") from error

    return FrameList("street", range(first_seed, first_seed + count), read)
