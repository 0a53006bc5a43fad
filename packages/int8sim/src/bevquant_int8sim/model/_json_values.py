"""Arguments of steps as JSON, and back: containers, references and plain constants."""

from __future__ import annotations

import math
from collections.abc import Mapping
from types import EllipsisType
from typing import Any

import numpy as np
import torch

from bevquant_int8sim.model._program import Ref, SparseRef


def to_json(value: Any) -> Any:
    """`value` in terms of JSON; what JSON has no form for becomes an object with one ``$`` key.

    Raises:
        ValueError: There is no form for it.
    """
    if isinstance(value, np.integer | np.floating | np.bool_):  # as of a stride by numpy
        value = value.item()
    if value is None or isinstance(value, bool | int | str):
        return value
    if isinstance(value, float):
        return value if math.isfinite(value) else {"$float": str(value)}
    if isinstance(value, Ref):
        return {"$ref": value.name}
    if isinstance(value, SparseRef):
        return {"$sparse": [value.features, value.coords]}
    if isinstance(value, slice):
        return {"$slice": [to_json(v) for v in (value.start, value.stop, value.step)]}
    if isinstance(value, EllipsisType):
        return {"$ellipsis": True}
    if isinstance(value, torch.dtype):
        return {"$dtype": str(value).removeprefix("torch.")}
    if isinstance(value, torch.device):
        return {"$device": value.type}
    if isinstance(value, list):
        return [to_json(item) for item in value]
    if isinstance(value, tuple):
        return {"$tuple": [to_json(item) for item in value]}
    if isinstance(value, Mapping) and all(isinstance(key, str) for key in value):
        return {"$dict": {key: to_json(item) for key, item in value.items()}}
    if isinstance(value, Mapping) and all(isinstance(key, str | int) for key in value):
        return {"$items": [[key, to_json(item)] for key, item in value.items()]}
    raise ValueError(f"a constant of type {type(value).__name__} cannot be saved")


def from_json(data: Any) -> Any:
    """Undo `to_json`.

    Raises:
        ValueError: It is not of that form.
    """
    if isinstance(data, list):
        return [from_json(item) for item in data]
    if not isinstance(data, dict):
        return data
    if len(data) != 1:
        raise ValueError(f"expected an object with one $ key, got keys {sorted(data)}")
    ((kind, inner),) = data.items()
    if kind == "$ref":
        return Ref(_text(inner))
    if kind == "$sparse" and isinstance(inner, list) and len(inner) == 2:
        return SparseRef(_text(inner[0]), _text(inner[1]))
    if kind == "$float" and inner in ("nan", "inf", "-inf"):
        return float(inner)
    if kind == "$slice" and isinstance(inner, list) and len(inner) == 3:
        ends = [from_json(item) for item in inner]
        if all(end is None or isinstance(end, int | Ref) for end in ends):
            return slice(*ends)
    if kind == "$ellipsis":
        return ...
    if kind == "$dtype" and isinstance(getattr(torch, _text(inner), None), torch.dtype):
        return getattr(torch, inner)
    if kind == "$device" and inner in ("cpu", "cuda"):
        return torch.device(inner)
    if kind == "$tuple" and isinstance(inner, list):
        return tuple(from_json(item) for item in inner)
    if kind == "$dict" and isinstance(inner, dict):
        return {key: from_json(item) for key, item in inner.items()}
    if kind == "$items" and isinstance(inner, list):
        return dict(_item(entry) for entry in inner)
    raise ValueError(f"unknown form {kind!r}, or other content than such has")


def _item(entry: Any) -> tuple[str | int, Any]:
    if not isinstance(entry, list) or len(entry) != 2 or not isinstance(entry[0], str | int):
        raise ValueError(f"{entry!r} is no entry of a dictionary")
    return entry[0], from_json(entry[1])


def _text(value: Any) -> str:
    if not isinstance(value, str):
        raise ValueError(f"expected text, got {value!r}")
    return value
