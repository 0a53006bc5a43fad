"""``len(x)`` of a tensor in a model's code, while it is exported: a size that stays open."""

from __future__ import annotations

import builtins
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from types import ModuleType
from typing import Any

import torch
from torch import Tensor, nn

from ._faults import is_authors

__all__ = ["open_lengths"]

_OTHERS = frozenset(("torch", "builtins"))


@contextmanager
def open_lengths(model: nn.Module) -> Iterator[None]:
    """Let the code around a model's forwards count rows as ``x.shape[0]`` does.

    Python demands a plain integer of ``len``, which fixes the number of voxels to the example's,
    and cannot be had of what ``torch.unique`` or a mask leaves over. So the name has another
    meaning meanwhile in the packages of the model's classes and in files of no library.
    """
    classes = {base for module in model.modules() for base in type(module).__mro__}
    packages = {cls.__module__.partition(".")[0] for cls in classes} - _OTHERS
    found = [
        vars(module)
        for name, module in list(sys.modules.items())
        if isinstance(module, ModuleType)
        and "len" not in vars(module)
        and (name.partition(".")[0] in packages or is_authors(vars(module).get("__file__") or "<>"))
    ]
    scopes = list({id(scope): scope for scope in found}.values())  # a module may have two names
    for scope in scopes:
        scope["len"] = _length
    try:
        yield
    finally:
        for scope in scopes:
            del scope["len"]


def _length(value: Any, /) -> Any:
    if isinstance(value, Tensor) and value.dim() and isinstance(value.shape[0], torch.SymInt):
        return value.shape[0]
    return builtins.len(value)  # this module's name may be one of those
