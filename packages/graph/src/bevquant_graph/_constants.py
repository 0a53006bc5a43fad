"""What a forward asks of the numbers that its model holds: these are no matter of the frame.

``if self.enabled``, ``int(self.grid[0])``, ``range(self.steps)`` of buffers and parameters decide
as they stand. torch's exporter takes them for values of a frame, stops at a branch on them, and
makes a requirement of every number taken out. Here whoever asks is told the number; what is
computed from such tensors alone is computed beside.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.fx.node import map_aggregate
from torch.nn.parameter import is_lazy
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import _disable_current_modes

_LARGEST = 1 << 12  # elements of a tensor that is computed beside
_CONVERSIONS = ("__bool__", "__int__", "__float__", "__index__", "item", "tolist")
_COMPUTED = frozenset(
    "__getitem__ select unbind __iter__ squeeze unsqueeze view reshape flatten to long int float "
    "double bool type clone detach neg __neg__ abs round floor ceil clamp clip sqrt exp log "
    "add __add__ __radd__ sub __sub__ __rsub__ mul __mul__ __rmul__ div __truediv__ __rtruediv__ "
    "floor_divide __floordiv__ remainder __mod__ pow __pow__ eq __eq__ ne __ne__ lt __lt__ le "
    "__le__ gt __gt__ ge __ge__ logical_and __and__ logical_or __or__ logical_not __invert__ "
    "any all sum prod max min amax amin mean".split()
)
_SIZED = frozenset("zeros ones empty full arange linspace".split())
_NAMED = _COMPUTED | _SIZED | frozenset(_CONVERSIONS)
_OPERATORS = "add sub mul truediv floordiv mod pow and or xor lshift rshift".split()
_WRITES = frozenset(["__setitem__", *(f"__i{name}__" for name in _OPERATORS)])


class Constants(TorchFunctionMode):
    """Entered within a forward that is traced; tells what its model's small tensors hold.

    Args:
        model: As it is outside of the trace.

    Attributes:
        used: Whether anybody has asked: the graph is then that of these numbers.
        written: Whether the forward writes to one of them, which the next frame then finds changed.
    """

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self._real = {name: value.detach() for name, value in _tensors(model)}
        self._known: dict[int, tuple[Tensor, Tensor]] = {}  # also holds what the id is of
        self.used = self.written = False

    def withdraw(self) -> None:
        """Answer nobody from now on."""
        self._real.clear()
        self.used = self.written = False

    def begin(self, model: nn.Module) -> Constants:
        """The tensors that stand for the model's in the trace."""
        found = {name: value for name, value in _tensors(model) if name in self._real}
        self._known = {id(value): (value, self._real[name]) for name, value in found.items()}
        return self

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        name = getattr(func, "__name__", "")
        if name == "__get__" and getattr(func, "__self__", None) is Tensor.data:
            func, name = Tensor.detach, "detach"  # torch loses track of what ``x.data`` gives
        writes = name in _WRITES or name[-1:] == "_" != name[-2:-1] or "out" in kwargs
        if not writes and name not in _NAMED:
            return func(*args, **kwargs)
        leaves: list[Any] = []
        map_aggregate((args, kwargs), leaves.append)
        given = [value for value in leaves if isinstance(value, Tensor)]
        known = [id(value) in self._known for value in given]
        if any(known) and name in _SIZED:
            self.used = True
            with _disable_current_modes():
                args, kwargs = map_aggregate((args, kwargs), self._number)
            return func(*args, **kwargs)
        if known and all(known) and name in _CONVERSIONS:
            self.used = True
            return self._beside(func, args, kwargs)
        made = func(*args, **kwargs)
        if writes:
            self._forget([made] if isinstance(made, Tensor) else given)
        elif known and all(known) and name in _COMPUTED and not any(map(_is_open, leaves)):
            self._note(made, self._beside(func, args, kwargs))
        return made

    def _forget(self, written: list[Tensor]) -> None:
        """No number is known any more, if one lies where something was written."""
        memory = {value.untyped_storage()._cdata for value in written}
        if any(value.untyped_storage()._cdata in memory for value, _ in self._known.values()):
            self.written = True
            self._known.clear()

    def _note(self, made: Any, real: Any) -> None:
        if isinstance(made, Tensor):
            self._known[id(made)] = made, real
        elif isinstance(made, list | tuple):
            for one, other in zip(made, real, strict=True):
                self._note(one, other)

    def _beside(self, func: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        """What a function makes of what the tensors hold."""
        held: Any = map_aggregate((args, kwargs), self._held)
        with _disable_current_modes():
            return func(*held[0], **held[1])

    def _held(self, value: Any) -> Any:
        return self._known[id(value)][1] if id(value) in self._known else value

    def _number(self, value: Any) -> Any:
        return self._held(value).item() if id(value) in self._known else value


def _tensors(model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    for name, value in (
        *model.named_parameters(remove_duplicate=False),
        *model.named_buffers(remove_duplicate=False),
    ):
        if not is_lazy(value) and value.numel() <= _LARGEST:
            yield name, value


def _is_open(value: Any) -> bool:
    return isinstance(value, torch.SymInt | torch.SymFloat | torch.SymBool)
