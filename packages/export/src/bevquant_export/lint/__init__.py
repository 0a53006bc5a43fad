"""Defects of an ONNX file for a target: refused, misread or slow parts, found without a run."""

from __future__ import annotations

from typing import Any

from bevquant_export.lint._cli import lint_onnx, main, note_calibration, rules
from bevquant_export.lint._graph import Finding, Rule
from bevquant_export.lint._predict import (
    LayerPrediction,
    match_layers,
    predict_layers,
    read_engine_layers,
)

__all__ = [
    "RULES",
    "TARGETS",
    "Finding",
    "LayerPrediction",
    "Rule",
    "lint_onnx",
    "main",
    "match_layers",
    "note_calibration",
    "predict_layers",
    "read_engine_layers",
    "rules",
]


def __getattr__(name: str) -> Any:
    """`RULES` and `TARGETS`, which grow with the targets that are installed."""
    from bevquant_export._target import target_names

    if name == "RULES":
        return rules()
    if name == "TARGETS":
        return target_names()
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
