"""QDQ files of any tool as integer models."""

from __future__ import annotations

from bevquant_export.qdq_reader._load import float_qdq_model, load_qdq_onnx
from bevquant_export.qdq_reader._operators import OPERATORS

__all__ = ["OPERATORS", "float_qdq_model", "load_qdq_onnx"]
