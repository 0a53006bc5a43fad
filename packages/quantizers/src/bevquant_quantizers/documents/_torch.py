"""Checkpoints of torch.save, zip or legacy: tensors and plain containers, nothing executed."""

from __future__ import annotations

import io
import os
import pickle
import re
import warnings
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor

from ._json import DocumentError, a, read_content

__all__ = ["read_checkpoint"]

_CLASS = re.compile(r"GLOBAL ([\w.]+)")
_DEPTH = 100


def read_checkpoint(path: str | os.PathLike[str], what: str = "checkpoint") -> Any:
    """What `torch.save` wrote, on the CPU: tensors, numbers and texts in plain containers.

    Args:
        path: A `.pth` of either format.
        what: What it should be, for messages.

    Raises:
        DocumentError: It is missing, cut short, damaged, or holds objects of other classes, which
            are never loaded.
    """
    place = os.fspath(path)
    content = read_content(path, what)
    try:
        # From memory: a length that lies then ends at the end of the file, whatever it claims.
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            value = torch.load(io.BytesIO(content), map_location="cpu", weights_only=True)
        held = {
            tensor.untyped_storage().data_ptr(): tensor.untyped_storage().nbytes()
            for tensor in _tensors(value, 0)
            if tensor.layout == torch.strided
        }
    except Exception as error:  # whatever torch and pickle raise, it is no such file
        raise DocumentError(f"{place} cannot be read as {a(what)}: {_reason(error)}") from error
    if sum(held.values()) > len(content):
        raise DocumentError(
            f"{place} cannot be read as {a(what)}: its tensors take "
            f"{sum(held.values())} bytes, the file has {len(content)}: it is damaged"
        )
    return value


def _tensors(value: Any, depth: int) -> Iterator[Tensor]:
    if depth > _DEPTH:
        raise ValueError(f"nested more than {_DEPTH} levels deep")
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, Mapping):
        for item in value.values():
            yield from _tensors(item, depth + 1)
    elif isinstance(value, list | tuple):
        for item in value:
            yield from _tensors(item, depth + 1)


def _reason(error: Exception) -> str:
    """Why, in words of our own: torch's advise to switch its protection off."""
    found = _CLASS.search(str(error)) if isinstance(error, pickle.UnpicklingError) else None
    if found is not None:
        return (
            f"it holds an object of the class {found[1]}, a pickled model perhaps; only tensors, "
            "numbers and texts are loaded: save `model.state_dict()` and give that file"
        )
    return f"it is damaged, cut short or something else ({type(error).__name__})"
