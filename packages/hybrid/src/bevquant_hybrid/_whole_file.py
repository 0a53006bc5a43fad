"""Files written whole or not at all, in folders that are made."""

from __future__ import annotations

import os
from pathlib import Path

import bevquant_quantizers as quantizers

__all__ = ["write_whole"]


def write_whole(path: str | os.PathLike[str], content: str | bytes) -> Path:
    """`bevquant_quantizers.write_whole`; the file's folders are made."""
    target = Path(path)
    target.parent.mkdir(parents=True, exist_ok=True)
    return quantizers.write_whole(target, content)
