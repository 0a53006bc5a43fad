"""Runs of the integer model: sizes that a file states, and the result and voxels of each module."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from bevquant_int8sim import IntegerModel
from bevquant_int8sim.model import Geometry, Step

_STEP = 1000


@dataclass
class Seen:
    """Sizes and values of one step."""

    read: tuple[int, ...]  # Shape of its first input, in the example
    made: tuple[int, ...]  # Shape of its first output, in the example
    grid: tuple[int, ...] = ()  # Spatial shape of the input, for sparse convolutions
    out_grid: tuple[int, ...] = ()  # Spatial shape of the output
    # Largest number of output voxels of one frame, over all batches; for steps on rows, the
    # largest number over whole batches
    voxels: int = 0
    largest: float = 0.0  # Largest magnitude of its first input, over all batches; 0 for integers


def observe(model: IntegerModel, example: Any, batches: Iterable[Any]) -> dict[str, Seen]:
    """Sizes of each step by its first output; the example counts as a batch."""
    seen: dict[str, Seen] = {}

    def look(step: Step, given: tuple[Any, ...], made: tuple[Any, ...]) -> None:
        if not made or not given or not isinstance(made[0], Tensor):
            return
        if isinstance(given[0], list | tuple) and given[0]:  # of a concatenation
            given = (given[0][0], *given[1:])
        if not isinstance(given[0], Tensor):
            return
        name = step.outputs[0]
        if name not in seen:
            seen[name] = Seen(tuple(given[0].shape), tuple(made[0].shape))
            if step.called == "sparse_max_pool" or len(made) == 2:
                seen[name].grid = tuple(given[1].spatial_shape)
            if len(made) == 2:
                seen[name].out_grid = tuple(made[1].spatial_shape)
        if given[0].is_floating_point() and given[0].numel():
            seen[name].largest = max(seen[name].largest, float(given[0].abs().max()))
        if len(made) == 2:
            frames = torch.bincount(made[1].indices[:, 0].long())
            voxels = int(frames.max()) if len(frames) else 0
        else:
            voxels = len(made[0]) if made[0].dim() == 2 else 0
        seen[name].voxels = max(seen[name].voxels, voxels)

    model.run(example, record=False, observe=look)
    for inputs in batches:
        if not _same(inputs, example):
            model.run(inputs, record=False, observe=look)
    return seen


def _same(inputs: Any, example: Any) -> bool:
    """Whether inputs are the example's own tensors and numbers."""
    if not (isinstance(inputs, tuple) and isinstance(example, tuple)):
        return inputs is example
    return len(inputs) == len(example) and all(
        one is other or (type(one) is type(other) is int and one == other)
        for one, other in zip(inputs, example, strict=True)
    )


def bound(voxels: int, head_room: float) -> int:
    """``voxels · head_room``, rounded up to a thousand."""
    return max(1, math.ceil(voxels * head_room / _STEP)) * _STEP


@dataclass(frozen=True, eq=False)
class Sparse:
    """A tensor on voxels."""

    value: Tensor  # ``[rows, channels]``, integers or floats
    scale: float | None  # Value of a step; ``None`` for floats
    indices: Tensor  # ``[rows, 4]``


def reference_of(
    integers: IntegerModel, inputs: Any
) -> tuple[dict[str, list[Sparse]], Any, dict[str, Tensor]]:
    """Results at each module, result of the model, and voxels of values by name."""
    found: dict[str, list[Sparse]] = {}
    places: dict[str, Tensor] = {}
    waiting: dict[str, tuple[Step, Tensor]] = {}  # computed before any voxels are known

    def stands(name: str, indices: Tensor) -> None:
        """`name`, and the values with the same rows that it depends on, are on these voxels."""
        step, value = waiting.pop(name, (None, None))
        if step is None or value is None or len(value) != len(indices):
            return
        places[name] = indices
        found.setdefault(step.path, []).append(Sparse(value, _scale(integers, name), indices))
        for source in step.inputs:
            stands(source, indices)

    def see(step: Step, given: tuple[Any, ...], made: tuple[Any, ...]) -> None:
        if len(made) == 2 and hasattr(made[1], "indices"):
            places[step.outputs[0]] = made[1].indices
            if hasattr(given[1], "indices") and step.inputs:
                stands(step.inputs[0], given[1].indices)
        elif step.called in ("sparse_max_pool", "sparse_avg_pool"):
            _, coords, _, key, *geometry = given
            behind = coords.convolved(Geometry(*geometry), key, step.path)[1]
            places[step.outputs[0]] = behind.indices
        elif step.outputs:
            # Conversions and sums keep the rows of their inputs.
            known = [places[name] for name in step.inputs if name in places]
            parts = made[0] if isinstance(made[0], list | tuple) else made[:1]
            rows = [m.shape[:1] if isinstance(m, Tensor) else None for m in parts]
            if known and all(count == known[0].shape[:1] for count in rows):
                places[step.outputs[0]] = known[0]
        name = step.outputs[0]
        if name in places and isinstance(made[0], Tensor) and made[0].dim() == 2:
            found.setdefault(step.path, []).append(
                Sparse(made[0], _scale(integers, name), places[name])
            )
        elif made and isinstance(made[0], Tensor) and made[0].dim() == 2:
            waiting[name] = step, made[0]

    inputs = integers.program.members.required_inputs(inputs)
    result, _ = integers.run(inputs, record=False, observe=see)
    return found, result, places


def _scale(model: IntegerModel, name: str) -> float | None:
    form: Any = model.program.values[name].form
    return None if isinstance(form, str) else float(form.scale)
