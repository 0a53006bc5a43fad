"""Results of the integer model at each module, with the voxels of their rows."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from torch import Tensor

from bevquant_int8sim import IntegerModel
from bevquant_int8sim.model import Geometry, Step


@dataclass(frozen=True, eq=False)
class Made:
    """A tensor on voxels.

    Attributes:
        value: ``[rows, channels]``, integers or floats.
        scale: Value of a step; ``None`` for floats.
        indices: ``[rows, 4]``.
    """

    value: Tensor
    scale: float | None
    indices: Tensor


def reference_of(
    integers: IntegerModel, inputs: Any
) -> tuple[dict[str, list[Made]], Any, dict[str, Tensor]]:
    """Results at each module, result of the model, and voxels of values by name."""
    found: dict[str, list[Made]] = {}
    places: dict[str, Tensor] = {}
    waiting: dict[str, tuple[Step, Tensor]] = {}  # computed before any voxels are known

    def stands(name: str, indices: Tensor) -> None:
        """`name`, and the values with the same rows that it depends on, are on these voxels."""
        step, value = waiting.pop(name, (None, None))
        if step is None or value is None or len(value) != len(indices):
            return
        places[name] = indices
        found.setdefault(step.path, []).append(Made(value, _scale(integers, name), indices))
        for source in step.inputs:
            stands(source, indices)

    def see(step: Step, given: tuple[Any, ...], made: tuple[Any, ...]) -> None:
        if len(made) == 2 and hasattr(made[1], "indices"):
            places[step.outputs[0]] = made[1].indices
            if hasattr(given[1], "indices") and step.inputs:
                stands(step.inputs[0], given[1].indices)
        elif step.attributes.get("what") in ("sparse_max_pool", "sparse_avg_pool"):
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
                Made(made[0], _scale(integers, name), places[name])
            )
        elif made and isinstance(made[0], Tensor) and made[0].dim() == 2:
            waiting[name] = step, made[0]

    inputs = integers.program.members.required_inputs(inputs)
    result, _ = integers.run(inputs, record=False, observe=see)
    return found, result, places


def _scale(model: IntegerModel, name: str) -> float | None:
    form: Any = model.program.values[name].form
    return None if isinstance(form, str) else float(form.scale)
