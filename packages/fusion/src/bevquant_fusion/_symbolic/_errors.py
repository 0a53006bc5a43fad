"""The one error a caller of this package may want to catch."""

from __future__ import annotations


class UntraceableError(ValueError):
    """A module's forward cannot be followed symbolically without guessing.

    The message names the module's class and the reason: a branch on data, a question about the
    class of an input, a value stored on the module, and so on. The module itself is fine; it only
    cannot be rewritten automatically.

    Example:
        >>> issubclass(UntraceableError, ValueError)
        True
    """
