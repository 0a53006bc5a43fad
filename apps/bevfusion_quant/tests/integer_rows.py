"""Simulations made up for tests: rows of a layer table, what stays float, saved models."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from bevfusion.model import PARTS
from bevfusion.quantization import integer_stages
from bevfusion_quant.integer import FloatPart, SavedPart, Simulation
from bevquant_int8sim import LayerRow

__all__ = ["float_row", "layer_row", "simulation"]

_ROW = LayerRow(
    path="fuser.0", op="conv + ReLU", form="int8", values=1000, fake_sqnr_db=25.0,
    integer_sqnr_db=24.9, fake_cosine=0.998, integer_cosine=0.997, max_steps=1, mean_steps=0.01,
    off=0.01, forced_max_steps=1, forced_mean_steps=0.001, saturated=0.0002, peak_bits=18, why="",
)  # fmt: skip
_FLOAT = dict.fromkeys(
    "max_steps mean_steps off forced_max_steps forced_mean_steps saturated peak_bits".split()
)


def layer_row(path: str, **changes: Any) -> LayerRow:
    """A layer in integers that agrees within one step."""
    return replace(_ROW, path=path, **changes)


def float_row(path: str, op: str = "softmax", **changes: Any) -> LayerRow:
    """A step in float."""
    return replace(_ROW, path=path, op=op, form="float", **(_FLOAT | changes))


def simulation(*layers: LayerRow, **changes: Any) -> Simulation:
    """One frame through these layers."""
    start = Simulation(
        layers=layers,
        stages=integer_stages(layers, PARTS),
        islands=(FloatPart("heads.object", "sigmoid", "sigmoid has no integer form", 0.0125),),
        agreement=(),
        found=(),
        backend="portable (AVX2)",
        frame_seconds=(0.5,),
        saved=(
            SavedPart("model", "", "a file cannot hold splat"),
            SavedPart("fuser", "integer/fuser"),
        ),
    )
    return replace(start, **changes)
