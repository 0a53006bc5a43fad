"""All modules that cannot be followed are found in one trace.

If a module's forward ends in an error, the module becomes one node (`_opaque`) and the trace
continues after it. So the same trace finds all such modules. The graph comes from the next
trace, in which all of them are nodes from the start.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from functools import partial
from threading import Thread
from types import MethodType
from typing import Any
from unittest import mock

import torch
from torch import nn

from ._opaque import Opaque, Recorded, called_as_operator, forwards_replaced, recorded
from ._own_inputs import own_inputs
from ._quiet import evaluation
from ._signature import Arguments
from ._state import put_back
from ._tidy import SHELL


class TraceEnds(Exception):
    """The forward was followed to its end, and modules of it were closed on the way."""


class Closing:
    """Calls of modules of a model, as it is outside of the trace, that cannot be followed."""

    def __init__(self, model: nn.Module, given: Arguments) -> None:
        self._model, self._given = model, given
        self._recorded: dict[str, Recorded] = {}

    def opaque(self, path: str, reason: str) -> Opaque:
        """The module at `path` as one node; calls of all of its class are recorded once."""
        if path not in self._recorded:
            kind = type(self._model.get_submodule(path))
            alike = {
                other
                for other, module in self._model.named_modules()
                if type(module) is kind and not kind.__module__.startswith("torch.")
            }
            paths = (alike - self._recorded.keys()) | {path}
            self._recorded |= recorded(self._model, paths, self._run)
        return self._recorded[path].opaque(reason)

    def _run(self) -> None:
        args, kwargs = own_inputs(self._given)
        with put_back(self._model), evaluation(self._model), torch.no_grad():
            self._model(*args, **kwargs)

    @contextmanager
    def on_errors(
        self,
        traced: nn.Module,
        opaque: Mapping[str, Opaque],
        reason: Callable[[str, Exception], str],
    ) -> Iterator[dict[str, Opaque]]:
        """Context in which modules whose forwards end in an error become one node.

        `reason` gives the reason to close the module at a path after an error; with "" the error
        ends the trace. Yields the closed modules by path, filled during the block.
        """
        found: dict[str, Opaque] = {}
        calls: Counter[str] = Counter()
        modules = traced.named_modules()
        bound = {path for path, m in modules if getattr(m.forward, "__self__", None) is m}

        def forward(path: str, run: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
            place = calls[path]
            calls[path] += 1
            depth = len(_modules())
            try:
                return (_followed(run, path) if path in bound else run)(*args, **kwargs)
            except Exception as error:
                why = "" if isinstance(error, TraceEnds) else reason(path, error)
                if not why:
                    raise
                _leave(depth)
                entry = found.get(path)
                if entry is None:
                    entry = _outside_of_the_trace(partial(self.opaque, path, why))
                if entry is None or place >= len(entry.calls):
                    raise
                found[path] = entry
                return called_as_operator(entry.calls[place], args, kwargs)

        own = {
            path: partial(forward, path, module.forward)
            for path, module in traced.named_modules()
            if path
            and not any(f"{path}.".startswith(f"{other}.") for other in opaque)
            and not isinstance(module, torch.jit.ScriptModule)  # it is the model's own
        }
        with forwards_replaced(traced, own):
            yield found


def _outside_of_the_trace(make: Callable[[], Opaque]) -> Opaque | None:
    """Result of `make` in another thread, outside of the trace's modes. None on errors."""
    made: list[Opaque] = []

    def run() -> None:
        with suppress(Exception):  # the next trace meets it again, and says where
            made.append(make())

    thread = Thread(target=run)
    with (
        mock.patch.object(torch.compiler, "_is_exporting_flag", False),
        mock.patch.object(torch.compiler, "_is_compiling_flag", False),
    ):
        thread.start()
        thread.join()
    return next(iter(made), None)


def _modules() -> dict[str, Any]:
    """The modules whose forwards the trace is in."""
    from torch.fx.experimental.proxy_tensor import get_proxy_mode  # and sympy

    mode = get_proxy_mode()
    return {} if mode is None else getattr(mode.tracer, "module_stack", {})


def _followed(run: Any, path: str) -> Callable[..., Any]:
    """A module's forward on torch's stand-in for the module, which gives the children paths."""
    from torch.fx.experimental.proxy_tensor import get_proxy_mode  # and sympy

    tracer: Any = getattr(get_proxy_mode(), "tracer", None)
    module = getattr(run, "__self__", None)
    if not hasattr(tracer, "proxy_type") or not isinstance(module, nn.Module):
        return run  # type: ignore[no-any-return]
    # Without the stand-in a quantizer in a layer in a module has no path.
    return MethodType(run.__func__, tracer.proxy_type(module, f"{SHELL}.{path}"))


def _leave(depth: int) -> None:
    """Leave the forwards that an error ended, which torch takes for running."""
    while len(_modules()) > depth:
        _modules().popitem()
