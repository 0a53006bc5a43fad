"""Whether two outputs are equal up to rounding, and up to the order of equal scores.

torch leaves the order of equal values open in ``topk`` and ``sort``, so a heat map with many empty
cells gives other indices in torch than in a correct file. During the comparison the model chooses
as ONNX does: of equal scores the one of lowest index. All other values stay torch's. A file with
any further difference still differs.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch.utils._python_dispatch import TorchDispatchMode

from bevquant_int8sim import program

HALF = 2.0**-6  # float16 functions
_ROUNDING = 2.0**-21  # float32 functions, in two runtimes
_NOTHING = 1e-4  # rounding errors of a normalised constant


def alike(want: NDArray[Any], got: NDArray[Any], tolerance: float) -> bool:
    """Whether two outputs differ by at most a share of the largest value, or by noise."""
    wanted, made = (torch.from_numpy(np.ascontiguousarray(value)) for value in (want, got))
    return program.alike(wanted, made, tolerance, _NOTHING)


_ATEN = torch.ops.aten


class StableChoices(TorchDispatchMode):
    """While it is active, ``topk``, ``sort`` and ``argsort`` take equal values by their index.

    Attributes:
        ties: How many such calls met equal values next to each other in their order.
        close: How many of them chose between values that are equal up to float32 rounding.
        called: Whether there were such calls; None before the first run of a program.

    Example:
        >>> with StableChoices() as choices:
        ...     torch.tensor([0.0, 1.0, 0.0, 0.0]).topk(3).indices.tolist()
        [1, 0, 2]
        >>> choices.ties
        1
    """

    def __init__(self) -> None:
        super().__init__()
        self.ties = self.close = 0
        self.called: bool | None = None

    @property
    def doubt(self) -> str:
        """Cause of results that differ from the file's, for an error message; empty without one."""
        if not self.close:
            return ""
        return (
            " (probably the order of scores that a topk or sort takes and that are equal up to "
            "float32 rounding: give example inputs with distinct scores)"
        )

    def notes(self) -> tuple[str, ...]:
        """Notes of a result: empty if no two scores were equal."""
        if not self.ties:
            return ()
        return (
            "choices among equal scores: the file takes the lowest index, torch's order is open; "
            "they were compared up to that",
        )

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        if func is _ATEN.topk.default:
            return self._topk(*args, **kwargs)
        if func is _ATEN.sort.default:
            return self._sort(*args, **kwargs)
        return func(*args, **kwargs)

    def _sort(
        self, x: Any, dim: int = -1, descending: bool = False, taken: int = 2**62
    ) -> tuple[Any, Any]:
        self.called = True
        values, order = _ATEN.sort.stable(x, stable=True, dim=dim, descending=descending)
        if x.dim():
            gaps = values.diff(dim=dim)
            self.ties += bool((gaps == 0).any())
            if x.is_floating_point():
                count = min(taken, gaps.shape[dim])
                gap, size = (part.narrow(dim, 0, count).abs() for part in (gaps, values))
                self.close += bool(((gap > 0) & (gap <= _ROUNDING * size)).any())
        return values, order

    def _topk(
        self, x: Any, k: int, dim: int = -1, largest: bool = True, sorted: bool = True
    ) -> tuple[Any, Any]:
        values, order = self._sort(x, dim, largest, k)
        if not x.dim():
            return values, order
        return values.narrow(dim, 0, k), order.narrow(dim, 0, k)
