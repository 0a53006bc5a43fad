"""Targets that take sparse encoders as `export_sparse_onnx` writes them."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from torch import nn

from bevquant_export.targets._target import Target

__all__ = ["SparseTarget"]


class SparseTarget(Target):
    """An engine whose files `export_sparse_onnx` writes, by its dialect."""

    def write(self, model: nn.Module, args: Any, path: Path, **options: Any) -> Any:
        """`export_sparse_onnx` with this dialect."""
        from bevquant_export.sparse import export_sparse_onnx

        return export_sparse_onnx(model, args, path, dialect=self.name, **options)

    def compare(self, made: Any, model: nn.Module, args: Any) -> Sequence[Any]:
        """`compare_sparse_onnx` of the file, read back."""
        from bevquant_export.sparse import compare_sparse_onnx, load_sparse_onnx

        return compare_sparse_onnx(load_sparse_onnx(made.path), model, args)
