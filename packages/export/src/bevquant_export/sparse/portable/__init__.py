"""Sparse encoders in standard operators, for runtimes without sparse convolutions."""

from __future__ import annotations

from bevquant_export.sparse.portable._lower import Lowered
from bevquant_export.sparse.portable._outputs import LayerOutput
from bevquant_export.sparse.portable._record import is_portable, portable_graph, recorded

__all__ = ["LayerOutput", "Lowered", "is_portable", "portable_graph", "recorded"]
