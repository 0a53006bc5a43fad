"""Choices by value in a run of a model, such as a top-k; another run may be given them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from bevquant_qnn import matched
from bevquant_qnn.matched import Matched

_ATEN: Any = torch.ops.aten
_RANKS = frozenset((_ATEN.topk.default, _ATEN.sort.default, _ATEN.sort.stable))
_ARGUMENTS = frozenset((_ATEN.argmax.default, _ATEN.argmin.default))
_MASKED = frozenset((_ATEN.index.Tensor, _ATEN.masked_select.default))


class Choices(TorchDispatchMode):
    """Records a run's choices: indices of `topk`, `sort`, `argmax`, `nonzero`, and masks of rows.

    Args:
        leading: Choices of a run that is ahead. This run takes them in place of its own, so its
            rows are of the same objects.

    Attributes:
        made: The choices, in order.
        differ: Whether this run would have chosen other objects or another order.
        matched: The counts of the choice with the fewest objects in common; None before a choice.
    """

    def __init__(self, leading: Choices | None = None) -> None:
        super().__init__()
        self._leading = leading
        self.made: list[Tensor] = []
        self.differ = False
        self.matched: Matched | None = None
        self._orders: dict[int, tuple[Tensor, Tensor, int]] = {}  # also holds what the id is of

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        """Run one operator, with the choice of the run ahead."""
        kwargs = kwargs or {}
        if func in _MASKED:
            return func(args[0], self._masks(args[1]), *args[2:], **kwargs)
        made = func(*args, **kwargs)
        if func is _ATEN.slice.Tensor and id(args[0]) in self._orders:
            _, own, axis = self._orders[id(args[0])]  # the first ones of an order
            self._note_order(made, func(own, *args[1:]), axis)
        if func is _ATEN.nonzero.default and args[0].dtype == torch.bool:
            return self._chosen(made, matched.places)
        if not (func in _RANKS or func in _ARGUMENTS) or not args[0].is_floating_point():
            return made
        if func in _ARGUMENTS:
            return self._chosen(made, matched.values)
        names = [argument.name for argument in func._schema.arguments]
        axis = (dict(zip(names, args, strict=False)) | kwargs).get("dim", -1)
        index = self._chosen(made[1], None)
        if index is made[1]:
            return made
        self._note_order(index, made[1], axis)
        return args[0].take_along_dim(index, axis), index

    def _masks(self, indices: Any) -> Any:
        if isinstance(indices, Tensor):
            return self._chosen(indices, matched.masks)
        masks = (isinstance(i, Tensor) and i.dtype == torch.bool for i in indices)
        pairs = zip(indices, masks, strict=True)
        return [self._chosen(i, matched.masks) if mask else i for i, mask in pairs]

    def _chosen(self, own: Tensor, count: Callable[[Tensor, Tensor], Matched] | None) -> Tensor:
        """The run's own choice, or that of the run ahead; the latter is counted."""
        number, chosen = len(self.made), own
        if self._leading is not None and number < len(self._leading.made):
            other = self._leading.made[number]
            first = int(count is matched.places)  # as many rows as there are
            if other.dtype == own.dtype and other.shape[first:] == own.shape[first:]:
                chosen = other
                self.differ |= not torch.equal(own, other)
                if count is not None:
                    self._count(count(own, other))
        self.made.append(chosen)
        return chosen

    def _note_order(self, chosen: Tensor, own: Tensor, axis: int) -> None:
        self._orders[id(chosen)] = chosen, own, axis
        self._count(matched.lines(own, chosen, axis))

    def _count(self, counts: Matched) -> None:
        self.matched = matched.fewest([counts] if self.matched is None else [self.matched, counts])
