"""Optional packages, and entry points of installed ones: targets, data sets."""

from __future__ import annotations

from importlib.metadata import EntryPoint, entry_points
from importlib.util import find_spec
from typing import Any

__all__ = ["importable", "installed", "load"]


def importable(package: str) -> bool:
    """Whether an optional package is installed; nothing is imported.

    Example:
        >>> importable("torch"), importable("no_such_package")
        (True, False)
    """
    try:
        return find_spec(package) is not None
    except (ImportError, ValueError):  # an import hook refuses it, or a module without a spec
        return False


def installed(*groups: str, own: str) -> list[EntryPoint]:
    """Entry points of some groups, those of one package first: its names cannot be replaced.

    Nothing is imported.

    Args:
        groups: Names of groups, in this order.
        own: The package whose entry points come first.

    Example:
        >>> [entry.name for entry in installed("bevquant.no_such_group", own="bevquant_quantizers")]
        []
    """
    found = [entry for group in groups for entry in entry_points(group=group)]
    return sorted(found, key=lambda entry: not entry.module.startswith(f"{own}."))


def load(entry: EntryPoint, what: str, error: type[Exception] = ImportError) -> Any:
    """The object of an entry point.

    Args:
        entry: An entry of `installed`.
        what: Its description for the error, as in "target 'mine'".
        error: The class of the error.

    Raises:
        ImportError: It cannot be loaded; or `error`, if that is another class.

    Example:
        >>> load(EntryPoint("pi", "math:pi", "bevquant.numbers"), "number 'pi'")
        3.141592653589793
    """
    try:
        return entry.load()
    except (ImportError, AttributeError) as reason:
        raise error(
            f"{what}: its entry point {entry.value} cannot be loaded: {reason}; repair or remove "
            "the package that declares it"
        ) from reason
