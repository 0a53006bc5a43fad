"""Split a traced model between BPU and CPU, as a library of its own: a plan, JSON, a picture."""

from ._partition import partition
from ._placement import Listed, place_operator
from ._plan import Boundary, Plan, PlanNode, Segment
from ._segments import number_segments

__all__ = [
    "Boundary",
    "Listed",
    "Plan",
    "PlanNode",
    "Segment",
    "number_segments",
    "partition",
    "place_operator",
]
