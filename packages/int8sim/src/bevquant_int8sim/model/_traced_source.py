"""The traced model beside its program: which node of the graph each value stands for."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from bevquant_int8sim.model._form import Demand
from bevquant_int8sim.model._trace import Traced

__all__ = ["Source"]


@dataclass(frozen=True, eq=False)
class Source:
    """Where an integer model comes from.

    Attributes:
        traced: The calibrated model and its graph.
        held: Node to the values that hold its tensor, by form.
    """

    traced: Traced
    held: Mapping[str, Mapping[Demand, str]]
