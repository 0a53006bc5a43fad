"""Stubs under their documented path."""

from __future__ import annotations

from bevquant_hybrid._quant_stub import DeQuantStub, QuantStub

__all__ = ["DeQuantStub", "QuantStub"]
