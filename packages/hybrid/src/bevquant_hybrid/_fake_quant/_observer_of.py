"""Make an observer, and say which of its arguments nobody knows."""

from __future__ import annotations

import difflib
import inspect
from collections.abc import Iterable, Mapping
from typing import Any

__all__ = ["made_observer", "strangers"]


def _accepted(cls: type[Any]) -> set[str] | None:
    """Names of what a class is made with, through ``**kwargs`` of its bases; None: any name."""
    names: set[str] = set()
    for base in cls.__mro__:
        if "__init__" not in vars(base):
            continue
        parameters = list(inspect.signature(vars(base)["__init__"]).parameters.values())[1:]
        names |= {p.name for p in parameters if p.kind not in (p.VAR_KEYWORD, p.VAR_POSITIONAL)}
        if not any(p.kind is p.VAR_KEYWORD for p in parameters):
            return names
    return None


def strangers(settings: Iterable[str], *classes: Any) -> str:
    """Say which settings none of some classes takes, and what they do take; ``""`` if all are.

    Example:
        >>> from bevquant_hybrid.quantization import MinMaxObserver
        >>> strangers(["dtype"], MinMaxObserver)
        ''
        >>> strangers(["dtipe"], MinMaxObserver).partition(";")[0]
        "MinMaxObserver takes no 'dtipe' (nearest: dtype)"
    """
    known: set[str] = set()
    for cls in classes:
        accepted = _accepted(cls) if isinstance(cls, type) else None
        if accepted is None:
            return ""
        known |= accepted
    unknown = sorted(set(settings) - known)
    if not unknown:
        return ""
    shown = []
    for name in unknown:
        near = difflib.get_close_matches(name, known, 1, 0.4)
        shown.append(f"{name!r}" + (f" (nearest: {near[0]})" if near else ""))
    owners = " and ".join(cls.__name__ for cls in classes)
    take = "takes" if len(classes) == 1 else "take"
    return f"{owners} {take} no {', '.join(shown)}; known are {', '.join(sorted(known))}"


def made_observer(owner: str, observer: Any, settings: Mapping[str, Any]) -> Any:
    """Make the observer of a fake quantizer.

    Raises:
        TypeError: A setting that it does not take.
    """
    try:
        return observer(**settings)
    except TypeError as error:
        unknown = strangers(settings, observer)
        if not unknown:
            raise
        raise TypeError(f"{owner}: {unknown}") from error
