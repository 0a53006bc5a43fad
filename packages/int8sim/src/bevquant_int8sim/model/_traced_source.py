"""The captured model beside its program: which node of the graph each value stands for."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from torch import fx

from bevquant_graph import Graph
from bevquant_int8sim.model._form import RequiredType


@dataclass(frozen=True, eq=False)
class Source:
    """Where an integer model comes from."""

    graph: Graph
    # Node to the values that hold its tensor, by form.
    held: Mapping[fx.Node, Mapping[RequiredType, str]]
