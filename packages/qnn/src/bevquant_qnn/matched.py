"""Choices by value in a run of a model, given to another run; objects that both runs choose.

Float and integers order near-equal scores differently, so rows behind a top-k, a mask or a
suppression are of other objects. The second run takes the first one's choices.
"""

from __future__ import annotations

import sys
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable
from pathlib import Path
from types import FrameType
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_map

Matched = tuple[int, int, int]
"""Objects that both runs choose, and the number that each one chooses."""


def masks(own: Tensor, other: Tensor) -> Matched:
    """Of two masks of one shape.

    Example:
        >>> masks(torch.tensor([True, True, False]), torch.tensor([False, True, False]))
        (1, 2, 1)
    """
    return int((own & other).sum()), int(own.sum()), int(other.sum())


def places(own: Tensor, other: Tensor) -> Matched:
    """Of two results of `torch.nonzero`, int64 ``[objects, axes]``.

    Example:
        >>> places(torch.tensor([[0, 1], [2, 3]]), torch.tensor([[2, 3]]))
        (1, 2, 1)
    """
    rows = torch.cat([own, other]).unique(dim=0, return_counts=True)[1]
    return int((rows == 2).sum()), len(own), len(other)


def values(own: Tensor, other: Tensor) -> Matched:
    """Of two tensors with one index at each position, as of `torch.argmax`.

    Example:
        >>> values(torch.tensor([4, 7]), torch.tensor([4, 9]))
        (1, 2, 2)
    """
    return int((own == other).sum()), own.numel(), other.numel()


def lines(own: Tensor, other: Tensor, axis: int) -> Matched:
    """Of indices in any order along an axis, as of `torch.topk`; each line is counted by itself.

    Example:
        >>> lines(torch.tensor([[5, 2, 8]]), torch.tensor([[2, 5, 1]]), 1)
        (2, 3, 3)
    """
    own, other = own.movedim(axis, -1).sort(-1)[0], other.movedim(axis, -1).contiguous()
    place = torch.searchsorted(own, other).clamp_(max=max(own.shape[-1] - 1, 0))
    return int((own.take_along_dim(place, -1) == other).sum()), own.numel(), other.numel()


def fewest(counts: Iterable[Matched]) -> Matched:
    """The counts with the smallest share in common; a choice of no objects has all in common.

    Example:
        >>> fewest([(3, 4, 4), (1, 2, 2), (0, 0, 0)])
        (1, 2, 2)
    """
    return min(counts, key=lambda m: m[0] / max(m) if any(m) else 1.0)


_ATEN: Any = torch.ops.aten
_RANKS = frozenset((_ATEN.topk.default, _ATEN.sort.default, _ATEN.sort.stable))
_EXTREMES = frozenset(
    (_ATEN.max.dim, _ATEN.min.dim, _ATEN.kthvalue.default, _ATEN.median.dim, _ATEN.mode.default)
)
_ARGUMENTS = frozenset((_ATEN.argmax.default, _ATEN.argmin.default))
_MASKED = frozenset((_ATEN.index.Tensor, _ATEN.masked_select.default))
_KEPT = frozenset(("aten::nonzero", "torchvision::nms"))
_TORCH = str(Path(torch.__file__).parent)
_MODES = ("__torch_function__", "__torch_dispatch__")


