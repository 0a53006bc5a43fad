"""Pictures of partitions, from `bevquant_hybrid_tools`, under their documented path."""

from __future__ import annotations

from bevquant_hybrid._documented import names_from

_NAMES = ("DrawnNode draw_partition draw_plan write_partition").split()
__all__ = [*_NAMES]

__getattr__ = names_from("drawing", *_NAMES)
