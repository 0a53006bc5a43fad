"""How a model runs while it is looked at: in evaluation mode, and torch without its remarks."""

from __future__ import annotations

import logging
import warnings
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from functools import wraps
from threading import RLock, get_ident
from typing import Any
from unittest import mock

import torch
from torch import nn
from torch.fx._symbolic_trace import _Patcher

from ._kinds import check_kind

TRACING: Any = RLock()
"""Held while a forward is traced: torch then changes classes and settings of the whole process."""

_LOGGERS = ("torch", "torch.__trace", "torch.export", "torch._export", "torch.fx")


@contextmanager
def quiet(*more: str) -> Iterator[None]:
    """Suppress warnings and torch's log while it traces, such as which sizes are fixed.

    Also the graph that torch.export prints where a forward asks for values. One thread at a time
    traces; other threads see unchanged modules.

    Args:
        more: Loggers beside torch's own for tracing.
    """
    # Imports torch's compiler, as long as torch itself takes: only where something is traced.
    from torch.export import _trace

    with TRACING, ExitStack() as stack:
        for name in (*_LOGGERS, *more):
            logger = logging.getLogger(name)
            stack.callback(logger.setLevel, logger.level)
            logger.setLevel(logging.CRITICAL + 1)
        stack.enter_context(mock.patch.object(_trace, "print", _say_nothing, create=True))
        # torch writes a record, with all calls, of every guard for whatever handler there is.
        unrecorded: Any = mock.patch.object(logging.getLogger("torch.__trace"), "handlers", [])
        stack.enter_context(unrecorded)
        patch = _in_this_thread(_Patcher.patch_method)
        stack.enter_context(mock.patch.object(_Patcher, "patch_method", patch))
        stack.enter_context(warnings.catch_warnings())
        warnings.simplefilter("ignore")
        yield


def _in_this_thread(patch_method: Callable[..., None]) -> Callable[..., None]:
    """Replace ``Module.__call__`` as torch's tracer does; other threads call the original."""

    def patch(patcher: Any, cls: type, name: str, new: Callable[..., Any], **named: Any) -> None:
        old = getattr(cls, name)
        patch_method(patcher, cls, name, by_thread(new, old), **named)

    return patch


def by_thread(new: Callable[..., Any], old: Callable[..., Any]) -> Callable[..., Any]:
    """A function that is `new` in this thread and `old` in all others.

    Example:
        >>> by_thread(max, min)(1, 2)
        2
    """
    thread = get_ident()

    @wraps(new)
    def chosen(*args: Any, **kwargs: Any) -> Any:
        return (new if get_ident() == thread else old)(*args, **kwargs)

    return chosen


def _say_nothing(*_: object, **__: object) -> None:
    """In place of `print`."""


@contextmanager
def evaluation(model: nn.Module) -> Iterator[None]:
    """Set every module to evaluation mode, and back to its own mode afterwards.

    Attention runs in the form that torch traces, without torch's fused form. A caller's
    `torch.autocast` does not apply.
    """
    check_kind(model, nn.Module, "a torch module")
    modes = {module: module.training for module in model.modules()}
    with _without_fast_path(), without_autocast():
        model.eval()
        try:
            yield
        finally:
            for module, mode in modes.items():
                module.training = mode


@contextmanager
def without_autocast() -> Iterator[None]:
    """Compute in the types of the tensors, also inside of a caller's `torch.autocast`.

    A graph, an integer model and a file have no autocast: results compared with theirs, or
    computed as theirs, need the same types.

    Example:
        >>> with torch.autocast("cpu"), without_autocast():
        ...     (torch.ones(2, 2) @ torch.ones(2, 2)).dtype
        torch.float32
    """
    with ExitStack() as stack:
        for kind in ("cpu", "cuda"):
            if torch.is_autocast_enabled(kind):
                stack.enter_context(torch.autocast(kind, enabled=False))
        yield


_PATHS: list[bool] = []  # torch's setting before the first of the threads that are inside
_PATHS_LOCK = RLock()


@contextmanager
def _without_fast_path() -> Iterator[None]:
    mha = torch.backends.mha
    with _PATHS_LOCK:
        _PATHS.append(mha.get_fastpath_enabled() if not _PATHS else _PATHS[0])
        mha.set_fastpath_enabled(False)
    try:
        yield
    finally:
        with _PATHS_LOCK:
            before = _PATHS.pop()
            if not _PATHS:
                mha.set_fastpath_enabled(before)
