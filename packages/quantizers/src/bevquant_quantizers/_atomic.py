"""Write a file whole or not at all."""

from __future__ import annotations

import os
import secrets
from pathlib import Path

__all__ = ["write_atomically"]


def write_atomically(path: str | os.PathLike[str], content: bytes) -> None:
    """Write under a temporary name beside `path`, flush to the disk, rename.

    Whoever reads `path`, and whenever the writer dies, finds the old content or the new.

    Raises:
        ValueError: The folder of `path` does not exist.
    """
    path = Path(path)
    if not path.parent.is_dir():
        raise ValueError(f"cannot write {path}: the folder {path.parent} does not exist")
    temporary = path.with_name(f".{path.name}.{os.getpid()}.{secrets.token_hex(4)}.tmp")
    try:
        with open(temporary, "xb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise
