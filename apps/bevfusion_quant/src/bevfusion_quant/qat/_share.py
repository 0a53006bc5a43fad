"""The frames of a step shared by several processes, and their parts back in order."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from bevfusion_quant.qat._frame_part import FramePart
from bevfusion_quant.ranks import Ranks, current_ranks

__all__ = ["parts_in_order"]


def parts_in_order(
    count: int,
    part: Callable[[int], FramePart],
    ranks: Ranks | None = None,
    *,
    by_gpu: bool = False,
) -> Iterator[FramePart]:
    """The parts of a step's frames, from the first to the last, whoever runs them.

    Every rank runs one frame, then they exchange what they have: no more gradients are held than
    there are ranks. They travel as they are, so that sums in this order have the bits of one
    process.

    Args:
        count: Frames of the step.
        part: Runs one, given its place in the step.
        ranks: The processes; those of the launcher by default.
        by_gpu: Send parts from GPU to GPU, where each process has one.

    Example:
        >>> import torch
        >>> made = [FramePart(*torch.tensor([[i], [2.0 * i], [0.0]])) for i in range(3)]
        >>> [float(found.gradient) for found in parts_in_order(3, made.__getitem__)]
        [0.0, 2.0, 4.0]
    """
    ranks = current_ranks() if ranks is None else ranks
    if ranks.alone:
        for place in range(count):
            yield part(place)
        return
    for start in range(0, count, ranks.world):
        own = {}
        for i in ranks.mine(min(ranks.world, count - start)):
            found = part(start + i)
            own = {3 * i: found.losses, 3 * i + 1: found.gradient, 3 * i + 2: found.maxima}
        tensors = list(ranks.gather(own, by_gpu=by_gpu).values())
        for i in range(0, len(tensors), 3):
            yield FramePart(*tensors[i : i + 3])
