"""Files written whole or not at all."""

from __future__ import annotations

import os
import secrets
from pathlib import Path
from typing import Self

__all__ = ["JsonDocument", "write_whole"]


def write_whole(path: str | os.PathLike[str], content: str | bytes) -> Path:
    """Write `content` (text as UTF-8) to `path` and return the path; folders are made.

    Whoever reads meanwhile finds the old file or the new one.
    """
    target = Path(path)
    target.parent.mkdir(parents=True, exist_ok=True)
    temporary = target.with_name(f".{target.name}.{os.getpid()}.{secrets.token_hex(4)}")
    try:
        with open(temporary, "xb") as file:
            file.write(content.encode() if isinstance(content, str) else content)
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(target)
    finally:
        temporary.unlink(missing_ok=True)
    return target


class JsonDocument:
    """What says itself as JSON, and as a file of it."""

    def to_json(self) -> str:
        """The JSON text."""
        raise NotImplementedError

    @classmethod
    def from_json(cls, text: str) -> Self:
        """Read and check what `to_json` wrote."""
        raise NotImplementedError

    def save(self, path: str | os.PathLike[str]) -> Path:
        """Write the JSON to `path`, whole or not at all; return the path."""
        return write_whole(path, self.to_json())

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> Self:
        """Read a file that `save` wrote; errors name it."""
        try:
            return cls.from_json(Path(path).read_text(encoding="utf-8"))
        except ValueError as error:
            raise ValueError(f"{path}: {error}") from error
