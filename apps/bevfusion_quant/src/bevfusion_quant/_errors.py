"""The one exception that means: the user's input is at fault, and here is what to do."""

from __future__ import annotations

__all__ = ["InputError"]


class InputError(ValueError):
    """Something handed in cannot be used; the message says what is wrong and what to do.

    The command line prints the message alone and ends with exit code 2.
    """
