"""Frames that are made when they are run, by the process that runs them, and then forgotten."""

from __future__ import annotations

import ctypes
import gc
import logging
from collections.abc import Iterator
from functools import cached_property
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from torch import nn

    from bevfusion.model import Batch
    from bevfusion_quant.frames import FrameBatches

__all__ = ["Late", "TakenLate", "run_late"]

LOG = logging.getLogger(__name__)


class Late:
    """One frame, made at its first use.

    Args:
        batches: All of them.
        index: Which one.
        told: Say so.
    """

    def __init__(self, batches: FrameBatches, index: int, *, told: bool) -> None:
        self._batches, self._index, self._told = batches, index, told
        self.used = False

    @cached_property
    def batch(self) -> Batch:
        """What the model is called with."""
        if self._told:
            LOG.info("frame %d of %d", self._index + 1, len(self._batches))
        self.used = True
        return self._batches[self._index]


class TakenLate:
    """The frames, any number of times, with memory given back after each.

    Args:
        batches: All of them.
        told: Say of each when it is run.
    """

    def __init__(self, batches: FrameBatches, *, told: bool = True) -> None:
        self._batches, self._told = batches, told

    def __iter__(self) -> Iterator[Late]:
        for index in range(len(self._batches)):
            late = Late(self._batches, index, told=self._told)
            yield late
            if late.used:
                del late
                _return_freed_memory()


def run_late(model: nn.Module, late: Any) -> Any:
    """What the model makes of the frame."""
    return model(*late.batch)


def _return_freed_memory() -> None:
    """Give back what a frame's recorded run held: in pieces of other sizes it is of no use.

    glibc keeps freed blocks, and frames with other numbers of voxels do not fit into them: memory
    would grow from frame to frame.
    """
    gc.collect()
    try:
        ctypes.CDLL(None).malloc_trim(0)
    except (OSError, AttributeError, TypeError):  # another C library, or none that can be asked
        return
