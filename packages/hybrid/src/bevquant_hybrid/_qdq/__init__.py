"""A model that trains quantized as a program in integers, which an exporter writes."""

from __future__ import annotations

from bevquant_hybrid._fake_quant._fake_quantize import CalibFakeQuantize, FakeQuantize
from bevquant_hybrid._qdq._program import PreparedProgram, read
from bevquant_hybrid.nn.quantized._base import FixedPoint
from bevquant_int8sim.program import PROGRAM_READERS

__all__ = ["PreparedProgram", "read"]

# Of a converted model `read` says that files are written before converting.
PROGRAM_READERS |= dict.fromkeys((FakeQuantize, CalibFakeQuantize, FixedPoint), read)
