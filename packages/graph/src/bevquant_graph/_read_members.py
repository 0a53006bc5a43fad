"""Which members a forward reads of the containers that it is given, and which it returns unread.

A loader's ``batch_dict`` has thirty members and a network reads five of them. Only these are inputs
of its graph; a call may have others, and need not have the rest.

One run of the forward on containers that note the keys that it asks for (`_watch`) finds them. A
module that is one node reads all that it gets.
"""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from ._own_inputs import own_inputs, twin
from ._quiet import evaluation
from ._signature import Arguments, Place, arguments, is_sparse_tensor, members_of, refilled
from ._watch import WATCHED, Watch, unnoted, watched_of, with_fields


@dataclass(frozen=True)
class ReadMembers:
    """Members of dictionaries and dataclasses that a forward reads, and those that it returns.

    Attributes:
        asked: Position of a container in ``(args, kwargs)`` to the keys that the forward asks for:
            those of the example in its order, then those that it lacks. Containers without an entry
            are read whole.
        handed: Containers of the arguments in the result: position in the result, position in the
            arguments, and the keys that the forward reads or writes. A call returns the other
            members unchanged.
    """

    asked: Mapping[Place, tuple[Any, ...]] = field(default_factory=dict)
    handed: tuple[tuple[Place, Place, tuple[Any, ...]], ...] = ()

    def required(self, given: Arguments) -> Arguments:
        """The arguments of a call without the members that the forward does not ask for.

        They are in new containers; fields of a dataclass become None. Arguments without other
        members are returned unchanged.
        """
        kept: Arguments = _kept(given, self.asked)
        return kept

    def required_inputs(self, inputs: Any) -> Any:
        """As `required`, for a tuple of positional inputs, a dict of named inputs, or one input."""
        return rearranged(self.required, inputs)

    def made(self, result: Any) -> Any:
        """A result without the members that are returned unchanged, in its order."""
        known = {
            place: [key for key in _keys(result, place) if key in keys]
            for place, _, keys in self.handed
        }
        return _kept(result, known)

    def handed_on(self, result: Any, given: Arguments) -> Any:
        """A result of `required` arguments with the other members of the call's arguments.

        Args:
            result: Its containers are changed.
            given: The arguments of the caller.
        """
        for place, source, keys in self.handed:
            container, own = at(result, place), _keys(given, source)
            unread = {key: value for key, value in own.items() if key not in keys}
            if isinstance(container, dict):
                order = [key for key in own if key in container or key in unread]
                merged = {**dict.fromkeys(order), **container, **unread}
                container.clear()
                container.update(merged)
            else:
                for key, value in unread.items():
                    object.__setattr__(container, key, value)
        return result

    def refuse_misplaced(self, signature: Any, result: Any) -> None:
        """Refuse positions that do not exist in a program, as a damaged file may contain.

        Args:
            signature: The arguments of a call, with dictionaries for dataclasses.
            result: The result of a call, likewise.

        Raises:
            ValueError: A position has no dictionary, or one with keys that nothing asks for.
        """
        handed = [(result, place, None) for place, _, _ in self.handed]
        handed += [(signature, place, None) for _, place, _ in self.handed]
        for value, place, keys in [*handed, *((signature, *entry) for entry in self.asked.items())]:
            try:
                found = at(value, place)
            except (LookupError, TypeError):
                found = None
            if not isinstance(found, dict) or (keys is not None and not found.keys() <= {*keys}):
                raise ValueError(f"members: {place!r} is no dictionary with such members")


def _keys(value: Any, place: Place) -> dict[Any, Any]:
    return members_of(at(value, place)) or {}


def at(value: Any, place: Place) -> Any:
    """The member at a place."""
    for key in place:
        value = (members_of(value) or {})[key]
    return value


def _kept(value: Any, kept: Mapping[Place, Collection[Any]], place: Place = ()) -> Any:
    """The value with these keys alone in the containers at these places."""
    if not any(known[: len(place)] == place for known in kept):
        return value
    keys = kept.get(place)
    old = members_of(value) or {}
    order = old if keys is None else [key for key in keys if key in old]
    # Fields that are left out become None (`with_members`): a dataclass needs all of them.
    return with_members(value, {key: _kept(old[key], kept, (*place, key)) for key in order})


