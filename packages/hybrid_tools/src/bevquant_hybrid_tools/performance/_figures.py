"""The chips' figures, read from their table and checked."""

from __future__ import annotations

import tomllib
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from importlib import resources
from typing import Any

_BASES = ("documented", "measured", "assumed")


@dataclass(frozen=True)
class Figure:
    """One number and its source."""

    value: float
    basis: str  # "documented", "measured" or "assumed"
    source: str  # address of the page
    note: str  # the page's statement, or the assumption

    def __post_init__(self) -> None:
        """Refuse invalid figures."""
        if not self.value > 0:
            raise ValueError(f"figure {self.value}; expected a number above zero")
        if self.basis not in _BASES:
            raise ValueError(f"basis {self.basis!r}; expected one of {_BASES}")


@dataclass(frozen=True)
class ChipFigures:
    """Figures of a chip."""

    chip: str  # its name
    # 10¹² int8 operations per second of all cores; a multiplication and an addition are two
    peak_tops: Figure
    cores: Figure  # BPU cores
    ddr_gigabytes_per_second: Figure  # 10⁹ bytes per second between DDR memory and the BPU
    cpu_cores: Figure | None = None  # CPU cores; None if unknown, as for the attributes below
    cpu_gigahertz: Figure | None = None  # their clock, in 10⁹ cycles per second
    cpu_operations_per_cycle: Figure | None = None  # float32 operations of one core in one cycle


def load_chip_figures(march: str) -> ChipFigures:
    """The figures of the chip of a march: ``bernoulli2``, ``bayes`` or ``bayes-e``.

    Example:
        >>> figures = load_chip_figures("BAYES_E")
        >>> figures.chip, figures.peak_tops.value
        ('RDK X5 (Sunrise 5)', 10.0)
    """
    table = _load()
    key = march.lower().replace("_", "-")
    if key not in table:
        raise ValueError(
            f"march {march!r}; expected one of {', '.join(table)}: there are public figures of "
            "these alone"
        )
    return table[key]


@cache
def _load() -> Mapping[str, ChipFigures]:
    text = (resources.files(__package__) / "figures.toml").read_text(encoding="utf-8")
    return {march: _chip(data) for march, data in tomllib.loads(text).items()}


def _chip(data: Mapping[str, Any]) -> ChipFigures:
    figures = {key: Figure(**value) for key, value in data.items() if key != "chip"}
    return ChipFigures(data["chip"], **figures)
