"""Several frames as one example: members that differ between them are inputs of the graph.

The example is the first frame. Floats and numpy arrays that differ in a further frame are marked by
their class (`VaryingFloat`, `VaryingInt`, `VaryingArray`). The mark changes nothing for a forward;
`capture` does not make them constants.
"""

from __future__ import annotations

import inspect
from typing import Any

import numpy as np
from torch import Tensor, nn

from ._arrays import FLOATS
from ._attributes import same_constant
from ._faults import CaptureError
from ._read_members import at, read_members, with_members
from ._signature import Arguments, Place, is_sparse_tensor, members_of, place_name


class VaryingFloat(float):
    """A float that is another one in another frame."""


class VaryingInt(int):
    """An integer that is another one in another frame."""


class VaryingArray(np.ndarray):
    """A numpy array with other values in another frame."""


VARYING = VaryingFloat, VaryingInt, VaryingArray


def is_input(value: Any) -> bool:
    """Whether a value other than a tensor is an input of a graph, judged by the value alone.

    These are arrays of floats, as a camera's matrix, and members that vary between frames.
    """
    if isinstance(value, VaryingFloat | VaryingArray):
        return True
    return isinstance(value, np.ndarray) and value.dtype.name in FLOATS


def frames_of(model: nn.Module, batch: Any) -> list[Arguments] | None:
    """The frames of an example that is a list of several; None for every other example.

    Frames are dicts whose keys are the forward's parameters, or tuples of positional inputs with
    the same classes.
    """
    if not isinstance(batch, list) or len(batch) < 2 or len({type(f) for f in batch}) > 1:
        return None
    try:
        parameters = inspect.signature(model.forward).parameters.values()
    except (AttributeError, TypeError, ValueError):
        return None
    named = {p.name for p in parameters if p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY)}
    plain = [p for p in parameters if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)]
    required = {p.name for p in plain if p.default is p.empty}
    first = batch[0]
    if isinstance(first, dict):
        fits = all(required <= frame.keys() <= named for frame in batch)
        return [((), dict(frame)) for frame in batch] if fits and first else None
    if not isinstance(first, tuple) or not len(required) <= len(first) <= len(plain):
        return None
    alike = all([*map(type, frame)] == [*map(type, first)] for frame in batch)
    return [(frame, {}) for frame in batch] if alike else None


def one_example(model: nn.Module, frames: list[Arguments]) -> Arguments:
    """The first frame, in which members that differ in another frame are marked."""
    differing: dict[Place, str] = {}
    made: Arguments = _merged(frames, (), differing)
    # Members that the forward does not read may differ.
    if differing:
        required = read_members(model, made).required(made)
        read = {place: text for place, text in differing.items() if _has(required, place)}
        if read:
            named = "; ".join(f"{place_name(model, place)}: {t}" for place, t in read.items())
            raise CaptureError(
                f"capture: {type(model).__name__} reads members that differ between the example "
                f"frames and can be no inputs of a graph: {named}. Capture each form of a frame "
                "alone, or keep these members out of the forward",
                named,
            )
    return made


def _has(value: Any, place: Place) -> bool:
    try:
        at(value, place)
    except LookupError:
        return False
    return True


def _merged(values: list[Any], place: Place, differing: dict[Place, str]) -> Any:
    first = values[0]
    if isinstance(first, Tensor) or is_sparse_tensor(first):
        odd = [v for v in values if type(v) is not type(first)]
        differing |= {place: f"{_short(first)} and {_short(odd[0])}"} if odd else {}
        return first
    members = [members_of(value) for value in values]
    if members[0] is not None:
        keys = [*members[0]]
        other = [m for m in members if m is None or m.keys() != members[0].keys()]
        if other:
            differing[place] = f"members {keys} and {None if other[0] is None else [*other[0]]}"
            return first
        own: list[dict[Any, Any]] = [m for m in members if m is not None]
        made = {key: _merged([m[key] for m in own], (*place, key), differing) for key in keys}
        return with_members(first, made)
    other = next((value for value in values if not _same(first, value)), first)
    if other is first:
        return first
    marked = _marked(first, values)
    if marked is None:
        differing[place] = f"{_short(first)} and {_short(other)}"
    return first if marked is None else marked


def _same(one: Any, other: Any) -> bool:
    if isinstance(one, np.ndarray) and isinstance(other, np.ndarray):
        return one.shape == other.shape and same_constant(one, other)
    return same_constant(one, other)


def _marked(first: Any, values: list[Any]) -> Any:
    """The value as one that varies; None where it can be no input."""
    if isinstance(first, np.ndarray):
        alike = all(
            isinstance(v, np.ndarray) and (v.shape, v.dtype) == (first.shape, first.dtype)
            for v in values
        )
        return first.view(VaryingArray) if alike and first.dtype.kind in "fiu" else None
    if any(isinstance(v, bool) or not isinstance(v, int | float | np.number) for v in values):
        return None
    whole = all(isinstance(v, int | np.integer) for v in values)
    return VaryingInt(first) if whole else VaryingFloat(first)


def _short(value: Any) -> str:
    if isinstance(value, np.ndarray):
        return f"an array of {value.dtype} {value.shape}"
    return type(value).__name__ if isinstance(value, Tensor) else repr(value)[:60]
