"""Whole models in integers: lowering, running, comparing, saving."""

from __future__ import annotations

from bevquant_int8sim.model._compare import LayerComparison, compare
from bevquant_int8sim.model._coords import COORD_TYPES, Coords, Geometry, SparseOutput
from bevquant_int8sim.model._form import Integers
from bevquant_int8sim.model._integer_model import IntegerModel, Recorded
from bevquant_int8sim.model._layer_table import LayerRow, LayerTable
from bevquant_int8sim.model._program import FloatFallback, Island
from bevquant_int8sim.model._simulate import simulate
from bevquant_int8sim.model._step import Step

__all__ = [
    "COORD_TYPES",
    "Coords",
    "FloatFallback",
    "Geometry",
    "IntegerModel",
    "Integers",
    "Island",
    "LayerComparison",
    "LayerRow",
    "LayerTable",
    "Recorded",
    "SparseOutput",
    "Step",
    "compare",
    "simulate",
]
