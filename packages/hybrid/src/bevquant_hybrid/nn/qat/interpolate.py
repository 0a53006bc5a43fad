"""QAT resizing."""

from __future__ import annotations

from bevquant_hybrid.nn import _functions
from bevquant_hybrid.nn.qat._base import KeepsScale, derived

Interpolate = derived(KeepsScale, _functions.Interpolate, __name__)
