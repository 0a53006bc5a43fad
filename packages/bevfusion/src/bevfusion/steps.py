"""Names of the steps of long functions, for a program that times or shows them.

Example:
    >>> from contextlib import contextmanager
    >>> @contextmanager
    ... def shown(name, blame):
    ...     print(f"{name} …")
    ...     yield
    >>> def long_function(step: Step = silent_step) -> None:
    ...     with step("measure", ""):
    ...         pass
    >>> long_function(step=shown)
    measure …
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext

__all__ = ["Step", "silent_step"]

Step = Callable[[str, str], AbstractContextManager[None]]
"""Called around each step of a long function, with its name and with what a ValueError in it means,
"" where that says enough by itself."""


def silent_step(name: str, blame: str) -> AbstractContextManager[None]:
    """Report nothing: the default."""
    return nullcontext()
