"""Targets that take dense files with QuantizeLinear and DequantizeLinear."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from torch import nn

from bevquant_export.dense._profile import Profile
from bevquant_export.lint._qdq import Pairs, check_axis, check_pairs
from bevquant_export.targets._cpu import weights_for
from bevquant_export.targets._registry import targets
from bevquant_export.targets._target import LintFile, Target

if TYPE_CHECKING:
    from bevquant_export.dense import QdqFile, TensorDifference
    from bevquant_export.lint._rule import Finding

__all__ = ["QdqTarget", "profile_of"]


class QdqTarget(Target):
    """An engine whose files follow from a `Profile` alone.

    Attributes:
        form: The profile.
        weights: Types of stored weights that a caller may choose from; empty where there is no
            choice.
    """

    form: Profile
    weights: tuple[str, ...] = ()

    def write(self, model: nn.Module, args: Any, path: Path, **options: Any) -> QdqFile:
        """`export_qdq_onnx` with this profile."""
        from bevquant_export.dense import export_qdq_onnx

        return export_qdq_onnx(model, args, path, self.name, **options)

    def fastest(self, cpu: str) -> dict[str, Any]:
        """The type of stored weights where there is a choice; sums in integers for CPUs."""
        return {"weights": weights_for(cpu), "integer_sums": True} if self.weights else {}

    def session(self, proto: Any) -> Any:
        """What runs a model of this engine's on the CPU at hand (``get_inputs``, ``run``)."""
        from bevquant_export.dense._runnable import session

        return session(proto, self.form.runner)

    def compare(self, made: QdqFile, model: nn.Module, args: Any) -> tuple[TensorDifference, ...]:
        """`compare_qdq_onnx`."""
        from bevquant_export.dense import compare_qdq_onnx

        return compare_qdq_onnx(made, model, args)

    def lint(self, file: LintFile) -> Iterator[Finding]:
        """Rules about pairs, then the engine's own, graph by graph."""
        for graph in file.graphs:
            pairs = Pairs(graph, file.path.parent)
            yield from check_pairs(pairs)
            if self.form.axis:
                yield from check_axis(pairs)
            yield from self.lint_pairs(pairs, file)

    @abstractmethod
    def lint_pairs(self, pairs: Pairs, file: LintFile) -> Iterator[Finding]:
        """Rules of the engine about one graph."""


def profile_of(name: str, weights: str | None = None) -> Profile:
    """The profile of the target of this name.

    Args:
        name: Of a dense target.
        weights: ``"uint8"`` or ``"int8"``, where the target has a choice.

    Raises:
        ValueError: Another name, or weights that the target has no choice of.
    """
    known = {n: t for t in targets() if isinstance(t, QdqTarget) for n in (t.name, *t.aliases)}
    if name not in known:
        raise ValueError(
            f"export_qdq_onnx: profile={name!r}: expected one of {', '.join(map(repr, known))}"
        )
    target = known[name]
    if weights is not None and weights not in target.weights:
        choice = " or ".join(map(repr, target.weights))
        raise ValueError(
            f"export_qdq_onnx: weights={weights!r} with profile={name!r}: expected None"
            + (f", {choice}" if choice else "; 'uint8' or 'int8' go with profile='onnxruntime'")
        )
    return replace(target.form, name=name, weight=weights or target.form.weight)
