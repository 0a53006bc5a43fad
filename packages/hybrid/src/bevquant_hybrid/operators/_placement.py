"""Placement of a hybrid model's operators: the mapper's list, and the user's requests."""

from __future__ import annotations

import tomllib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import cache
from importlib import resources
from typing import Any

from torch import nn

from bevquant_hybrid.operators._table import load_support_table

_PLACES = ("BPU", "CPU")


@dataclass(frozen=True)
class Listed:
    """An operator's placement and its reason."""

    place: str
    because: str


def place_operator(operator: str, march: str) -> Listed:
    """The mapper's placement of ``operator``, a row of the support table or an alias.

    Example:
        >>> [place_operator("torch.sub", march).place for march in ("bernoulli2", "bayes")]
        ['CPU', 'BPU']
    """
    table = load_support_table()
    column = table.march(march).placement
    row = table.find(operator)
    group = _groups().get(row.name) if row else None
    if group is None:
        return Listed("CPU", "it is not among the operators that the mapper runs on a BPU")
    return Listed(group[0][column], group[1])


def requested_placement(
    hybrid_dict: Mapping[str, Iterable[Any]] | None,
) -> tuple[tuple[str, ...], tuple[type[nn.Module], ...]]:
    """Names and classes of a `hybrid_dict`."""
    given = dict(hybrid_dict or {})
    names = _list_of("module_name", given.pop("module_name", ()), str, "a module's path")
    types = _list_of("module_type", given.pop("module_type", ()), type, "a class")
    if given:
        raise ValueError(
            f"hybrid_dict: unknown key {next(iter(given))!r}; expected module_name or module_type"
        )
    return names, types


def _list_of(key: str, values: Any, kind: type, what: str) -> tuple[Any, ...]:
    if isinstance(values, str) or not isinstance(values, Iterable):
        raise ValueError(f"hybrid_dict: {key} is {values!r}; expected a list, each {what}")
    found = tuple(values)
    for value in found:
        if not isinstance(value, kind):
            raise ValueError(f"hybrid_dict: {key} {value!r}; expected {what}")
    return found


@cache
def _groups() -> Mapping[str, tuple[Mapping[str, str], str]]:
    text = (resources.files(__package__) / "placement.toml").read_text(encoding="utf-8")
    table = load_support_table()
    columns = {march.placement for march in table.marches.values()}
    groups: dict[str, tuple[Mapping[str, str], str]] = {}
    for group in tomllib.loads(text)["group"]:
        place = group["place"]
        if set(place) != columns or not set(place.values()) <= set(_PLACES):
            raise ValueError(
                f"placement {place}: expected BPU or CPU for each of {sorted(columns)}"
            )
        for row in group["rows"]:
            if row not in table.operators or row in groups:
                raise ValueError(f"placement of {row!r}: no row of the support table, or twice")
            groups[row] = (place, group["because"])
    return groups
