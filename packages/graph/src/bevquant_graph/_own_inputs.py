"""Copies of containers and modules over the same tensors, for a run that may write to them."""

from __future__ import annotations

import copy
import types
import weakref
from collections import OrderedDict, deque
from collections.abc import Callable
from dataclasses import is_dataclass
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from ._attributes import attributes_of
from ._signature import refilled

_PLAIN = (str, bytes, int, float, complex, bool, type(None), type, types.ModuleType)


def own_inputs(value: Any, change: Callable[[Tensor], Tensor] | None = torch.clone) -> Any:
    """The value in new containers, so that a forward that writes to them changes no frame.

    Lists, dictionaries, sets, dataclasses, sparse tensors and objects with attributes are copied,
    at any depth, with their classes; an object in several places stays one.

    Args:
        value: Arguments of a forward.
        change: Copies a tensor, for forwards with ``x.mul_(2)``; numpy arrays are copied too. None:
            tensors and arrays stay the same objects.

    Example:
        >>> frame = {"image": [1, 2]}
        >>> own = own_inputs(frame)
        >>> own["image"].append(3)
        >>> own["boxes"] = 4
        >>> frame
        {'image': [1, 2]}
    """
    return _Copies(change)(value)


def twin(model: nn.Module) -> nn.Module:
    """A copy of the model's modules over the same parameters and buffers.

    A run of it, or a trace, writes to no attribute of the model, which another thread may run.
    Attributes, hooks and closures that lead to modules of the model lead to the twin's.

    Example:
        >>> net = nn.Sequential(nn.Linear(2, 2))
        >>> other = twin(net)
        >>> other[0] is net[0], other[0].weight is net[0].weight
        (False, True)
    """
    copies = _Copies(None)
    made = {
        module: object.__new__(type(module))
        for module in model.modules()
        if not isinstance(module, torch.jit.ScriptModule)
    }
    for module, other in made.items():
        copies.keep(module, other)
    for module, other in made.items():
        for name, value in vars(module).items():
            plain = name in ("_parameters", "_buffers")
            vars(other)[name] = value.copy() if plain else copies(value)
    return made.get(model, model)


class _Copies:
    """Makes copies, one for each object.

    Args:
        change: As `own_inputs` takes it.
    """

    def __init__(self, change: Callable[[Tensor], Tensor] | None) -> None:
        self._change = change
        self._made: dict[int, tuple[Any, Any]] = {}  # also holds what the id is of

    def keep(self, value: Any, made: Any) -> Any:
        """Let `made` stand for `value` from now on."""
        self._made[id(value)] = value, made
        return made

    def __call__(self, value: Any) -> Any:
        """The copy; the value itself where nothing in it can be written to."""
        if isinstance(value, _PLAIN):
            return value
        if id(value) in self._made:
            return self._made[id(value)][1]
        if isinstance(value, Tensor | np.ndarray):
            if self._change is None:
                return value
            own = self._change(value) if isinstance(value, Tensor) else value.copy()
            return self.keep(value, own)
        if isinstance(value, tuple):
            members = [self(item) for item in value]
            same = all(one is other for one, other in zip(members, value, strict=True))
            return value if same else self.keep(value, refilled(type(value), members))
        if isinstance(value, dict | list | set | deque):
            return self._container(value)
        if isinstance(value, types.MethodType):
            owner = self(value.__self__)
            return value if owner is value.__self__ else types.MethodType(value.__func__, owner)
        if isinstance(value, types.FunctionType):
            return self._function(value)
        if isinstance(value, partial):
            made = partial(self(value.func), *self(value.args), **self(value.keywords))
            return self.keep(value, made)
        if isinstance(value, weakref.ref):
            owner = self(value())
            return value if owner is value() else weakref.ref(owner)
        return self._object(value)

    def _container(self, value: Any) -> Any:
        made = self.keep(value, _shallow(value))
        if isinstance(value, dict):
            kind = OrderedDict if isinstance(value, OrderedDict) else dict
            # dict's and list's own methods: a class may override its own.
            for key, item in list(dict.items(value)):
                kind.__setitem__(made, key, self(item))
        elif isinstance(value, list):
            list.__setitem__(made, slice(None), [self(item) for item in value])
        elif isinstance(value, deque):
            for place, item in enumerate(value):
                made[place] = self(item)
        return made

    def _function(self, function: types.FunctionType) -> types.FunctionType:
        """A function whose closure and defaults lead elsewhere."""
        # Empty at first, as the function may be in its own closure.
        cells = tuple(types.CellType() for _ in function.__closure__ or ())
        made = types.FunctionType(
            function.__code__, function.__globals__, function.__name__, None, cells
        )
        vars(made).update(vars(function))
        self.keep(function, made)
        named = function.__kwdefaults__ or {}
        made.__defaults__ = self(function.__defaults__)
        made.__kwdefaults__ = {name: self(value) for name, value in named.items()}
        same = all(made.__kwdefaults__[name] is value for name, value in named.items())
        # Nothing in it leads elsewhere.
        if not cells and made.__defaults__ is function.__defaults__ and same:
            return self.keep(function, function)  # type: ignore[no-any-return]
        for cell, old in zip(cells, function.__closure__ or (), strict=True):
            try:
                cell.cell_contents = self(old.cell_contents)
            except ValueError:  # a name that has no value yet
                continue
        return made

    def _object(self, value: Any) -> Any:
        """Copy of an object of an author's class with attributes; others are returned."""
        names = attributes_of(value)
        if not names:
            return value
        try:
            made = copy.copy(value)
        except Exception:  # a lock, a file: whatever has no copies
            return self.keep(value, value)
        if made is value:
            return self.keep(value, value)
        self.keep(value, made)
        changed = False
        for name in names:
            held = object.__getattribute__(value, name)
            item = self(held)
            changed |= item is not held
            object.__setattr__(made, name, item)
        return made if changed or is_dataclass(value) else self.keep(value, value)


def _shallow(value: Any) -> Any:
    """As `copy.copy`; also of dictionaries that answer to Python's own attributes with anything."""
    try:
        made = copy.copy(value)
        if type(made) is type(value) and made is not value:
            return made
    except Exception:  # whatever such a class makes of Python's question how it is copied
        pass
    kind: Any = next(k for k in (OrderedDict, dict, list, set, deque) if isinstance(value, k))
    made = kind.__new__(type(value))
    kind.__init__(made, kind.__iter__(value) if kind in (list, set, deque) else ())
    if isinstance(value, dict):
        kind.update(made, value)
    vars(made).update(object.__getattribute__(value, "__dict__"))
    return made
