"""Which arithmetic runs: chosen explicitly, checked before it is trusted, reported."""

from __future__ import annotations

import importlib
import logging
from dataclasses import dataclass
from threading import RLock
from typing import Any

import torch

from bevquant_int8sim._matmul import matmul_method

logger = logging.getLogger(__name__)
_COMPILED = ("amx", "vnni", "portable")
_BACKENDS = ("auto", *_COMPILED, "torch")
_SMALL = 1 << 14  # values; below, loading numba is not worth it


def compiled_module(name: str, values: int) -> Any:
    """That module of `_compiled`; None without numba, or for too few values to load it for."""
    if values < _SMALL:
        return None
    try:
        package = importlib.import_module("bevquant_int8sim._compiled")
        return importlib.import_module(f"{package.__name__}.{name}")
    except ImportError:
        return None


@dataclass(frozen=True)
class BackendStatus:
    """Whether a backend can be used on this machine.

    Attributes:
        name: ``"amx"``, ``"vnni"``, ``"portable"`` or ``"torch"``.
        available: The backend runs here and passed its self-test with saturating operands.
        detail: Instructions or products that it uses, or the reason why it cannot be used.
    """

    name: str
    available: bool
    detail: str


def backend_report(*names: str) -> tuple[BackendStatus, ...]:
    """Try every backend on this machine, in the order of preference of ``backend="auto"``.

    Args:
        *names: Backends to try (default: all). Their kernels are compiled on first use.

    Raises:
        ValueError: There is no backend of that name.

    Example:
        >>> [status.name for status in backend_report() if status.name == "torch"]
        ['torch']
    """
    for name in names:
        if name not in _BACKENDS[1:]:
            raise ValueError(
                f"backend_report: {name!r}: expected some of {', '.join(_BACKENDS[1:])}"
            )
    return tuple(_status(name) for name in _BACKENDS[1:] if not names or name in names)


def usable_backend(backend: str) -> BackendStatus:
    """Return the backend that a name stands for with int8 on this CPU, after a trial.

    Args:
        backend: A name as for models and layers; ``"auto"`` is the fastest that is exact here.

    Raises:
        ValueError: The backend cannot be used here; the message gives the reason.

    Example:
        >>> usable_backend("torch").available
        True
    """
    name = backend
    if backend == "auto":
        name = choose_backend(backend, torch.device("cpu"), torch.int8, "usable_backend")
    if name not in _BACKENDS:
        raise ValueError(f"{backend} cannot be used here: it is unknown")
    status = _status(name)
    if not status.available:
        raise ValueError(f"{backend} cannot be used here: {status.detail}")
    return status


def _torch_status() -> BackendStatus:
    devices = ["cpu", *(["cuda"] if torch.cuda.is_available() else [])]
    methods = [
        f"{device}: int8 by {matmul_method(device, 'torch.int8')}, int16 by "
        f"{matmul_method(device, 'torch.int16')}"
        for device in devices
    ]
    return BackendStatus("torch", True, "; ".join(methods))


_known: dict[str, BackendStatus] = {}
_trying = RLock()


def _status(kind: str) -> BackendStatus:
    """What was found; one thread tries a backend, others wait for it."""
    if kind not in _known:
        with _trying:
            # Another thread may have tried it meanwhile.
            if kind not in _known:
                _known[kind] = _tried(kind)
    return _known[kind]


def _tried(kind: str) -> BackendStatus:
    if kind == "torch":
        return _torch_status()
    try:
        dot_product = importlib.import_module("bevquant_int8sim._compiled.dot_product")
        self_test = importlib.import_module("bevquant_int8sim._compiled.self_test")
    except ImportError as error:
        return BackendStatus(kind, False, f"needs numba: pip install numba ({error})")
    instructions = dot_product.instruction_set(kind)
    if instructions is None:
        return BackendStatus(kind, False, f"this CPU has no {kind.upper()} instructions")
    if kind == "amx":
        if not _status("vnni").available:
            return BackendStatus(kind, False, "needs vnni for layers that whole tiles do not fit")
        if (reason := self_test.amx_refusal()) is not None:
            logger.warning("AMX cannot be used on this machine: %s", reason)
            return BackendStatus(kind, False, f"{instructions}: {reason}")
    variants = ("portable", "portable16") if kind == "portable" else (kind,)
    if not all(self_test.kernels_are_exact(variant) for variant in variants):
        logger.warning("the %s kernels fail their self-test on this machine", kind)
        return BackendStatus(kind, False, f"{instructions}: wrong results in the self-test")
    return BackendStatus(kind, True, instructions)


def check_backend(backend: str, name: str) -> str:
    """Return `backend`, or refuse a name that is none; whether it runs here is another matter."""
    if backend not in _BACKENDS:
        raise ValueError(f"{name}: backend={backend!r}: expected one of {', '.join(_BACKENDS)}")
    return backend


def choose_backend(backend: str, device: torch.device, dtype: torch.dtype, name: str) -> str:
    """The backend that `backend` means for inputs on `device` of type `dtype`.

    Raises:
        ValueError: An unknown backend, or one that cannot run this here; `name` is the layer.
    """
    check_backend(backend, name)
    for kind in _COMPILED:
        if backend not in ("auto", kind):
            continue
        reason = _refusal(kind, device, dtype)
        if reason is None:
            return kind
        if backend == kind:
            raise ValueError(
                f"{name}: backend={kind!r} cannot be used: {reason}; use backend='auto'"
            )
    return "torch"


def _refusal(kind: str, device: torch.device, dtype: torch.dtype) -> str | None:
    if device.type != "cpu":
        return f"it runs on a CPU, the inputs are on {device}"
    if kind in ("amx", "vnni") and dtype != torch.int8:
        return f"its instructions multiply int8, the inputs are {dtype}"
    status = _status(kind)
    return None if status.available else status.detail
