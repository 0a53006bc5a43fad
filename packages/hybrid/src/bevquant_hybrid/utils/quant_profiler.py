"""The profiler of `bevquant_hybrid_tools` under its documented path."""

from __future__ import annotations

from bevquant_hybrid._documented import names_from

__getattr__ = names_from("utils.quant_profiler")
