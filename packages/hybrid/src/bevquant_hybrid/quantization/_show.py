"""Show a picture without waiting for anybody, and without a display not at all."""

from __future__ import annotations

import importlib
import os
import shutil
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

__all__ = ["show_picture"]


def show_picture(path: Path) -> None:
    """Show an SVG file in the notebook, or with the desktop's viewer; print where it lies."""
    if _in_notebook():
        notebook: Any = importlib.import_module("IPython.display")
        notebook.display(notebook.SVG(filename=str(path)))
        return
    command = _viewer()
    if command:
        threading.Thread(target=_open, args=([*command, str(path)],), daemon=True).start()
    print(f"the picture is {path}")


def _in_notebook() -> bool:
    """Whether a notebook's kernel runs this; a terminal's IPython shows no pictures."""
    ipython = sys.modules.get("IPython")
    shell = ipython.get_ipython() if ipython is not None else None
    return type(shell).__name__ == "ZMQInteractiveShell"


def _viewer() -> list[str]:
    """The desktop's command that opens files, or nothing where there is no desktop."""
    if sys.platform == "darwin":
        return ["open"]
    found = shutil.which("xdg-open")
    screen = os.environ.get("DISPLAY") or os.environ.get("WAYLAND_DISPLAY")
    return [found] if found and screen else []


def _open(command: list[str]) -> None:
    nothing = subprocess.DEVNULL
    try:
        subprocess.run(command, stdin=nothing, stdout=nothing, stderr=nothing, check=False)
    except OSError:
        pass  # the path was printed: the user can open it
