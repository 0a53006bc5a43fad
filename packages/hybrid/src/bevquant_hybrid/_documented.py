"""Documented names of tools in another package, imported on first use."""

from __future__ import annotations

from collections.abc import Callable
from types import ModuleType
from typing import Any

from bevquant_quantizers.plugins import installed, load

_GROUP = "bevquant_hybrid.documented"  # entry points: documented path → module


def tool(path: str) -> ModuleType:
    """The module with the names documented under ``bevquant_hybrid.<path>``."""
    for entry in installed(_GROUP, own="bevquant_hybrid_tools"):
        if entry.name == path:
            module: ModuleType = load(entry, f"bevquant_hybrid.{path}")
            return module
    raise ImportError(
        f"bevquant_hybrid.{path}: this tool is a package of its own, which is not installed: "
        "install packages/hybrid_tools of the checkout, or the whole distribution bevquant"
    )


def names_from(path: str, *names: str) -> Callable[[str], Any]:
    """A ``__getattr__`` for ``bevquant_hybrid.<path>`` that finds the names of `tool`."""

    def find(name: str) -> Any:
        if name not in names:  # also what test runners and debuggers ask of every module
            raise AttributeError(f"module 'bevquant_hybrid.{path}' has no attribute {name!r}")
        return getattr(tool(path), name)

    return find
