"""Targets by name: those of this package, those of entry points, and those added at run time."""

from __future__ import annotations

from functools import cache
from importlib import import_module
from importlib.metadata import entry_points
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from bevquant_export.targets._target import Target

__all__ = ["ENTRY_POINTS", "find_target", "register_target", "target_names", "targets"]

ENTRY_POINTS = "bevquant.targets"

# Module and object of each, as an entry point names them; imported when one is first asked for.
_OWN = (
    "bevquant_export.targets.libspconv:LIBSPCONV",
    "bevquant_export.targets.portable:PORTABLE",
    "bevquant_export.targets.tensorrt:TENSORRT10",
    "bevquant_export.targets.tensorrt:TENSORRT11",
    "bevquant_export.targets.onnxruntime:ONNXRUNTIME",
    "bevquant_export.targets.openvino:OPENVINO",
    "bevquant_export.targets.horizon:HORIZON",
    "bevquant_export.targets.autoware:AUTOWARE",
)
_added: dict[str, Target] = {}


def targets() -> tuple[Target, ...]:
    """All targets: this package's first, then those of entry points, then those registered.

    Raises:
        ImportError: A package's entry point cannot be loaded; the entry point is named.
        ValueError: Two targets have one name.
    """
    return (*_loaded(), *_added.values())


def target_names() -> tuple[str, ...]:
    """Names that `find_target` knows, aliases behind all names."""
    found = targets()
    return (*(t.name for t in found), *(alias for t in found for alias in t.aliases))


def find_target(name: str) -> Target:
    """The target of this name or alias.

    Raises:
        ValueError: There is none.

    Example:
        >>> find_target("tensorrt").name
        'tensorrt10'
    """
    for target in targets():
        if name == target.name or name in target.aliases:
            return target
    raise ValueError(f"target {name!r}: expected one of {', '.join(target_names())}")


def register_target(target: Target) -> None:
    """Add a target for the rest of this process; entry points do that for every process.

    Raises:
        ValueError: One of its names is taken.
    """
    _check((*targets(), target))
    _added[target.name] = target


@cache
def _loaded() -> tuple[Target, ...]:
    found: list[Target] = []
    for place in _OWN:
        module, _, name = place.partition(":")
        found.append(getattr(import_module(module), name))
    for entry in sorted(entry_points(group=ENTRY_POINTS), key=lambda e: e.name):
        try:
            found.append(entry.load())
        except (ImportError, AttributeError) as error:
            raise ImportError(
                f"target {entry.name!r}: its entry point {entry.value} cannot be loaded: {error}; "
                "repair or remove the package that declares it"
            ) from error
    _check(tuple(found))
    return tuple(found)


def _check(found: tuple[Target, ...]) -> None:
    names: dict[str, Target] = {}
    for target in found:
        for name in (target.name, *target.aliases):
            other = names.setdefault(name, target)
            if other is not target:
                raise ValueError(
                    f"target {name!r}: two targets have this name, {other.title} and "
                    f"{target.title}; give one of them another"
                )
