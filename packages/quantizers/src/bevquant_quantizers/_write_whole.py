"""Write a file whole or not at all."""

from __future__ import annotations

import os
import secrets
from pathlib import Path

__all__ = ["write_whole"]


def write_whole(path: str | os.PathLike[str], content: bytes | str) -> Path:
    """Write under a temporary name beside `path`, flush to the disk, rename.

    Whoever reads `path`, and whenever the writer dies, finds the old content or the new.

    Args:
        path: The file; what it held is replaced.
        content: Bytes, or text, which is written as UTF-8.

    Returns:
        The path.

    Raises:
        ValueError: The folder of `path` does not exist, or `path` is a folder.
        OSError: The disk is full or the place may not be written; `path` is as it was.

    Example:
        >>> import tempfile
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     write_whole(f"{folder}/plan.json", "{}").read_text()
        '{}'
    """
    target = Path(path)
    if not target.parent.is_dir():
        raise ValueError(
            f"cannot write {target}: the folder {target.parent} does not exist; make it first"
        )
    if target.is_dir():
        raise ValueError(f"cannot write {target}: it is a folder; give a file name")
    temporary = target.with_name(f".{target.name}.{os.getpid()}.{secrets.token_hex(4)}.tmp")
    try:
        with open(temporary, "xb") as file:
            file.write(content.encode() if isinstance(content, str) else content)
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, target)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise
    return target
