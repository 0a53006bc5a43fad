"""A model that trains quantized as a program in integers, which an exporter writes."""

from __future__ import annotations

from bevquant_hybrid._qdq._program import PreparedProgram, read

__all__ = ["PreparedProgram", "read"]
