"""Float modules that will become one quantized module."""

from __future__ import annotations

from bevquant_hybrid.nn.intrinsic._fused import Fused, fused_class

__all__ = ["Fused", "fused_class"]
