"""Sparse encoders in standard operators, which ONNX Runtime runs on a CPU."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

from torch import nn

from bevquant_export._cpu import weights_for
from bevquant_export.targets.libspconv import SparseTarget
from bevquant_export.targets.onnxruntime import ONNXRUNTIME

if TYPE_CHECKING:
    from bevquant_export._target import LintFile
    from bevquant_export.lint._graph import Finding

__all__ = ["PORTABLE"]


class _Portable(SparseTarget):
    name, title, family = "portable", "ONNX Runtime", "onnxruntime"
    domains, command = ONNXRUNTIME.domains, ONNXRUNTIME.command

    @property
    def runner(self) -> str:
        """ONNX Runtime."""
        return ONNXRUNTIME.runner

    def lint(self, file: LintFile) -> Iterator[Finding]:
        """ONNX Runtime's requirements on a file."""
        return ONNXRUNTIME.lint(file)

    def fastest(self, cpu: str) -> dict[str, Any]:
        """The type of stored weights."""
        return {"weights": weights_for(cpu)}

    def compare(self, made: Any, model: nn.Module, args: Any) -> Sequence[Any]:
        """Layer by layer, with ONNX Runtime running the file."""
        from bevquant_export.sparse import compare_sparse_onnx, load_sparse_onnx

        file = load_sparse_onnx(made.path, backend="onnxruntime")
        return compare_sparse_onnx(file, model, args)


PORTABLE = _Portable()