class Choices(TorchDispatchMode):
    """Records a run's choices: indices of `topk`, `sort`, `argmax`, `nonzero`, and masks of rows.

    Indices of `max(dim)`, `min(dim)` and their likes are a choice where an operator reads them.

    Choices of Python code are recorded where they reach tensors: indices and masks made of lists
    or arrays, the number in ``x[i]``, and conditions (``if score > 0.3``). They belong to a line of
    code, as a quantized model has further ones.

    Args:
        leading: Choices of a run that is ahead. This run takes them in place of its own, so its
            rows are of the same objects.

    Attributes:
        made: The choices in order: of operators (""), and of each line of Python code.
        differ: Whether this run would have chosen other objects or another order.

    Example:
        >>> def best(scores):
        ...     return scores[sorted(range(3), key=scores.tolist().__getitem__)[-2:]]
        >>> with Choices() as ahead:
        ...     best(torch.tensor([0.50, 0.10, 0.51]))
        tensor([0.5000, 0.5100])
        >>> with Choices(ahead) as choices:  # of the same two objects, in the same order
        ...     best(torch.tensor([0.51, 0.10, 0.50]))
        tensor([0.5100, 0.5000])
        >>> choices.differ, choices.matched
        (True, (2, 2, 2))
    """

    def __init__(self, leading: Choices | None = None) -> None:
        super().__init__()
        self._leading = leading
        self.made: defaultdict[str, list[Any]] = defaultdict(list)
        self.differ = False
        self._fewest: list[Matched] = []
        self._orders: dict[int, tuple[Tensor, Tensor, int]] = {}  # also holds what the id is of
        # Indices of `max(dim)` and its likes. Many forwards read the values alone: no choice.
        self._extremes: dict[int, tuple[Tensor, list[Tensor]]] = {}
        self._numbers: defaultdict[str, list[int]] = defaultdict(list)
        self._other_numbers: set[str] = set()

    @property
    def matched(self) -> Matched | None:
        """The counts of the choice with the fewest objects in common; None before a choice."""
        found = list(self._fewest)
        for line in self._other_numbers:  # objects of a loop are counted together
            own, other = _objects(self._numbers[line]), _objects(self.made[line])
            found.append(((own & other).total(), own.total(), other.total()))
        return fewest(found) if found else None

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        """Run one operator, with the choice of the run ahead."""
        kwargs = kwargs or {}
        if self._extremes:
            args = tree_map(self._if_extreme, args)
        if func in _MASKED:
            return func(args[0], self._masks(args[1]), *args[2:], **kwargs)
        if func is _ATEN.select.int:
            x, axis, index = args
            return func(x, axis, self._number(index, x.shape[axis], "index"))
        made = func(*args, **kwargs)
        if func in _EXTREMES and args[0].is_floating_point():
            self._extremes[id(made[1])] = made[1], []
        if func is _ATEN._local_scalar_dense.default and isinstance(made, bool):
            return self._number(made, 2, "condition")
        if func is _ATEN.lift_fresh.default and made.dtype in (torch.int64, torch.bool):
            count = masks if made.dtype == torch.bool else places if made.dim() == 1 else values
            line = _line("list")
            return made if line is None else self._chosen(made, count, line)
        if func is _ATEN.slice.Tensor and id(args[0]) in self._orders:
            _, own, axis = self._orders[id(args[0])]  # the first ones of an order
            self._note_order(made, func(own, *args[1:]), axis)
        if func.name() in _KEPT and (args[0].dtype == torch.bool or len(args) > 1):
            return self._chosen(made, places)
        if not (func in _RANKS or func in _ARGUMENTS) or not args[0].is_floating_point():
            return made
        if func in _ARGUMENTS:
            return self._chosen(made, values)
        names = [argument.name for argument in func._schema.arguments]
        axis = (dict(zip(names, args, strict=False)) | kwargs).get("dim", -1)
        index = self._chosen(made[1], None)
        if index is made[1]:
            return made
        self._note_order(index, made[1], axis)
        return args[0].take_along_dim(index, axis), index

    def _if_extreme(self, value: Any) -> Any:
        """The value, or of an index of `max(dim)` that is read now the choice."""
        own, chosen = self._extremes.get(id(value), (None, []))
        if own is not None and not chosen:
            chosen.append(self._chosen(own, values))
        return value if own is None else chosen[0]

    def _masks(self, indices: Any) -> Any:
        if isinstance(indices, Tensor):
            return self._chosen(indices, masks)
        chosen = (isinstance(i, Tensor) and i.dtype == torch.bool for i in indices)
        pairs = zip(indices, chosen, strict=True)
        return [self._chosen(i, masks) if mask else i for i, mask in pairs]

    def _number(self, own: int, size: int, kind: str) -> int:
        """A number or condition of Python code, of `size` possible ones."""
        line = _line(kind)
        if line is None:
            return own
        other, chosen = self._ahead(line), own
        if isinstance(other, int) and -size <= other < size:
            chosen = other
            if own != other:
                self.differ = True
                self._other_numbers.add(line)
        self.made[line].append(chosen)
        self._numbers[line].append(own)
        return chosen

    def _ahead(self, line: str) -> Any:
        """The next choice of the run ahead, None where it has made no further one."""
        ahead = [] if self._leading is None else self._leading.made[line]
        number = len(self.made[line])
        return ahead[number] if number < len(ahead) else None

    def _chosen(
        self, own: Tensor, count: Callable[[Tensor, Tensor], Matched] | None, line: str = ""
    ) -> Tensor:
        """The run's own choice, or that of the run ahead; the latter is counted."""
        other, chosen = self._ahead(line), own
        first = int(count is places)  # as many rows as there are
        alike = isinstance(other, Tensor) and other.dtype == own.dtype
        if alike and other.shape[first:] == own.shape[first:]:
            chosen = other
            differs = not torch.equal(own, other)
            self.differ |= differs
            if count is not None and (differs or not line):
                self._count(count(own, other))
        self.made[line].append(chosen)
        return chosen

    def _note_order(self, chosen: Tensor, own: Tensor, axis: int) -> None:
        self._orders[id(chosen)] = chosen, own, axis
        self._count(lines(own, chosen, axis))

    def _count(self, counts: Matched) -> None:
        self._fewest = [fewest([*self._fewest, counts])]


def _objects(numbers: list[int]) -> Counter[int]:
    """Objects that numbers name; of conditions, those that hold, by their order."""
    return Counter(i if v is True else v for i, v in enumerate(numbers) if v is not False)


def _line(kind: str) -> str | None:
    """A kind of choice, file and line of the code that makes it; None for this library's own."""
    frame: FrameType | None = sys._getframe(2)
    # torch's functions and function modes lie between the code and the operator.
    while frame is not None and (
        frame.f_code.co_filename.startswith(_TORCH) or frame.f_code.co_name in _MODES
    ):
        frame = frame.f_back
    if frame is None:
        return None
    file, held = frame.f_code.co_filename, frame.f_globals
    # This library's questions, such as a quantizer's whether it is on, are others in each run.
    own = held.get("__name__", "").startswith("bevquant_") and held.get("__file__") == file
    return None if own else f"{kind} {file}:{frame.f_lineno}"
