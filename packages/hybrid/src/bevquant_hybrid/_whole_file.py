"""Files written whole or not at all."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Self

import bevquant_quantizers as quantizers

__all__ = ["JsonDocument", "write_whole"]


def write_whole(path: str | os.PathLike[str], content: str | bytes) -> Path:
    """`bevquant_quantizers.write_whole`; the file's folders are made."""
    target = Path(path)
    target.parent.mkdir(parents=True, exist_ok=True)
    return quantizers.write_whole(target, content)


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
