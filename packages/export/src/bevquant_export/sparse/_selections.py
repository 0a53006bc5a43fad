"""Which channels of which tensor a value holds, whatever moved them: slices, chunks, shuffles.

What a move does is asked of the move itself: it runs on numbers that say where each value stood,
for two counts of voxels. Where rows of the result are the voxels as they were, and both counts
agree on its columns, it is a choice of channels.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, fx

from bevquant_int8sim import IntegerModel
from bevquant_int8sim.model import Step

_ROWS = (5, 11)
_ERRORS = (RuntimeError, IndexError, TypeError, ValueError, KeyError)


class Selections:
    """Values that hold channels of another one.

    Args:
        model: Whose program they are values of.
        constants: Its constants by name; may grow.
    """

    def __init__(self, model: IntegerModel, constants: dict[str, Tensor]) -> None:
        self.source, self.constants = model.source, constants
        self.makers = {name: step for step in model.program.steps for name in step.outputs}
        self._of: dict[str, tuple[str, int, tuple[Any, ...]]] = {}

    def __contains__(self, name: object) -> bool:
        return name in self._of

    def follow(self, step: Step) -> bool:
        """Note what a move makes; whether it keeps every voxel's values in its row."""
        name = getattr(step.args[0], "name", "") if step.args else ""
        if name in self._of:
            base, width, numbers = self._of[name]
        else:
            base, width = name, self._width(step)
            numbers = tuple(torch.arange(n * width).reshape(n, width) for n in _ROWS)
        if not width:
            return False
        try:
            made = tuple(
                self._moved(step, probe, rows) for probe, rows in zip(numbers, _ROWS, strict=True)
            )
        except _ERRORS:
            return False
        if isinstance(made[0], Tensor) and _columns(made, width) is None:
            return False
        self._of[step.outputs[0]] = base, width, made
        return True

    def channels(self, name: str) -> tuple[str, int, Tensor]:
        """The value that holds them, how many it has, and which: of any shape behind the rows."""
        base, width, numbers = self._of[name]
        columns = _columns(numbers, width)
        assert columns is not None
        return base, width, columns

    def is_matrix(self, name: str) -> bool:
        """Whether it is ``[voxels, channels]``."""
        first = self._of[name][2][0] if name in self._of else None
        return isinstance(first, Tensor) and first.dim() == 2

    def _moved(self, step: Step, numbers: Any, rows: int) -> Any:
        """What the move makes of a probe."""

        def read(argument: Any) -> Any:
            name = getattr(argument, "name", None)
            if not isinstance(name, str):
                return argument
            return rows if self._counts_rows(name) else self.constants[name]

        args: Any = fx.node.map_aggregate(step.args[1:], read)
        kwargs: Any = fx.node.map_aggregate(dict(step.kwargs), read)
        function: Any = step.function
        return function(numbers, *args, **kwargs)

    def _counts_rows(self, name: str) -> bool:
        step = self.makers.get(name)
        return step is not None and step.attributes.get("what") == "size" and step.args[1:] == (0,)

    def _width(self, step: Step) -> int:
        """Channels of what a move reads, of voxels; 0 where that is not known."""
        held = {} if self.source is None else self.source.held
        node = next((n for n, forms in held.items() if step.outputs[0] in forms.values()), None)
        before = node.args[0] if node is not None and node.args else None
        shape: Any = before.meta["val"].shape if isinstance(before, fx.Node) else ()
        if len(shape) != 2:
            return 0
        # An open size is that of the example: a file has one number of channels.
        width = getattr(getattr(shape[1], "node", None), "hint", shape[1])
        return int(width or 0)


def _columns(numbers: tuple[Tensor, ...], width: int) -> Tensor | None:
    """Columns of the original in each place behind the rows; None where rows are not the same."""
    found = []
    for made, rows in zip(numbers, _ROWS, strict=True):
        if made.dim() < 1 or made.shape[0] != rows:
            return None
        first = torch.arange(rows).reshape(-1, *(1,) * (made.dim() - 1)) * width
        columns = made - first
        if not bool((columns == columns[:1]).all()) or not bool(
            (made // width * width == first).all()
        ):
            return None
        found.append(columns[0])
    same = found[0].shape == found[1].shape and torch.equal(*found)
    return found[0] if same else None
