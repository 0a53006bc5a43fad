"""What a run wrote."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any

import pytest

__all__ = ["digest", "summary"]


def summary(folder: Path) -> dict[str, Any]:
    """The results of a run; JSON has neither NaN nor infinity."""
    return json.loads((folder / "summary.json").read_text(), parse_constant=pytest.fail)


def digest(folder: Path) -> dict[str, str]:
    """sha256 of every file below a folder."""
    files = (path for path in sorted(folder.rglob("*")) if path.is_file())
    return {str(path): hashlib.sha256(path.read_bytes()).hexdigest() for path in files}
