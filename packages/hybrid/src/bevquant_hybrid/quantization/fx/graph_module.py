"""The graph modules that fuse_fx, prepare_qat_fx and convert_fx return."""

from __future__ import annotations

from bevquant_hybrid._fx._graph_module import (
    GraphModuleWithAttr,
    ObservedGraphModule,
    QuantizedGraphModule,
)

__all__ = ["GraphModuleWithAttr", "ObservedGraphModule", "QuantizedGraphModule"]
