"""Shapes of elementwise operations, while a model is captured, straight from what they read.

With open sizes torch finds the shape of an activation or a batch norm by running what it is made
of: a dozen operations, each with its own checks of strides on symbols, half of a capture's time.
The answer is the operand's own shape, type and memory order. torch keeps a table of such short cuts
(for `add` and its like); these are entered there for as long as a capture lasts.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

import torch
from torch import Tensor
from torch._prims_common import is_contiguous_for_memory_format_or_false
from torch._subclasses.fake_impls import get_fast_op_impls
from torch._subclasses.fake_tensor import FakeTensor
from torch.fx.experimental.symbolic_shapes import free_unbacked_symbols

__all__ = ["batch_norm_of_rows", "elementwise_shapes"]

_ATEN = torch.ops.aten
# Of one tensor, the rest numbers; of floating point each gives the type that it reads.
_NAMES = (
    "abs clamp clamp_min clamp_max elu erf exp gelu hardsigmoid hardswish hardtanh leaky_relu log "
    "mish neg relu rsqrt sigmoid silu softplus sqrt tanh"
).split()
_BATCH_NORM = _ATEN._native_batch_norm_legit_no_training.default
_ROLL = _ATEN.roll.default
_FORMATS = (torch.contiguous_format, torch.channels_last)


@contextmanager
def elementwise_shapes() -> Iterator[None]:
    """For the length of the block the shapes of elementwise operations are found at once."""
    table: dict[Any, Any] = get_fast_op_impls()
    like = _Like()
    found: dict[Any, Any] = {_BATCH_NORM: _short(_BATCH_NORM, like.normed)}
    for name in _NAMES:
        for own, form in ((name, like), (f"{name}_", _itself)):
            target = getattr(getattr(_ATEN, own, None), "default", None)
            if target is not None:
                found[target] = _short(target, form)
    if hasattr(torch.ops.bevquant_quantizers, "fake_quantize"):
        target = torch.ops.bevquant_quantizers.fake_quantize.default
        found[target] = _short(target, like)
    found[_ROLL] = _short(_ROLL, like, whole=True)  # torch asks first whether there are rows
    with mock.patch.dict(table, found):
        yield


_batch_norm = torch.batch_norm


def batch_norm_of_rows(x: Tensor, *args: Any) -> Tensor:
    """A batch norm without torch's question whether there are rows, which a mask leaves open.

    `tidy` gives the operator its usual name.
    """
    weight, bias, mean, var, training, momentum, eps, _ = args
    if training or mean is None or not free_unbacked_symbols(x):
        return _batch_norm(x, *args)
    made: Tensor = _BATCH_NORM(x, weight, bias, mean, var, momentum, eps)[0]
    return made


def _short(target: Any, form: Callable[..., Any], *, whole: bool = False) -> Callable[..., Any]:
    """The table's entry: by `form` where it can tell, else as torch finds the shape itself.

    Of floating point, or of `whole` numbers too.
    """

    def entry(mode: Any, *args: Any, **kwargs: Any) -> Any:
        made = None
        if isinstance(args[0], Tensor) and (whole or args[0].is_floating_point()):
            made = form(mode, args[0])
        if made is None:
            with mock.patch.dict(get_fast_op_impls()), mode:
                del get_fast_op_impls()[target]
                return target(*args, **kwargs)
        return made

    return entry


class _Like:
    """Makes tensors of the shape, type and memory order of others."""

    def __init__(self) -> None:
        self._orders: dict[Any, torch.memory_format | None] = {}

    def __call__(self, mode: Any, x: Tensor) -> Tensor | None:
        """None where the memory of `x` has gaps."""
        order = self._order(x)
        if order is None:
            return None
        made = torch.empty(x.shape, dtype=x.dtype, device="meta", memory_format=order)
        return FakeTensor(mode, made, device=x.device)

    def normed(self, mode: Any, x: Tensor) -> tuple[Tensor, ...] | None:
        """What a batch norm gives: the map, and two statistics that fixed ones leave empty."""
        made = self(mode, x)
        if made is None:
            return None
        empty = [torch.empty(0, dtype=x.dtype, device="meta") for _ in range(2)]
        return made, *(FakeTensor(mode, statistic, device=x.device) for statistic in empty)

    def _order(self, x: Tensor) -> torch.memory_format | None:
        """How the values of `x` lie in memory; asked once for the same symbols."""
        sizes, strides = _terms(x.shape), _terms(x.stride())
        if _in_rows(sizes, strides):
            return torch.contiguous_format
        key = sizes, strides
        if key not in self._orders:
            orders = _FORMATS if x.dim() == 4 else _FORMATS[:1]
            lies = is_contiguous_for_memory_format_or_false
            found = (order for order in orders if lies(x, memory_format=order))
            self._orders[key] = next(found, None)
        return self._orders[key]


def _terms(sizes: Iterable[Any]) -> tuple[Any, ...]:
    """Sizes as numbers and terms of symbols, which compare without a question to torch."""
    return tuple(size.node._expr if isinstance(size, torch.SymInt) else size for size in sizes)


def _in_rows(sizes: tuple[Any, ...], strides: tuple[Any, ...]) -> bool:
    """Whether the strides are, term by term, those of values one behind the other."""
    step: Any = 1
    for size, stride in zip(reversed(sizes), reversed(strides), strict=True):
        if stride != step:
            return False
        step = step * size
    return True


def _itself(_: Any, x: Tensor) -> Tensor:
    return x