def in_order(wanted: Any, given: Any) -> Any:
    """A value with the members of its dictionaries in the order of another value, at any depth.

    Members that only `given` has are last. A value in this order already is returned unchanged;
    other containers are new.

    Example:
        >>> in_order({"image": 1, "points": 2}, {"points": 3, "name": "x", "image": 4})
        {'image': 4, 'points': 3, 'name': 'x'}
    """
    theirs, own = members_of(wanted), members_of(given)
    if theirs is None or own is None:
        return given
    order = [*(key for key in theirs if key in own), *(key for key in own if key not in theirs)]
    return with_members(given, {key: in_order(theirs.get(key), own[key]) for key in order})


def rearranged(change: Callable[[Arguments], Arguments], inputs: Any) -> Any:
    """Inputs after a change of their arguments; unchanged where it changes nothing.

    Args:
        change: Returns the arguments themselves where they do not change.
        inputs: A tuple of positional inputs, a dict of named inputs, or one input.
    """
    given = arguments(inputs)
    made = change(given)
    return inputs if made is given else made[1] or made[0]


def with_members(value: Any, new: dict[Any, Any]) -> Any:
    """A container with these members in this order; itself where it has them."""
    old = members_of(value) or {}
    if [*new] == [*old] and all(new[key] is item for key, item in old.items()):
        return value
    if isinstance(value, list | tuple):
        return refilled(type(value), new.values())
    if not isinstance(value, Mapping):
        return with_fields(value, dict.fromkeys(old) | new)
    if type(value) not in WATCHED:
        return new
    made = copy.copy(value)
    made.clear()  # type: ignore[attr-defined]
    made.update(new)  # type: ignore[attr-defined]
    return made


def read_members(model: nn.Module, given: Arguments, whole: Collection[str] = ()) -> ReadMembers:
    """Run a model once; the members of its arguments that it reads, and hands on.

    Modules at the paths `whole` read all of the containers that they get. Without entries all
    members are read: where there are no containers with keys, or the run ends in an error.
    """
    watch = Watch()
    try:
        args, kwargs = watch(own_inputs(given), ())
        if not watch.notes:
            return ReadMembers()
        other = twin(model)
        for path in whole:
            module = other.get_submodule(path)
            module.register_forward_pre_hook(_read_whole, with_kwargs=True)
        with evaluation(other), torch.no_grad(), warnings.catch_warnings():
            warnings.simplefilter("ignore")  # as errors they would end the run
            result = other(*args, **kwargs)
        handed = tuple(_handed(result, (), frozenset()))
    except Exception:  # the trace meets it again, and says where
        return ReadMembers()
    notes = {place: note for note in watch.notes for place in note.places if not note.whole}
    asked = {
        place: tuple(dict.fromkeys(k for k in _keys(given, place) if k in note.asked) | note.asked)
        for place, note in notes.items()
        # What lies in a container that is not asked for is not required either.
        if all(place[n] in notes[place[:n]].asked for n in range(len(place)) if place[:n] in notes)
    }
    return ReadMembers(asked, handed)


def _read_whole(_: nn.Module, args: Any, kwargs: Any) -> None:
    pending, seen = [args, kwargs], set()
    while pending:
        value = pending.pop()
        # Containers may hold each other.
        if id(value) not in seen:
            seen.add(id(value))
            pending += unnoted(value).values()
            if watched := watched_of(value):
                watched.note.whole = True


def _handed(
    value: Any, place: Place, above: frozenset[int]
) -> Iterator[tuple[Place, Place, tuple[Any, ...]]]:
    """Containers of the arguments in a result that are not read whole."""
    if id(value) in above or is_sparse_tensor(value):
        return
    watched, items = watched_of(value), unnoted(value)
    if watched and not watched.note.whole:
        known = tuple(watched.note.asked | watched.written)
        items = {key: item for key, item in items.items() if key in known}
        yield place, watched.note.places[0], known
    for key, item in items.items():
        yield from _handed(item, (*place, key), above | {id(value)})
