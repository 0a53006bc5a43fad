"""Partition of a traced model between BPU and CPU: a plan, JSON, a picture."""

from bevquant_hybrid._documented import names_from
from bevquant_hybrid.operators._table import Listed, place_operator

from ._partition import partition
from ._plan import Boundary, Plan, PlanComposer, PlanNode, Segment, number_segments

__getattr__ = names_from("partition", "CpuMove", "CpuSuggestion", "suggest_cpu")

__all__ = [
    "Boundary",
    "CpuMove",
    "CpuSuggestion",
    "Listed",
    "Plan",
    "PlanComposer",
    "PlanNode",
    "Segment",
    "number_segments",
    "partition",
    "place_operator",
    "suggest_cpu",
]
