"""Where results are written: whole files, in the folder that the caller names."""

from __future__ import annotations

import os
import tempfile
from pathlib import Path

__all__ = ["write_text"]


def write_text(out_dir: str | os.PathLike[str] | None, name: str, text: str) -> Path:
    """Write a file whole or not at all; return its path.

    Args:
        out_dir: Folder, made where it is missing; None for the current one.
        name: Of the file.
        text: What to write.
    """
    folder = Path(out_dir) if out_dir is not None else Path()
    folder.mkdir(parents=True, exist_ok=True)
    handle, temporary = tempfile.mkstemp(dir=folder, prefix=f".{name}.")
    try:
        with os.fdopen(handle, "w", encoding="utf-8") as file:
            file.write(text)
        Path(temporary).chmod(0o644)
        os.replace(temporary, folder / name)
    finally:
        Path(temporary).unlink(missing_ok=True)
    return folder / name
