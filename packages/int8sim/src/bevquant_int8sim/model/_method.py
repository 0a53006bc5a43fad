"""A tensor's method as a function."""

from __future__ import annotations

from typing import Any


class Method:
    """Calls the method of its first argument that has this name."""

    def __init__(self, name: str) -> None:
        self.__name__ = name

    def __call__(self, value: Any, *args: Any, **kwargs: Any) -> Any:
        return getattr(value, self.__name__)(*args, **kwargs)
