"""The mapper's list: which operators of a hybrid model run on the BPU of a march."""

from __future__ import annotations

import tomllib
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from importlib import resources

from bevquant_hybrid.operators import load_support_table

_PLACES = ("BPU", "CPU")


@dataclass(frozen=True)
class Listed:
    """Where an operator runs, and why."""

    place: str
    because: str


def place_operator(operator: str, march: str) -> Listed:
    """Where the mapper runs ``operator``, a row of the support table or one of its aliases.

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
