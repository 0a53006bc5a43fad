"""The profiler, under its documented path: `bevquant_hybrid_tools` has it."""

from __future__ import annotations

from bevquant_hybrid._documented import names_from

__getattr__ = names_from("utils.quant_profiler")
