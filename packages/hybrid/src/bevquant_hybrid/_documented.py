"""Documented names of tools that are a package of their own, found there when asked for."""

from __future__ import annotations

from collections.abc import Callable
from types import ModuleType
from typing import Any

from bevquant_quantizers.plugins import installed, load

_GROUP = "bevquant_hybrid.documented"  # entry points: where this package documents it → its module


def tool(path: str) -> ModuleType:
    """The module that holds what is documented below ``bevquant_hybrid.<path>``.

    Raises:
        ImportError: No installed package has it.
    """
    for entry in installed(_GROUP, own="bevquant_hybrid_tools"):
        if entry.name == path:
            module: ModuleType = load(entry, f"bevquant_hybrid.{path}")
            return module
    raise ImportError(
        f"bevquant_hybrid.{path}: this tool is a package of its own, which is not installed: "
        "install packages/hybrid_tools of the checkout, or the whole distribution bevquant"
    )


def names_from(path: str, *names: str) -> Callable[[str], Any]:
    """The ``__getattr__`` of the module at ``bevquant_hybrid.<path>``: names that `tool` has."""

    def find(name: str) -> Any:
        if name not in names:
            raise AttributeError(f"module 'bevquant_hybrid.{path}' has no attribute {name!r}")
        return getattr(tool(path), name)

    return find
