"""ONNX files of quantized models, sparse and dense: written, linted, read back and run."""

from __future__ import annotations

__all__: list[str] = []
