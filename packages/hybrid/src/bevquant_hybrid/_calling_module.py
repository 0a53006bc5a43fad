"""Which module computes, for messages of code that modules call."""

from __future__ import annotations

import sys
from types import FrameType

from torch import nn

__all__ = ["calling_module"]


def calling_module() -> str:
    """Path and class of the innermost module whose method is running, or an empty text.

    The path is that below the outermost such module, the model that was called. It walks the
    stack: for failures only.
    """
    inner: nn.Module | None = None
    outer: nn.Module | None = None
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        owner = frame.f_locals.get("self")
        wraps = type(owner).__module__.startswith("torch.jit")  # while a model is traced
        if isinstance(owner, nn.Module) and not wraps:
            inner = owner if inner is None else inner
            outer = owner
        frame = frame.f_back
    if inner is None or outer is None:
        return ""
    paths = (path for path, module in outer.named_modules() if module is inner and path)
    path = next(paths, "")
    kind = type(inner).__name__
    return f"{path} ({kind})" if path else kind
