"""Where a file begins: at the features of the voxels, whatever the forward makes these of."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from bevquant_int8sim.model import Step

__all__ = ["Beginning", "beginning", "is_float_conv"]


@dataclass(frozen=True, eq=False)
class Beginning:
    """The value that the first sparse convolution takes as features, and the steps that make it.

    Attributes:
        features: Its name; of integers that the convolution reads, what they are rounded from.
        steps: What the forward computes for it: means over the points of a voxel, a choice or an
            order of voxels, layers on points.
    """

    features: str
    steps: tuple[Step, ...]


def beginning(program: Any) -> Beginning | None:
    """How a program comes to the features of its voxels; None where they are an input."""
    makers = {name: step for step in program.steps for name in step.outputs}
    convs = (s for s in program.steps if s.op == "sparse_conv" or is_float_conv(s))
    first = next(convs, None)
    if first is None:
        return None
    name = first.args[0].name
    while name in makers and makers[name].op == "quantize":
        name = makers[name].args[0].name
    if name not in makers:
        return None
    pending, found = [name], set()
    while pending:
        step = makers.get(pending.pop())
        if step is not None and step.outputs not in found:
            found.add(step.outputs)
            pending += step.inputs
    return Beginning(name, tuple(step for step in program.steps if step.outputs in found))


def is_float_conv(step: Step) -> bool:
    """Whether a step is a sparse convolution that stays float."""
    return type(step.module).__name__ == "FloatSparseConv"
