"""Operations between layers, which portable files hold as functions.

Operators without a form in the dialect are collected. When a layer or a result consumes them, all
steps back to the previous layers and their voxels become one function node. Its features are on the
voxels of a layer, or on coordinates that the same steps compute.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

from bevquant_export.sparse._beginning import (
    REMEDY,
    Beginning,
    beginning,
    is_float_conv,
    is_unfollowed,
    location,
    no_operator,
)
from bevquant_export.sparse._follow import Draft, Followed, Follower, Reading, named
from bevquant_export.sparse._steps import Between
from bevquant_graph import leaves, op_spec
from bevquant_int8sim import IntegerModel
from bevquant_int8sim.program import Constant, Coordinates, NumberCall, Quantize, SparseConv, Step

_POOL = "sparse_max_pool"


def follow(model: IntegerModel, *, extended: bool = True) -> Followed:
    """Read every step as an operator; conversions become the forms that consumers need.

    Where the forward computes the features of its voxels (a mean over points, reordered voxels)
    with operators that the dialect does not have, the file begins after these. If `extended`,
    operators that libspconv does not have may become functions.
    """
    try:
        return _in_dialect(model)
    except ValueError:
        if not extended:
            raise
    try:
        return _FollowerBetween(model, None).run()
    except ValueError:
        begins = beginning(model.program)
        if begins is None:
            raise
    return _FollowerBetween(model, begins).run()


def _in_dialect(model: IntegerModel) -> Followed:
    begins = beginning(model.program)
    whole = Follower(model, None)
    try:
        found = whole.run()
    except ValueError:
        pools = whole.at is not None and whole.at.called == _POOL
        if begins is None or pools or all(step is not whole.at for step in begins.steps):
            raise
        found = Follower(model, begins).run()
    if sum(isinstance(step, Coordinates) for step in model.program.steps) > 1:
        follower = _FollowerBetween(model, begins)
        with suppress(ValueError):
            follower.run()
        for draft in follower.drafts:
            if draft.between is not None and draft.between.coords:
                maker = follower.makers[draft.between.coords]
                raise no_operator(maker, f"{named(maker)}{location(model.source, maker)}")
    return found


@dataclass
class _Closure:
    """The steps and inputs that values depend on."""

    steps: set[str] = field(default_factory=set)  # The steps, by their first output
    tensors: dict[str, None] = field(default_factory=dict)  # Results of layers that they read
    # Coordinates that they read, and a tensor on these voxels
    places: dict[str, str] = field(default_factory=dict)
    given: set[str] = field(default_factory=set)  # Inputs of the program
    frames: bool = False  # Whether a step depends on the number of frames


class _FollowerBetween(Follower):
    portable = True

    def __init__(self, model: IntegerModel, begins: Beginning | None) -> None:
        super().__init__(model, begins)
        self.makers = {name: step for step in self.program.steps for name in step.outputs}
        self.loose: dict[str, Step] = {}  # values computed between layers
        self.causes: dict[str, Step] = {}  # of these, the step without an operator
        self.lies: dict[str, str] = {}  # coordinates to a tensor on them
        self.places: dict[str, str] = {}  # coordinates to a tensor on them
        self.coordinates = ""  # of the current consumer
        # Numbers that the forward counts with, as in range(batch_size), are constants here.
        made = [step for step in self.program.steps if isinstance(step, Coordinates)]
        self.one_batch = any(isinstance(step.args[2], int) for step in made)
        self.returned = dict(sparse_results(self.program.result))
        self.pooled: dict[tuple[str, tuple[Any, ...]], list[str]] = {}  # of coordinates and window
        for step in self.program.steps:
            if step.called == "convolved_coords":
                self.pooled.setdefault((step.args[0].name, step.args[1:]), []).append(
                    step.outputs[0]
                )

    def _step(self, step: Step) -> None:
        what, made = step.called, step.outputs
        if isinstance(step, NumberCall):
            coordinates = getattr(step.args[0], "name", "") if step.args else ""
            if what == "getattr" and step.args[1] == "indices" and coordinates in self.lies:
                self.places[made[0]] = self.lies[coordinates]
        elif isinstance(step, SparseConv) or is_float_conv(step) or what == _POOL:
            self.coordinates = step.args[1].name
            if what == _POOL:
                self._draft("pool", step, 1)
                _, coordinates, _, *settings = step.args
                # None where no layer and no result reads the pool's coordinates.
                for name in self.pooled.get((coordinates.name, tuple(settings)), ()):
                    self.lies[name] = made[0]
            else:
                super()._step(step)
                self.lies[made[1]] = made[0]
            self._note_given(self.coordinates)
            self.coordinates = ""
        elif what == "to_dense":
            self.coordinates = step.args[1].name  # its indices stand for their voxels
            if self.coordinates not in self.places:
                super()._unfollowed(step)
            self.lies[self.coordinates] = self.places[self.coordinates]
            super()._step(step)
            self.coordinates = ""
        elif isinstance(step, Coordinates | Constant) or self._reads_map(step):
            super()._step(step)
        elif any(self._is_loose(name) or name in self.of_coords for name in step.inputs):
            self._note(step)
        else:
            super()._step(step)

    def _is_loose(self, name: str) -> bool:
        return name in self.loose and name not in self.holds

    def _unfollowed(self, step: Step) -> None:
        if self._reads_map(step):
            super()._unfollowed(step)
        self._note(step)

    def _note(self, step: Step) -> None:
        if is_unfollowed(step):
            super()._unfollowed(step)
        cause = next((self.causes[name] for name in step.inputs if name in self.causes), step)
        for name in step.outputs:
            self.loose[name], self.causes[name] = step, cause

    def _note_given(self, coordinates: str) -> None:
        """Coordinates of the input are the file's coordinates."""
        maker = self.makers.get(coordinates)
        if coordinates in self.lies or (maker is not None and not isinstance(maker, Coordinates)):
            return
        self.lies[coordinates] = self.input
        name = maker.args[0].name if maker is not None else ""
        while name:
            self.places[name] = self.input
            step = self.makers.get(name)
            spec = op_spec(step.called) if step is not None else None
            same = spec is not None and (spec.casts or spec.kind == "identity")
            name = getattr(step.args[0], "name", "") if step is not None and same else ""

    def _makes(self, coordinates: str) -> Step | None:
        """The step that creates voxels from coordinates that the forward computes."""
        step = self.makers.get(coordinates)
        if coordinates in self.lies or not isinstance(step, Coordinates):
            return None
        coords = step.args[0].name
        if coords in self.places:
            self.lies[coordinates] = self.places[coords]
            return None
        closure = self._closure(coords)
        return step if closure.tensors or closure.places else None

    def _operand(self, arg: Any, step: Step) -> Reading:
        made = self._makes(self.coordinates)
        return super()._operand(arg, step) if made is None else self._placed(arg.name, made, step)

    def _result(self, name: str) -> Reading:
        self.coordinates = self.returned.get(name, "")
        made = self._makes(self.coordinates)
        return super()._result(name) if made is None else self._placed(name, made, None)

    def _placed(self, name: str, coordinates: Step, reader: Step | None) -> Reading:
        """Features on voxels that the forward creates."""
        by = "the model's result" if reader is None else named(reader)
        form, value, relu = self.program.values[name].form, name, False
        while isinstance(maker := self.makers.get(value), Quantize):
            relu = relu or maker.relu
            value = maker.args[0].name
        y = value if value not in self.holds else f"{value} on {coordinates.outputs[0]}"
        if all(draft.y != y for draft in self.drafts):
            grid = coordinates.args[1]
            if not all(isinstance(size, int) for size in grid):
                raise ValueError(
                    f"export_sparse_onnx: {self._where(by)} stands on voxels of a grid that is "
                    f"computed from values, which a file fixes. {REMEDY}"
                )
            coords = coordinates.args[0].name
            self._between(value, y, by, coords, tuple(grid))
            if y == value:  # its consumers, or those of its coordinates, add the steps
                self.holds[value], self.holds[name] = (y, False), (y, relu)
                self.lies[coordinates.outputs[0]] = self.places[coords] = y
        return Reading(y, relu, form, by)

    def _tensor(self, name: str, by: str) -> tuple[str, bool]:
        if self._is_loose(name):
            step = self.loose[name]
            if isinstance(step, Quantize):
                tensor, relu = self._tensor(step.args[0].name, by)
                self.holds[name] = tensor, relu or step.relu
            else:
                self._between(name, name, by, "", ())
                self.holds[name] = name, False
        return super()._tensor(name, by)

    def _between(self, value: str, y: str, by: str, coords: str, grid: tuple[int, ...]) -> None:
        """One operator for all steps between the last layers and a value."""
        if not self.input:
            raise ValueError(f"export_sparse_onnx: {by} reads what is made before any layer")
        step = self.makers[value]
        found = self._closure(value, *([coords] if coords else []))
        if found.given:
            raise ValueError(
                f"export_sparse_onnx: {named(step)}{location(self.source, step)} reads "
                f"{', '.join(sorted(found.given))} beside the voxels, and a file has one input, "
                f"the features of the voxels. {REMEDY}"
            )
        reads = tuple(
            self._read(self.rounded.get(name, name), named(step)) for name in found.tensors
        )
        between = Between(
            frozenset(found.steps), tuple(found.tensors), found.places, value, coords, grid,
            self.lies.get(self.coordinates, ""), found.frames or self.one_batch,
            self.causes.get(value, step),
        )  # fmt: skip
        self.drafts.append(Draft("steps", step, reads, y, between=between))

    def _closure(self, *names: str) -> _Closure:
        found, pending, seen = _Closure(), list(names), set[str]()
        while pending:
            name = pending.pop()
            if name in seen or name in self.constants:
                continue
            seen.add(name)
            step = self.makers.get(name)
            if name in self.places:
                found.places[name] = self.places[name]
            elif name in self.holds or name == self.input:
                if self.holds[name][0] in self.dense:
                    super()._unfollowed(self.makers[name])
                found.tensors[name] = None
            elif step is None and not self._is_tensor(name):
                found.frames = True  # a number among the inputs
            elif step is None or name in self.left_out:
                found.given.add(name)
            elif isinstance(step, NumberCall) and step.name == "getattr":
                found.frames |= step.args[1] == "batch_size"
            elif isinstance(step, SparseConv | Coordinates):
                where = f"{named(step)}{location(self.source, step)}"
                raise no_operator(step, where, portable=True)
            else:
                if not isinstance(step, NumberCall):
                    found.steps.add(step.outputs[0])
                pending += step.inputs
        return found


def sparse_results(value: Any) -> Iterator[tuple[str, str]]:
    """Features and coordinates of every returned sparse tensor."""
    return ((leaf.features, leaf.coords) for leaf in leaves(value) if hasattr(leaf, "coords"))
