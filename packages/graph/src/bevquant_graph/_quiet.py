"""How a model runs while it is looked at: in evaluation mode, and torch without its remarks."""

from __future__ import annotations

import logging
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

import torch
from torch import nn

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
    # Imports torch's compiler, as long as torch itself takes: only where something is traced.
    from torch.export import _trace

    for logger in loggers:
        logger.setLevel(logging.CRITICAL + 1)
    try:
        silent = mock.patch.object(_trace, "print", _say_nothing, create=True)
        # torch writes a record, with all calls, of every guard for whatever handler there is.
        unrecorded: Any = mock.patch.object(logging.getLogger("torch.__trace"), "handlers", [])
        with warnings.catch_warnings(), silent, unrecorded:
            warnings.simplefilter("ignore")
            yield
    finally:
        for logger, level in zip(loggers, levels, strict=True):
            logger.setLevel(level)


def _say_nothing(*_: object, **__: object) -> None:
    """In place of `print`."""


@contextmanager
def evaluation(model: nn.Module) -> Iterator[None]:
    """Every module in evaluation mode, and each back in its own mode afterwards.

    Attention is computed as it is while torch traces, without torch's fused form of it.
    """
    modes = {module: module.training for module in model.modules()}
    fused = torch.backends.mha.get_fastpath_enabled()
    torch.backends.mha.set_fastpath_enabled(False)
    model.eval()
    try:
        yield
    finally:
        torch.backends.mha.set_fastpath_enabled(fused)
        for module, mode in modes.items():
            module.training = mode
