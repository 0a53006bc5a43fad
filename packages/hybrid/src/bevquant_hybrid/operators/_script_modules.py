"""What tracing leaves of a module: its class, its tensors, the arguments of its operations."""

from __future__ import annotations

import importlib
import re
from typing import Any

from torch import Tensor, nn

from ._naming import is_leaf, row_of_module
from ._table import SupportTable

__all__ = ["find_module", "learn", "row_of_script", "settings_of"]

_PACKAGE = __package__.partition(".")[0]


def find_module(model: nn.Module, path: str) -> nn.Module | None:
    """The module at a path, traced or not; None where there is none."""
    found: Any = model
    for name in path.split(".") if path else ():
        found = getattr(found, name, None)
    return found if isinstance(found, nn.Module) else None


def settings_of(module: nn.Module) -> nn.Module:
    """What stands for a traced module: it fills with the settings of its operations."""
    settings = nn.Module()
    for name in ("weight", "bias"):
        value = getattr(module, name, None)
        if isinstance(value, Tensor):
            settings.__dict__[name] = value
    return settings


def learn(settings: nn.Module, arguments: dict[str, Any], *, weights: bool = True) -> None:
    """Take over the arguments of an operation, the first of each name."""
    for name, value in arguments.items():
        if name == "dim" and isinstance(value, list):
            name = "axes"
        if (weights and name in ("weight", "bias")) or isinstance(value, int | float | str | list):
            value = None if value == [] else value
            settings.__dict__.setdefault(name, value)


def row_of_script(module: nn.Module, table: SupportTable) -> str:
    """The row of a traced module, by its class; ``""`` of one that holds others."""
    cls = _class_of(module)
    if cls is None:
        return ""
    function = getattr(module, "function", None)
    if isinstance(function, nn.Module):  # a table is the function that it tabulates
        return row_of_script(function, table)
    empty = cls.__new__(cls)
    if not is_leaf(empty, table):
        return ""
    return row_of_module(empty, table) or f"torch.nn.{cls.__name__}"


def _class_of(module: nn.Module) -> type[nn.Module] | None:
    """The class that a module had when it was traced, if it is torch's or this package's."""
    kind = module._c._type().qualified_name()  # type: ignore[union-attr, operator]
    kind = re.sub(r"___torch_mangle_\d+\.", "", kind.removeprefix("__torch__."))
    home, _, name = kind.rpartition(".")
    if not home.startswith(("torch.nn.", "torch.ao.nn.", f"{_PACKAGE}.")):
        return None
    found = getattr(importlib.import_module(home), name, None)
    return found if isinstance(found, type) and issubclass(found, nn.Module) else None
