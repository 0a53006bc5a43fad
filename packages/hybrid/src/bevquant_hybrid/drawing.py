"""Pictures of partitions, from `bevquant_hybrid_tools`, under their documented path."""

from __future__ import annotations

from bevquant_hybrid._documented import names_from

__getattr__ = names_from("drawing")
