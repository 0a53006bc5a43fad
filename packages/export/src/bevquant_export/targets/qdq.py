"""Targets that take dense files with QuantizeLinear and DequantizeLinear."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from torch import nn

from bevquant_export._cpu import weights_for
from bevquant_export._target import LintFile, Target
from bevquant_export.dense.nodes._profile import Profile
from bevquant_export.lint._tensors import Pairs, check_axis, check_pairs

if TYPE_CHECKING:
    from bevquant_export.dense import QdqFile, TensorDifference
    from bevquant_export.lint._graph import Finding

__all__ = ["QdqTarget"]


class QdqTarget(Target):
    """An engine whose files follow from a `Profile` alone."""

    form: Profile
    # Types of stored weights to choose from; empty without a choice.
    weights: tuple[str, ...] = ()

    @property
    def runner(self) -> str:
        """The profile's."""
        return self.form.runner

    @property
    def half(self) -> bool:
        """The profile's."""
        return self.form.half

    @property
    def precisions(self) -> tuple[str, ...]:
        """By the profile's formats."""
        form = self.form
        fp8 = ("fp8",) * ("fp8_e4m3" in form.float8)
        blocks = [name for name in form.float8 if not name.startswith("fp8")]
        return (*super().precisions, *("int16",) * form.int16, *fp8, *blocks)

    @property
    def unsigned(self) -> bool:
        """The profile's."""
        return self.form.unsigned

    def write(self, model: nn.Module, args: Any, path: Path, **options: Any) -> QdqFile:
        """`export_qdq_onnx` with this profile."""
        from bevquant_export.dense import export_qdq_onnx

        return export_qdq_onnx(model, args, path, self.name, **options)

    def fastest(self, cpu: str) -> dict[str, Any]:
        """The type of stored weights if there is a choice; sums in integers for CPUs."""
        return {"weights": weights_for(cpu), "integer_sums": True} if self.weights else {}

    def session(self, proto: Any) -> Any:
        """A session of this engine on this CPU (``get_inputs``, ``run``)."""
        from bevquant_export.runtime._session import session

        return session(proto, self.form.runner)

    def compare(self, made: QdqFile, model: nn.Module, args: Any) -> tuple[TensorDifference, ...]:
        """`compare_qdq_onnx`."""
        from bevquant_export.dense import compare_qdq_onnx

        return compare_qdq_onnx(made, model, args)

    def lint(self, file: LintFile) -> Iterator[Finding]:
        """Rules on pairs, then the engine's own, graph by graph."""
        for graph in file.graphs:
            pairs = Pairs(graph, file.path.parent)
            form = self.form
            yield from check_pairs(pairs, float8=bool(form.float8), int16=form.int16)
            if self.form.axis:
                yield from check_axis(pairs)
            yield from self.lint_pairs(pairs, file)

    @abstractmethod
    def lint_pairs(self, pairs: Pairs, file: LintFile) -> Iterator[Finding]:
        """The engine's rules for one graph."""
