"""Arguments of a wrong kind are refused with the names of the public function and the argument."""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Mapping
from pathlib import Path, PurePath
from types import FrameType
from typing import Any, TypeVar

import numpy as np
from torch import Tensor, nn

from ._attributes import leaves

_Batches = TypeVar("_Batches")
_NO_INPUTS = (str, bytes, int, float, PurePath, type, nn.Module, np.ndarray)
_PACKAGES = ("bevquant_", "bevfusion", "bev_data", "bev_scenes")


def check_kind(value: object, kinds: type | tuple[type, ...], expected: str) -> None:
    """Refuse a value of another kind.

    The message begins with the outermost public function that was given the value, and the name of
    its argument, so functions below it need no name of their caller.

    Args:
        value: The argument.
        kinds: Classes that are right.
        expected: The classes in words.

    Raises:
        TypeError: The value has another class.

    Example:
        >>> check_kind("net.pt", nn.Module, "a torch module")
        Traceback (most recent call last):
        ...
        TypeError: check_kind: value: expected a torch module, got the str 'net.pt'
    """
    if not isinstance(value, kinds):
        raise TypeError(f"{_place(value)}: expected {expected}, got {kind_of(value)}")


def checked_batches(batches: _Batches) -> _Batches:
    """The argument, if it is a list of batches, a loader or another iterable.

    Raises:
        TypeError: It is one batch (a tensor or a dict), or cannot be iterated.

    Example:
        >>> checked_batches([1, 2])
        [1, 2]
    """
    single = isinstance(batches, Tensor | Mapping | nn.Module | str | bytes | PurePath)
    if single or not (hasattr(batches, "__iter__") or hasattr(batches, "__getitem__")):
        raise TypeError(
            f"{_place(batches)}: expected a list of batches, a loader or another iterable, got "
            f"{kind_of(batches)}; put a single batch into a list"
        )
    return batches


def run_on(model: nn.Module, args: Any, kwargs: Mapping[str, Any]) -> Any:
    """The result of a model's call.

    Raises:
        TypeError: It failed, and the arguments are text, paths, numbers, arrays or modules alone.
            Other errors of a forward with a dict as its one argument get a note.
    """
    try:
        return model(*args, **kwargs)
    except Exception as error:
        given = list(leaves((args, kwargs)))
        if not all(value is None or isinstance(value, _NO_INPUTS) for value in given):
            _note_whole_dict(error, model, args)
            raise
        got = kind_of(given[0]) if given else "no argument"
        arrays = any(isinstance(value, np.ndarray) for value in given)
        remedy = "; convert arrays with torch.as_tensor" if arrays else ""
        raise TypeError(
            f"{_place(error)}: expected tensors for the forward of {type(model).__name__}, "
            f"got {got}{remedy}"
        ) from error


def _note_whole_dict(error: Exception, model: nn.Module, args: Any) -> None:
    """Note on the error of a forward that got a batch's dict as its one argument."""
    batch = args[0] if len(args) == 1 else None
    if isinstance(batch, Mapping) and batch:
        member = next((key for key, value in batch.items() if isinstance(value, Tensor)), "")
        error.add_note(
            f"the forward of {type(model).__name__} got the whole dict with the keys "
            f"{', '.join(map(str, batch))}; to give it one member, pass that member, or "
            f"forward=lambda m, b: m(b[{member!r}])"
        )


def file_path(path: Any, what: str = "file") -> Path:
    """The path, checked.

    Args:
        path: A string or a path.
        what: The file in words.

    Raises:
        TypeError: It is neither.

    Example:
        >>> file_path("ranges.json").suffix
        '.json'
    """
    check_kind(path, (str, os.PathLike), f"the path of {_a(what)}")
    return Path(path)


def kind_of(value: object) -> str:
    """The kind of a value in words.

    Example:
        >>> kind_of(None), kind_of(["a"]), kind_of(nn.ReLU()), kind_of(nn.ReLU)
        ('None', 'a list of str', 'a ReLU', 'the class ReLU')
    """
    if value is None or isinstance(value, bool):
        return str(value)
    if isinstance(value, type):
        return f"the class {value.__name__}"
    name = type(value).__name__
    if isinstance(value, str | PurePath):
        return f"the {name} {str(value)!r:.80}"
    if isinstance(value, list | tuple) and value:
        return f"a {name} of {type(value[0]).__name__}"
    return _a(name)


def _a(name: str) -> str:
    return f"{'an' if name[0].lower() in 'aeiou.' else 'a'} {name}"


def _place(value: object) -> str:
    """The outermost public function that was given a value, and its argument; else the function."""
    place = ""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        code, module = frame.f_code, str(frame.f_globals.get("__name__"))
        function = code.co_qualname.removesuffix(".__init__")
        if module.startswith(_PACKAGES) and not re.search(r"(^|\.)[_<]", function):
            names = code.co_varnames[: code.co_argcount + code.co_kwonlyargcount]
            given = next((n for n in names if frame.f_locals.get(n, _PACKAGES) is value), None)
            if given or place.partition(":")[2] == "":
                place = f"{function}: {given}" if given else function
        frame = frame.f_back
    return place
