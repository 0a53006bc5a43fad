"""What one frame adds to a step, and the sum over a step's frames."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass

from torch import Tensor

from bevfusion_quant.ranks import Ranks, current_ranks


@dataclass(frozen=True, eq=False)
class FramePart:
    """One frame, one forward, one backward; on the CPU.

    Attributes:
        losses: float64 [terms].
        gradient: float32 [parameters], of all of them one behind the other.
        maxima: float32 [quantizers], the largest |value| that each quantizer of an activation
            saw; 0 where it saw none. Empty where ranges do not follow.
    """

    losses: Tensor
    gradient: Tensor
    maxima: Tensor


@dataclass(frozen=True, eq=False)
class StepSum:
    """Of a step's frames.

    Attributes:
        losses: float64 [terms], the mean.
        gradient: float32 [parameters], the mean.
        maxima: Each frame's.
    """

    losses: Tensor
    gradient: Tensor
    maxima: tuple[Tensor, ...]


def add_up(parts: Iterable[FramePart]) -> StepSum:
    """The mean gradient (g₀ + g₁ + …)/n, added in float32 from the first frame to the last.

    The order alone decides the bits: whoever made a frame's part, and wherever, the sum is the
    same. Frames are taken one by one, so that a generator holds one gradient and the sum.

    Raises:
        ValueError: No frames.

    Example:
        >>> import torch
        >>> from bevfusion_quant.qat import FramePart, add_up
        >>> one = FramePart(torch.tensor([2.0]), torch.tensor([1.0, 4.0]), torch.tensor([]))
        >>> two = FramePart(torch.tensor([4.0]), torch.tensor([3.0, 0.0]), torch.tensor([]))
        >>> add_up([one, two]).gradient
        tensor([2., 2.])
    """
    losses = gradient = None
    maxima = []
    for part in parts:
        losses = part.losses.clone() if losses is None else losses.add_(part.losses)
        gradient = part.gradient.clone() if gradient is None else gradient.add_(part.gradient)
        maxima.append(part.maxima)
    if losses is None or gradient is None:
        raise ValueError("add_up: there are no frames to add up")
    return StepSum(losses / len(maxima), gradient / len(maxima), tuple(maxima))


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
