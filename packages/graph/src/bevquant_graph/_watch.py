"""Dictionaries and dataclasses that note which of their members a forward asks for.

A key that the forward has written is its own. A look at a whole container (``len(d)``, ``dict(d)``,
``{**d}``, a loop) reads all of it.
"""

from __future__ import annotations

import copy
import types
from collections import OrderedDict, defaultdict
from collections.abc import ItemsView, KeysView, Mapping, ValuesView
from dataclasses import dataclass, field, fields, is_dataclass
from typing import Any

from torch import nn

from ._signature import Place, is_sparse_tensor, members_of, refilled


@dataclass
class _Note:
    """Keys that a forward reads from a container of its arguments, or from a copy."""

    places: list[Place]
    asked: dict[Any, None] = field(default_factory=dict)
    # Whether all of it is read.
    whole: bool = False


@dataclass
class _Watched:
    """A container that notes its requested keys."""

    note: _Note
    # Keys that the forward wrote or deleted; later reads are of its own values.
    written: dict[Any, None] = field(default_factory=dict)

    def ask(self, key: Any) -> None:
        """A key is read, or asked for."""
        if key not in self.written:
            self.note.asked[key] = None


def watched_of(value: Any) -> _Watched | None:
    """A container's record; None for all others."""
    held = value if isinstance(value, _Watching) else type(value)
    found: _Watched | None = vars(held).get("_watched")
    return found


def unnoted(value: Any) -> dict[Any, Any]:
    """The members of a container, without a note."""
    if isinstance(value, _Watching):
        return dict(dict.items(value))
    if watched_of(value):
        return {f.name: object.__getattribute__(value, f.name) for f in fields(value)}
    return members_of(value) or {}


def with_fields(value: Any, held: Mapping[str, Any]) -> Any:
    """A copy of a dataclass, frozen or not, with other members."""
    made = copy.copy(value)
    for name, item in held.items():
        object.__setattr__(made, name, item)
    return made


class Watch:
    """Makes containers that note in the place of others; of the same container the same one."""

    def __init__(self) -> None:
        self.notes: list[_Note] = []
        self._made: dict[int, Any] = {}

    def __call__(self, value: Any, place: Place) -> Any:
        if id(value) in self._made:
            made = self._made[id(value)]
            watched = watched_of(made)
            assert watched is not None
            watched.note.places.append(place)
        elif type(value) in WATCHED:
            made = self._made[id(value)] = WATCHED[type(value)]()
            made._watched = self._new(place)
            if isinstance(value, defaultdict):
                made.default_factory = value.default_factory
            # Without a note.
            for key, item in value.items():
                type(value).__setitem__(made, key, self(item, (*place, key)))
        elif isinstance(value, list | tuple):
            made = refilled(type(value), [self(v, (*place, k)) for k, v in enumerate(value)])
        elif is_dataclass(value) and not isinstance(value, type | nn.Module | Mapping):
            made = value
            if not is_sparse_tensor(value):
                members = {
                    key: self(item, (*place, key))
                    for key, item in (members_of(value) or {}).items()
                }
                made = self._made[id(value)] = with_fields(value, members)
                # The dataclass may be frozen; `isinstance` still finds its class.
                object.__setattr__(made, "__class__", _watching(type(value), self._new(place)))
        else:
            made = value
        return made

    def _new(self, place: Place) -> _Watched:
        self.notes.append(_Note([place]))
        return _Watched(self.notes[-1])


class _Watching(dict[Any, Any]):
    """A dictionary that notes its requested keys.

    Python's own code always reads through these methods: a dictionary with an ``__iter__`` of its
    own is copied and merged by them.
    """

    _watched: _Watched | None = None  # of one that the forward makes: nothing to note

    def _ask(self, key: Any) -> None:
        if self._watched:
            self._watched.ask(key)

    def _write(self, key: Any) -> None:
        if self._watched:
            self._watched.written[key] = None

    def __getitem__(self, key: Any) -> Any:
        self._ask(key)
        return super().__getitem__(key)

    def __contains__(self, key: Any) -> bool:
        self._ask(key)
        return super().__contains__(key)

    def get(self, key: Any, default: Any = None) -> Any:
        """As of a dictionary."""
        self._ask(key)
        return super().get(key, default)

    def __setitem__(self, key: Any, value: Any) -> None:
        self._write(key)
        super().__setitem__(key, value)

    def __delitem__(self, key: Any) -> None:
        self._ask(key)
        self._write(key)
        super().__delitem__(key)

    def pop(self, key: Any, *default: Any) -> Any:
        """As of a dictionary."""
        self._ask(key)
        self._write(key)
        return super().pop(key, *default)

    def setdefault(self, key: Any, default: Any = None) -> Any:
        """As of a dictionary."""
        if key not in self:
            self[key] = default
        return self[key]

    def update(self, *args: Any, **kwargs: Any) -> None:
        """As of a dictionary."""
        for key, value in dict(*args, **kwargs).items():
            self[key] = value

    def __ior__(self, other: Any) -> Any:  # type: ignore[misc]
        self.update(other)
        return self

    def copy(self) -> Any:
        """A dictionary that notes at the same place."""
        made: Any = type(self)()
        if isinstance(self, defaultdict):
            made.default_factory = self.default_factory
        for key, value in unnoted(self).items():
            super(_Watching, made).__setitem__(key, value)
        if self._watched:
            made._watched = _Watched(self._watched.note, dict(self._watched.written))
        return made

    __copy__ = copy

    def keys(self) -> KeysView[Any]:  # type: ignore[override]
        """As of a dictionary."""
        return KeysView(self)

    def values(self) -> ValuesView[Any]:  # type: ignore[override]
        """As of a dictionary."""
        return ValuesView(self)

    def items(self) -> ItemsView[Any, Any]:  # type: ignore[override]
        """As of a dictionary."""
        return ItemsView(self)


def _whole(name: str) -> Any:
    """A method that reads all of a dictionary."""

    def method(self: Any, *args: Any, **kwargs: Any) -> Any:
        if self._watched:
            self._watched.note.whole = True
        return getattr(super(_Watching, self), name)(*args, **kwargs)

    return method


for _name in (
    "__iter__ __len__ __reversed__ __eq__ __ne__ __repr__ __or__ __ror__ __reduce_ex__ "
    "clear popitem move_to_end"
).split():
    setattr(_Watching, _name, _whole(_name))


class _OrderedDict(_Watching, OrderedDict[Any, Any]):  # type: ignore[misc]
    pass


class _DefaultDict(_Watching, defaultdict[Any, Any]):
    pass


WATCHED: dict[type, Any] = {dict: _Watching, OrderedDict: _OrderedDict, defaultdict: _DefaultDict}


def _watching(kind: type, watched: _Watched) -> type:
    """A class of a dataclass's objects that notes which fields are asked for."""
    names = {f.name for f in fields(kind)}
    base: Any = kind

    def read(self: Any, name: str) -> Any:
        if name in names:
            watched.ask(name)
        elif name in ("__dict__", "__getstate__", "__reduce_ex__"):
            watched.note.whole = True
        return base.__getattribute__(self, name)

    def write(self: Any, name: str, value: Any) -> None:
        watched.written[name] = None
        base.__setattr__(self, name, value)

    def fill(members: dict[str, Any]) -> None:
        # Without slots the class has another memory layout, and no object can change to it.
        members |= {"__slots__": (), "__module__": kind.__module__, "_watched": watched}
        members |= {"__getattribute__": read, "__setattr__": write}

    return types.new_class(kind.__name__, (kind,), {}, fill)
