"""Convolutions that were run before with the same operands: checked, packed and laid out once.

A network calls each of its layers with the same weight, bias, multiplier and settings, and with
inputs of one shape or of one number of channels. Only their places in memory, or their rows, are
new.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from threading import Lock
from typing import Any

from torch import Tensor
from torch.utils.weak import WeakTensorKeyDictionary

# Values derived from a weight alone, computed once while the weight is unchanged.

_known: WeakTensorKeyDictionary = WeakTensorKeyDictionary()
_lock = Lock()


def remembered(weight: Tensor, what: Hashable, make: Callable[[], Any]) -> Any:
    """``make()``, or its earlier result for this tensor if the tensor was not written to since."""
    if weight.is_inference():
        return make()  # its writes are not counted
    version = weight._version
    with _lock:
        # A result that refers to the tensor, or is a view of it, would keep it alive.
        kept: Any = _known.get(weight)
        if kept is None or kept[0] != version:
            kept = _known[weight] = (version, {})
        if what in kept[1]:
            return kept[1][what]
    made = make()
    with _lock:
        kept[1][what] = made
    return made


_SHAPES = 8  # that a weight's calls are kept for

Prepared = Callable[..., Tensor]


Run = tuple[Prepared, tuple[Any, ...], Tensor]
"""What ran, on which inputs, and what it made."""

_watching: ContextVar[list[Run] | None] = ContextVar("_watching", default=None)


@contextmanager
def watched() -> Iterator[list[Run]]:
    """See in a list which calls were run again."""
    runs: list[Run] = []
    token = _watching.set(runs)
    try:
        yield runs
    finally:
        _watching.reset(token)


def layouts(*inputs: Tensor | None) -> Hashable:
    """Common properties of inputs that one prepared call serves."""
    if not all(isinstance(x, Tensor | None) for x in inputs):
        return None  # which the checks refuse
    return tuple(None if t is None else (t.shape, t.stride(), t.dtype, t.device) for t in inputs)


class Memo:
    """What is kept of a call.

    Args:
        inputs: What other inputs have in common that are served alike; ``None`` keeps nothing.
        weight: What is kept lives as long as it does, unchanged.
        bias: Known again only as this very tensor, unchanged; so is `multiplier`.
        multiplier: A tensor, a number or ``None``.
        settings: Everything else that the result depends on.

    Attributes:
        prepared: What `run` runs again, also on another input; ``None`` the first time.
    """

    def __init__(
        self,
        inputs: Hashable,
        weight: Tensor,
        bias: Tensor | None,
        multiplier: Tensor | float | None,
        settings: tuple[Any, ...],
    ) -> None:
        self._held, self._settings = (bias, multiplier), settings
        self._kept: dict[Hashable, tuple[Any, Any, Prepared]] | None = None
        self.prepared: Prepared | None = None
        if inputs is None or not isinstance(weight, Tensor):
            return
        operands: list[Any] = []
        versions: list[int] = []
        for operand in self._held:
            if isinstance(operand, Tensor):
                if operand.is_inference():
                    return  # its writes are not counted
                # What is kept holds the tensors, so that no other one gets their number.
                operands.append(id(operand))
                versions.append(operand._version)
            else:
                operands.append(operand)
        if weight.is_inference():
            return
        self._versions = versions
        self._key: Hashable = (inputs, *operands, settings)
        kept = remembered(weight, "prepared", dict)
        try:
            entry = kept.get(self._key)
        except TypeError:
            settings = without_lists(settings)
            self._key = (inputs, *operands, settings)
            try:
                entry = kept.get(self._key)
            except TypeError:
                return  # not what a call is made of; whoever checks it says so
        self._kept = kept
        if entry is not None and entry[1] == self._versions:
            self.prepared = entry[2]

    def run(self, *inputs: Any) -> Tensor:
        """Run it again."""
        assert self.prepared is not None
        made = self.prepared(*inputs)
        runs = _watching.get()
        if runs is not None:
            runs.append((self.prepared, inputs, made))
        return made

    def keep(self, prepared: Prepared) -> None:
        """Store the function that repeats the call; it must not refer to the weight."""
        if self._kept is None or any(isinstance(setting, Tensor) for setting in self._settings):
            return  # writes to numbers that are tensors are not counted
        if len(self._kept) >= _SHAPES:
            self._kept.clear()
        self._kept[self._key] = (self._held, self._versions, prepared)


def without_lists(value: Any) -> Any:
    """The value with tuples for lists, which have no hash."""
    if isinstance(value, list | tuple):
        return tuple(without_lists(item) for item in value)
    return value
