"""Horizon's hb_mapper."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from bevquant_export.dense._profile import Profile
from bevquant_export.lint import _horizon, _horizon_limits
from bevquant_export.targets._target import LintFile
from bevquant_export.targets.qdq import QdqTarget

if TYPE_CHECKING:
    from bevquant_export.lint._qdq import Pairs
    from bevquant_export.lint._rule import Finding

__all__ = ["HORIZON"]


class _Horizon(QdqTarget):
    name, title, aliases = "horizon", "BPU", ("bpu",)
    sparse = "portable"
    domains = frozenset({"horizon"})
    rules = (*_horizon.RULES, *_horizon_limits.RULES)
    unverified = ("hb_mapper was not at hand: the rules follow its documents",)
    form = Profile(
        "horizon", 11, np.int8, 0, "float",
        integer_bias=False, integer_relu=False, axis=False,
        transposed_per_channel=True, numbered=True,
        repeats=False, one_scale=False, integer_inputs=False,
    )  # fmt: skip

    def lint(self, file: LintFile) -> Iterator[Finding]:
        """The operator set, then what every graph is asked."""
        yield from _horizon.check_opset(file.graphs[0].opsets)
        yield from super().lint(file)

    def lint_pairs(self, pairs: Pairs, file: LintFile) -> Iterator[Finding]:
        """Forms, places and names, the settings beside the file, sizes."""
        yield from _horizon.check_horizon(pairs, file.path)
        yield from _horizon_limits.check_limits(pairs)

    def commands(self, path: Path, *, quantized: bool = True) -> tuple[str, ...]:
        """The compiler's call, with the settings that lie beside the file."""
        del quantized
        return (f"hb_mapper makertbin --model-type onnx --config {path.stem}.yaml",)


HORIZON = _Horizon()
