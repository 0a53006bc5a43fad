"""Write a file whole or not at all."""

from __future__ import annotations

import os
import secrets
from pathlib import Path

__all__ = ["write_whole"]


def write_whole(path: str | os.PathLike[str], content: bytes) -> None:
    """Write under a temporary name beside `path`, flush to the disk, rename.

    Raises:
        ValueError: The folder of `path` does not exist, or `path` is a folder.
    """
    target = Path(path)
    if not target.parent.is_dir():
        raise ValueError(f"cannot write {target}: the folder {target.parent} does not exist")
    if target.is_dir():
        raise ValueError(f"cannot write {target}: it is a folder; give a file name")
    temporary = target.with_name(f".{target.name}.{secrets.token_hex(8)}.tmp")
    try:
        with open(temporary, "xb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, target)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise
