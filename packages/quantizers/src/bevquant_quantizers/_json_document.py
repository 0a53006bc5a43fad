"""What says itself as JSON, as files."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Self

from ._write_whole import write_whole

__all__ = ["JsonDocument"]


class JsonDocument:
    """Base of what says itself as JSON: a plan, a table.

    A subclass gives `to_json` and `from_json`; `save` and `load` follow.

    Example:
        >>> import json, tempfile
        >>> class Count(JsonDocument):
        ...     def __init__(self, count):
        ...         self.count = count
        ...     def to_json(self):
        ...         return json.dumps(self.count)
        ...     @classmethod
        ...     def from_json(cls, text):
        ...         return cls(json.loads(text))
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     Count.load(Count(3).save(f"{folder}/count.json")).count
        3
    """

    def to_json(self) -> str:
        """The JSON text."""
        raise NotImplementedError

    @classmethod
    def from_json(cls, text: str) -> Self:
        """Read and check what `to_json` wrote.

        Raises:
            ValueError: It is something else.
        """
        raise NotImplementedError

    def save(self, path: str | os.PathLike[str]) -> Path:
        """Write the JSON to `path`, whole or not at all; return the path."""
        return write_whole(path, self.to_json() + "\n")

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> Self:
        """Read a file that `save` wrote.

        Raises:
            ValueError: It is no such file; the message names it.
        """
        try:
            return cls.from_json(Path(path).read_text(encoding="utf-8"))
        except ValueError as error:
            raise ValueError(f"{path}: {error}") from error
