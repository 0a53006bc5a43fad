"""What a model and the files about it are called."""

from __future__ import annotations

import re
from typing import Any

from torch import nn

__all__ = ["model_name"]


def model_name(caller: str, module: nn.Module, name: str | None = None) -> str:
    """The name given, or that of the class that the model had before it was traced or converted.

    Raises:
        ValueError: The name is none for a file.

    Example:
        >>> model_name("perf_model", nn.Sequential())
        'Sequential'
    """
    source: Any = getattr(module, "_source_name", None) or getattr(module, "original_name", None)
    name = name or str(source or type(module).__name__)
    if not re.fullmatch(r"\w[\w.-]*", name):
        raise ValueError(
            f"{caller}: name={name!r}: expected letters, digits, '_', '-' and '.', and no folder"
        )
    return name
