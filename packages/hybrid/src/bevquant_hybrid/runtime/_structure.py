"""How tensors are nested in what a model takes and returns, as JSON can say it.

``{"tensor": 0}`` is the first tensor; ``{"list": […]}``, ``{"tuple": […]}`` and ``{"dict": [[key,
…]]}`` hold others; ``{"constant": …}`` is None, a truth value, a number or a string.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from torch import Tensor

__all__ = ["build", "check", "flatten", "places"]

_PLAIN = (bool, int, float, str, type(None))


def flatten(value: Any, what: str) -> tuple[list[Tensor], Any]:
    """Return the tensors of a nested value in their order, and how they are nested.

    Named tuples become tuples, and dictionaries of any kind dict.

    Raises:
        TypeError: It holds something else; the message starts with `what`.
    """
    tensors: list[Tensor] = []

    def describe(item: Any, place: str) -> Any:
        if isinstance(item, Tensor):
            tensors.append(item)
            return {"tensor": len(tensors) - 1}
        if isinstance(item, list | tuple):
            kind = "list" if isinstance(item, list) else "tuple"
            return {kind: [describe(part, f"{place}[{i}]") for i, part in enumerate(item)]}
        if isinstance(item, dict):
            wrong = [key for key in item if not isinstance(key, str | int)]
            if not wrong:
                return {
                    "dict": [
                        [key, describe(part, f"{place}[{key!r}]")] for key, part in item.items()
                    ]
                }
            item = wrong[0]
        elif isinstance(item, _PLAIN):
            return {"constant": item}
        raise TypeError(
            f"{place} is a {type(item).__name__}: expected tensors, in lists, tuples and "
            "dictionaries with names or integers as keys"
        )

    return tensors, describe(value, what)


def build(structure: Any, tensors: Sequence[Tensor]) -> Any:
    """Nest tensors as `structure` says."""
    ((kind, content),) = structure.items()
    if kind == "tensor":
        return tensors[content]
    if kind == "constant":
        return content
    if kind == "dict":
        return {key: build(part, tensors) for key, part in content}
    items = [build(part, tensors) for part in content]
    return items if kind == "list" else tuple(items)


def places(structure: Any, top: str) -> list[str]:
    """Name the tensors by where they stand: ``boxes``, ``boxes.0``; a single one by `top`."""
    found: list[str] = []

    def visit(part: Any, path: tuple[str, ...]) -> None:
        ((kind, content),) = part.items()
        if kind == "tensor":
            found.append(".".join(path) or top)
        elif kind == "dict":
            for key, item in content:
                visit(item, (*path, str(key)))
        elif kind != "constant":
            for i, item in enumerate(content):
                visit(item, (*path, str(i)))

    visit(structure, ())
    return found


def check(structure: Any, refuse: Callable[[str], Exception]) -> int:
    """Return how many tensors a structure read from a file holds.

    Raises:
        Exception: What `refuse` makes of a reason: it is no structure, or counts its tensors out
            of order.
    """
    count = 0

    def visit(part: Any) -> None:
        nonlocal count
        if not isinstance(part, dict) or len(part) != 1:
            raise refuse(f"{part!r} says nothing of how values are nested")
        ((kind, content),) = part.items()
        if kind == "tensor" and type(content) is int and content == count:
            count += 1
        elif kind in ("list", "tuple") and isinstance(content, list):
            for item in content:
                visit(item)
        elif kind == "dict" and isinstance(content, list):
            for entry in content:
                if not isinstance(entry, list) or len(entry) != 2:
                    raise refuse(f"{entry!r} is no entry of a dictionary")
                if not isinstance(entry[0], str | int):
                    raise refuse(f"{entry[0]!r} is no key of a dictionary")
                visit(entry[1])
        elif kind != "constant" or not isinstance(content, _PLAIN):
            raise refuse(f"{part!r} says nothing of how values are nested")

    visit(structure)
    return count
