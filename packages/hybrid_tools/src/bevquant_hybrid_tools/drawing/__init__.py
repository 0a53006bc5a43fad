"""Pictures of a model that is split between BPU and CPU."""

from ._layers import DrawnNode
from ._picture import draw_partition, draw_plan, write_partition

__all__ = ["DrawnNode", "draw_partition", "draw_plan", "write_partition"]
