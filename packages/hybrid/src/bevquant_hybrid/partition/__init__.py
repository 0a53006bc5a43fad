"""Split a traced model between BPU and CPU, as a library of its own: a plan, JSON, a picture."""

from ._partition import partition
from ._placement import Listed, place_operator
from ._plan import Boundary, Plan, PlanNode, Segment, number_segments
from ._suggest_cpu import suggest_cpu
from ._suggestion import CpuMove, CpuSuggestion

__all__ = [
    "Boundary",
    "CpuMove",
    "CpuSuggestion",
    "Listed",
    "Plan",
    "PlanNode",
    "Segment",
    "number_segments",
    "partition",
    "place_operator",
    "suggest_cpu",
]
