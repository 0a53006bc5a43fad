"""What decides the figures of a run that several processes share."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from bevfusion_quant.ranks import Shards, current_ranks
from bevfusion_quant.run._record import versions

if TYPE_CHECKING:
    from torch import nn

    from bev_data.points import Frame


def run_shards(
    runs: Path, name: str, frames: Sequence[Frame], settings: Mapping[str, Any], *models: nn.Module
) -> Shards:
    """Where a run keeps what is finished; all ranks must have the same models and frames.

    Args:
        runs: Folder of all runs.
        name: The run.
        frames: Its frames; their names and the sizes of their files count, not their content.
        settings: What else decides the figures.
        models: Their weights and ranges do.

    Raises:
        InputError: The ranks differ.
    """
    if current_ranks().alone:
        return Shards(runs, name, {})
    about = {
        **settings,
        "frames": _described(frames),
        "models": [_digest(model) for model in models],
        "versions": versions(),
        "threads": torch.get_num_threads(),
    }
    return Shards(runs, name, about)


def _described(frames: Sequence[Frame]) -> list[Any]:
    known = getattr(frames, "paths", None) or getattr(frames, "keys", None) or ()
    return [
        len(frames),
        getattr(frames, "kind", None),
        [
            [str(key), key.stat().st_size] if isinstance(key, Path) and key.is_file() else str(key)
            for key in known
            if isinstance(key, str | int | Path)
        ],
    ]


def _digest(model: nn.Module) -> str:
    digest = hashlib.blake2b(digest_size=16)
    for name, value in model.state_dict().items():
        if isinstance(value, torch.Tensor):
            digest.update(f"{name} {tuple(value.shape)} {value.dtype}".encode())
            data = value.detach().cpu().contiguous().reshape(-1)
            digest.update(data.view(torch.uint8).numpy().data if data.numel() else b"")
    return digest.hexdigest()
