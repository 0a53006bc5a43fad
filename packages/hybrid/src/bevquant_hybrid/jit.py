"""Traced models: saved and loaded with this package's version, moved to a device."""

from __future__ import annotations

import io
import os
import warnings
from typing import IO, Any

import torch

from bevquant_graph import file_path

# Registers the operators that traced models call.
from bevquant_hybrid import _integer_ops as _integer_ops
from bevquant_hybrid._version import __version__

__all__ = ["load", "save", "to_device"]

_VERSION = "bevquant_hybrid_version"

File = str | os.PathLike[str] | IO[bytes]


def save(m: torch.jit.ScriptModule, f: File, _extra_files: dict[str, Any] | None = None) -> None:
    """Save a traced model as `torch.jit.save` does, with the version of this package.

    Args:
        m: Result of `torch.jit.trace` on a converted model.
        f: File name, or a file open for writing in binary.
        _extra_files: Names and contents of further files to save.

    Raises:
        TypeError: No traced model.

    Example:
        >>> import io, warnings
        >>> warnings.simplefilter("ignore")  # torch's, of torch.jit itself
        >>> traced, file = torch.jit.trace(torch.nn.ReLU(), torch.ones(1)), io.BytesIO()
        >>> save(traced, file)
        >>> _ = file.seek(0)
        >>> load(file)(torch.tensor([-1.0]))
        tensor([0.])
    """
    if not isinstance(m, torch.jit.ScriptModule):
        raise TypeError(
            f"jit.save: m is a {type(m).__name__}: expected what torch.jit.trace returns"
        )
    extra = dict(_extra_files or {}) | {_VERSION: __version__}
    with _without_deprecation():
        torch.jit.save(m, f, _extra_files=extra)


def load(
    f: File,
    map_location: str | torch.device | None = None,
    _extra_files: dict[str, Any] | None = None,
) -> torch.jit.ScriptModule:
    """Load a model that `save` saved; the operators it calls are registered.

    Args:
        f: File name, or a file open for reading in binary.
        map_location: Device that the tensors go to.
        _extra_files: Names of further saved files; their contents are filled in.

    Warns:
        UserWarning: The file has no version of this package, or another one.
    """
    if not hasattr(f, "read"):
        file_path(f, "saved model")
    wanted = _extra_files if _extra_files is not None else {}
    extra: dict[str, Any] = {**wanted, _VERSION: ""}
    with _without_deprecation():
        loaded: torch.jit.ScriptModule = torch.jit.load(
            f, map_location=map_location, _extra_files=extra
        )
    found = extra.pop(_VERSION)
    found = found.decode() if isinstance(found, bytes) else found
    if found != __version__:
        saved = f"version {found} of bevquant_hybrid" if found else "torch.jit.save"
        warnings.warn(
            f"jit.load: {f} was saved by {saved}, and this is version "
            f"{__version__}; trace the model again if its outputs differ",
            stacklevel=2,
        )
    wanted.update(extra)
    return loaded


def to_device(m: torch.jit.ScriptModule, device: str | torch.device) -> torch.jit.ScriptModule:
    """Return a copy of a traced model on a device, including the constants of its graph.

    Args:
        m: Result of `torch.jit.trace`; not changed.
        device: Device of the copy.

    Raises:
        TypeError: No traced model.

    Example:
        >>> import warnings
        >>> warnings.simplefilter("ignore")  # torch's, of torch.jit itself
        >>> traced = torch.jit.trace(lambda x: x + torch.ones(1), torch.ones(1))
        >>> to_device(traced, "cpu")(torch.ones(1))
        tensor([2.])
    """
    if not isinstance(m, torch.jit.ScriptModule | torch.jit.ScriptFunction):
        raise TypeError(
            f"jit.to_device: m is a {type(m).__name__}: expected what torch.jit.trace returns"
        )
    buffer = io.BytesIO()
    with _without_deprecation():
        torch.jit.save(m, buffer)
        buffer.seek(0)
        moved: torch.jit.ScriptModule = torch.jit.load(buffer, map_location=torch.device(device))
    return moved


def _without_deprecation() -> warnings.catch_warnings[None]:
    """Silence torch's deprecation warning of torch.jit, which the caller chose."""
    return warnings.catch_warnings(action="ignore", category=DeprecationWarning)
