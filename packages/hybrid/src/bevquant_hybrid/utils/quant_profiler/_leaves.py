"""Which modules of a model are looked at as one operator, and which of them a caller wants."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable
from typing import Any

from torch import nn

from bevquant_hybrid._fx._tracer import is_leaf
from bevquant_hybrid.nn.qat._base import OutputQuantized
from bevquant_hybrid.nn.qat._weighted import Weighted
from bevquant_hybrid.nn.quantized._base import FixedPoint

__all__ = ["Selection", "is_operator", "named_operators"]

_CONTAINERS = (nn.Sequential, nn.ModuleList, nn.ModuleDict)
_PARTS = (Weighted, OutputQuantized, FixedPoint)


def is_operator(module: nn.Module) -> bool:
    """Whether a module counts as one operator: this package's, torch's, and those without parts.

    A module of this package that computes in several quantized steps counts as those.
    """
    if any(isinstance(child, _PARTS) for child in module._modules.values()):
        return False
    if is_leaf(module) or not any(child is not None for child in module._modules.values()):
        return True
    of_torch = type(module).__module__.startswith(("torch.nn.modules.", "torch.ao.nn."))
    return of_torch and not isinstance(module, _CONTAINERS)


def named_operators(
    model: nn.Module, check: Callable[[nn.Module], bool] | None = None
) -> tuple[dict[str, nn.Module], dict[str, str]]:
    """List a model's operators by their first names.

    Args:
        model: Any model.
        check: What counts as an operator; None for `is_operator`.

    Returns:
        Modules by name, in the order of their definition; and further names of modules, with the
        first name of each.
    """
    check = check or is_operator
    found: dict[str, nn.Module] = {}
    first: dict[int, str] = {}
    again: dict[str, str] = {}

    def walk(module: nn.Module, path: str) -> None:
        if id(module) in first:
            again[path] = first[id(module)]
            return
        first[id(module)] = path
        if check(module):
            found[path] = module
            return
        for name, child in module._modules.items():
            if child is not None:
                walk(child, f"{path}.{name}" if path else name)

    walk(model, "")
    return found, again


class Selection:
    """The modules that a caller asks for, by the start of their names and by class.

    A prefix that is the name of a module means it and what it holds (``conv1`` is not ``conv10``);
    any other is the start of names.

    Args:
        model: Where the names are from.
        prefixes: Starts of names, or one of them; empty for all, where `types` is empty too.
        types: Classes, or one of them.
        caller: For messages.

    Raises:
        TypeError: Something else.

    Warns:
        UserWarning: A prefix that no module's name starts with.
    """

    def __init__(
        self,
        model: nn.Module,
        prefixes: str | Iterable[str],
        types: type | Iterable[type],
        caller: str,
    ) -> None:
        self.prefixes = (prefixes,) if isinstance(prefixes, str) else tuple(prefixes)
        self.types: tuple[type, ...] = (types,) if isinstance(types, type) else tuple(types)
        for prefix in self.prefixes:
            if not isinstance(prefix, str):
                raise TypeError(f"{caller}: prefixes: expected strings, got {prefix!r}")
        for kind in self.types:
            if not isinstance(kind, type):
                raise TypeError(f"{caller}: types: expected classes, got {kind!r}")
        paths = [path for path, _ in model.named_modules(remove_duplicate=False)]
        self._whole = {prefix for prefix in self.prefixes if prefix in paths}
        for prefix in self.prefixes:
            if not any(path.startswith(prefix) for path in paths):
                warnings.warn(
                    f"{caller}: no module's name starts with {prefix!r}", UserWarning, stacklevel=4
                )

    def names(self, path: str) -> bool:
        """Whether a prefix names a path."""
        return any(
            path == prefix or path.startswith(f"{prefix}." if prefix in self._whole else prefix)
            for prefix in self.prefixes
        )

    def takes(self, path: str, module: Any) -> bool:
        """Whether a module is asked for, by either; any is where neither was given."""
        if not self.prefixes and not self.types:
            return True
        return self.names(path) or (bool(self.types) and isinstance(module, self.types))
