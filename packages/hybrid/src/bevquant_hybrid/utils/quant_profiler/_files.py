"""Where results are written: whole files, in the folder that the caller names."""

from __future__ import annotations

import os
from pathlib import Path

from bevquant_hybrid._whole_file import write_whole

__all__ = ["write_text"]


def write_text(out_dir: str | os.PathLike[str] | None, name: str, text: str) -> Path:
    """Write a file whole or not at all; return its path.

    Args:
        out_dir: Folder, made where it is missing; None for the current one.
        name: Of the file.
        text: What to write.
    """
    return write_whole((Path() if out_dir is None else Path(out_dir)) / name, text)
