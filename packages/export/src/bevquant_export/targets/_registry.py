"""Targets by name: from installed packages, this one included, and added at run time."""

from __future__ import annotations

from functools import cache
from typing import TYPE_CHECKING

from bevquant_quantizers import plugins

if TYPE_CHECKING:
    from importlib.metadata import EntryPoint

    from bevquant_export.targets._target import Target

# Engines, and forms of a sparse encoder's file alone. Each entry point is a name of a target.
ENTRY_POINTS = ("bevquant.targets", "bevquant.dialects")

_added: dict[str, Target] = {}


def targets() -> tuple[Target, ...]:
    """All targets: this package's first, then those of other entry points, then those registered.

    Raises:
        ImportError: A package's entry point cannot be loaded; the entry point is named.
        ValueError: Two targets have one name, or an entry point has a name that its target lacks.
    """
    return (*_loaded(), *_added.values())


def target_names() -> tuple[str, ...]:
    """Names that `find_target` accepts: targets first, then aliases."""
    found = targets()
    return (*(t.name for t in found), *(alias for t in found for alias in t.aliases))


def find_target(name: str) -> Target:
    """Return the target with this name or alias.

    Raises:
        ValueError: There is none.

    Example:
        >>> find_target("tensorrt").name
        'tensorrt10'
    """
    for target in targets():
        if name == target.name or name in target.aliases:
            return target
    raise ValueError(
        f"target {name!r}: expected one of {', '.join(target_names())}; a package adds one as an "
        f"entry point of the group {ENTRY_POINTS[0]}, a program with register_target"
    )


def register_target(target: Target) -> None:
    """Add a target for the rest of this process. Entry points add one for every process.

    Raises:
        ValueError: One of its names is taken.
    """
    _check((*targets(), target))
    _added[target.name] = target


@cache
def _loaded() -> tuple[Target, ...]:
    found: dict[int, Target] = {}
    for entry in plugins.installed(*reversed(ENTRY_POINTS), own="bevquant_export"):
        target = _load(entry)
        found[id(target)] = target
    _check(tuple(found.values()))
    return tuple(found.values())


def _load(entry: EntryPoint) -> Target:
    target: Target = plugins.load(entry, f"target {entry.name!r}")
    names = (target.name, *target.aliases)
    if entry.name not in names:
        raise ValueError(
            f"target {target.name!r}: its entry point {entry.value} is called {entry.name!r}, "
            f"which is no name of it; call it one of {', '.join(names)}"
        )
    return target


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
