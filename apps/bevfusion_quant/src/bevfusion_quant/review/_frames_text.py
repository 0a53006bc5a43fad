"""Frames in words."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Sequence

__all__ = ["frames_text"]


def frames_text(frames: Sequence[str]) -> str:
    """How many frames, and which.

    Examples:
        >>> frames_text(["street_100", "street_101", "street_102"])
        '3 frames, street_100 … street_102'
        >>> frames_text(["a"])
        '1 frame, a'
    """
    if not frames:
        return "no frames"
    ends = frames[0] if len(frames) == 1 else f"{frames[0]} … {frames[-1]}"
    return f"{len(frames):,} frame{'s' * (len(frames) != 1)}, {ends}"
