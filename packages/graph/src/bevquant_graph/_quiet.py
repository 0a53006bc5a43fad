"""torch without its remarks, where what fails is told by an exception."""

from __future__ import annotations

import logging
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from unittest import mock

from torch.export import _trace

__all__ = ["quiet"]

_LOGGERS = ("torch", "torch.__trace", "torch.export", "torch._export", "torch.fx")


@contextmanager
def quiet(*more: str) -> Iterator[None]:
    """Neither warnings nor what torch logs while it traces, such as which sizes are fixed.

    Nor the graph so far, which torch.export prints where a forward asks for values.

    Args:
        more: Loggers beside torch's own for tracing.
    """
    loggers = [logging.getLogger(name) for name in (*_LOGGERS, *more)]
    levels = [logger.level for logger in loggers]
    for logger in loggers:
        logger.setLevel(logging.CRITICAL + 1)
    try:
        silent = mock.patch.object(_trace, "print", _say_nothing, create=True)
        with warnings.catch_warnings(), silent:
            warnings.simplefilter("ignore")
            yield
    finally:
        for logger, level in zip(loggers, levels, strict=True):
            logger.setLevel(level)


def _say_nothing(*_: object, **__: object) -> None:
    """In place of `print`."""
