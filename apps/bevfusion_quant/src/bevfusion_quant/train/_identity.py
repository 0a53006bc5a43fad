"""What decides a run's result, to tell whether a checkpoint is of the run that is asked for."""

from __future__ import annotations

import json
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from bevfusion_quant._errors import InputError

if TYPE_CHECKING:
    from pathlib import Path

    from bevfusion_quant.train._checkpoint import Checkpoint
    from bevfusion_quant.train._split import FrameSource

__all__ = ["check_identity", "identity_of"]


def identity_of(source: FrameSource, config: Any, **more: str) -> dict[str, Any]:
    """What decides the result, as it comes back from JSON.

    Args:
        source: Frames to train on.
        config: A dataclass of settings.
        more: Other things that decide it, by name.
    """
    about = {"training_frames": source.describe, "settings": {**asdict(config), **more}}
    identity: dict[str, Any] = json.loads(json.dumps(about, default=str))
    return identity


def check_identity(
    checkpoint: Path, begun: Checkpoint, identity: dict[str, Any], place: str
) -> None:
    """Refuse to go on with another run.

    Args:
        checkpoint: The file.
        begun: What it holds.
        identity: Of the run that is asked for.
        place: The option that says where the run lies.

    Raises:
        InputError: Naming every setting that differs.
    """
    old, new = (
        {"training_frames": d["training_frames"], **d["settings"]}
        for d in (begun.identity, identity)
    )
    keys = [key for key in {**new, **old} if old.get(key) != new.get(key)]
    if keys:
        told = "; ".join(f"{key} was {old.get(key)!r}, now {new.get(key)!r}" for key in keys)
        raise InputError(
            f"{checkpoint} is of another run: {told}: give the same settings, or another {place}"
        )
