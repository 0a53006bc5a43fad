"""NVIDIA's engine for sparse convolutions, and the base of targets for sparse encoders."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from torch import nn

from bevquant_export._target import Target
from bevquant_export.sparse import _lint_convs, _lint_graph

if TYPE_CHECKING:
    from bevquant_export._target import LintFile
    from bevquant_export.lint._graph import Finding

__all__ = ["LIBSPCONV", "SparseTarget"]


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


class _Libspconv(SparseTarget):
    name, title, kind = "libspconv", "libspconv", "sparse"
    rules = tuple(sorted((*_lint_convs.RULES, *_lint_graph.RULES), key=lambda rule: rule.id))
    unverified = ("libspconv was not at hand: the rules follow its parser's source",)

    def lint(self, file: LintFile) -> Iterator[Finding]:
        """The parser's and the engine's requirements."""
        graph, folder = file.graphs[0], file.path.parent
        yield from _lint_graph.check_graph(graph)
        yield from _lint_convs.check_convs(graph, folder)
        yield from _lint_convs.check_numbers(graph, folder)
        yield from _lint_graph.check_places(graph)

    def commands(self, path: Path, *, quantized: bool = True) -> tuple[str, ...]:
        """The call of the engine's library."""
        precision = "Int8" if quantized else "Float16"
        return (f'spconv::load_engine_from_onnx("{path.name}", spconv::Precision::{precision})',)


LIBSPCONV = _Libspconv()
