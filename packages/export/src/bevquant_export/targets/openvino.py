"""OpenVINO on a CPU."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from bevquant_export.lint import _openvino
from bevquant_export.targets._target import LintFile
from bevquant_export.targets.onnxruntime import ONNXRUNTIME
from bevquant_export.targets.qdq import QdqTarget

if TYPE_CHECKING:
    from bevquant_export.lint._qdq import Pairs
    from bevquant_export.lint._rule import Finding

__all__ = ["OPENVINO"]


class _OpenVino(QdqTarget):
    name, title = "openvino", "OpenVINO"
    sparse = "portable"
    quantized_outputs = True
    rules = _openvino.RULES
    weights = ("int8", "uint8")
    form = replace(ONNXRUNTIME.form, name="openvino", weight="int8", runner="openvino")

    def lint_pairs(self, pairs: Pairs, file: LintFile) -> Iterator[Finding]:
        """Which convolutions its plugin takes as integers."""
        del file
        yield from _openvino.check_openvino(pairs)

    def commands(self, path: Path, *, quantized: bool = True) -> tuple[str, ...]:
        """One line of Python."""
        del quantized
        return (f'openvino.Core().compile_model("{path.name}", "CPU")',)


OPENVINO = _OpenVino()
