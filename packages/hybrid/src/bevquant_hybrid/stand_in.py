"""Imports of the documented package resolve to this one, for unchanged scripts."""

from __future__ import annotations

import importlib
import re
import sys
from collections.abc import Iterable, Sequence
from importlib.abc import Loader
from importlib.machinery import ModuleSpec
from importlib.metadata import Distribution, DistributionFinder
from types import ModuleType
from typing import Any

__all__ = ["stand_in"]

_OURS = __name__.rpartition(".")[0]
_EVERYTHING = DistributionFinder.Context()


def _normal(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()


class _Metadata(Distribution):
    """importlib.metadata's answer for the documented package."""

    def __init__(self, name: str) -> None:
        self._name = name

    def read_text(self, filename: str) -> str | None:
        """Return the METADATA file, the only one."""
        if filename != "METADATA":
            return None
        version = importlib.import_module(_OURS).__version__
        return (
            f"Metadata-Version: 2.1\nName: {self._name}\nVersion: {version}\n"
            "Summary: bevquant-hybrid, standing in\n"
        )

    def locate_file(self, path: Any) -> Any:
        """Refuse: there are no files under this name."""
        raise FileNotFoundError(f"{self._name}: {path}: bevquant-hybrid stands in for it")


class _Finder(DistributionFinder, Loader):
    """Finds this package's modules under another name, as the same objects."""

    def __init__(self, name: str) -> None:
        self.name = name
        self._specs: dict[str, ModuleSpec | None] = {}

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if fullname != self.name and not fullname.startswith(f"{self.name}."):
            return None
        return ModuleSpec(fullname, self)

    def find_distributions(
        self, context: DistributionFinder.Context = _EVERYTHING
    ) -> Iterable[Distribution]:
        if context.name is None or _normal(context.name) == _normal(self.name):
            yield _Metadata(self.name)

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        # With an entry in `sys.modules` alone, Python would import every submodule a second time,
        # each with its own march.
        module = importlib.import_module(_OURS + spec.name[len(self.name) :])
        self._specs[spec.name] = module.__spec__
        return module

    def exec_module(self, module: ModuleType) -> None:
        # The import system has just set the module's __spec__ to the other name's.
        given = module.__spec__
        if given is not None:
            module.__spec__ = self._specs.pop(given.name)


def stand_in(name: str = "horizon_plugin_pytorch") -> None:
    """Make imports of `name` and its submodules find this package, in this process.

    `importlib.metadata` finds a distribution of that name too, with this package's version.

    ``python -m bevquant_hybrid script.py …`` does the same and then runs a script.

    Args:
        name: Top-level name of the package that scripts import.

    Raises:
        ValueError: Another package of this name is already imported.

    Example:
        >>> stand_in()
        >>> from horizon_plugin_pytorch.march import March
        >>> March.BAYES_E
        'bayes-e'
    """
    present = sys.modules.get(name)
    if any(isinstance(finder, _Finder) and finder.name == name for finder in sys.meta_path):
        return
    if present is not None and present.__name__ != _OURS:
        raise ValueError(
            f"stand_in: {name} is imported already, from {getattr(present, '__file__', None)}; "
            "call this first"
        )
    sys.meta_path.insert(0, _Finder(name))
