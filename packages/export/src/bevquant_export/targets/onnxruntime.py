"""ONNX Runtime on a CPU."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from bevquant_export.dense._profile import Profile
from bevquant_export.lint import _onnxruntime
from bevquant_export.targets._target import LintFile
from bevquant_export.targets.qdq import QdqTarget

if TYPE_CHECKING:
    from bevquant_export.lint._qdq import Pairs
    from bevquant_export.lint._rule import Finding

__all__ = ["ONNXRUNTIME"]


class _OnnxRuntime(QdqTarget):
    name, title = "onnxruntime", "ONNX Runtime"
    sparse = "portable"
    domains = frozenset({"com.microsoft", "ai.onnx.ml"})
    rules = _onnxruntime.RULES
    weights = ("uint8", "int8")
    # What lies between uint8 with zero point 128 is fused; a ReLU on int8 or behind such a zero
    # point is a float one, where Clip runs on uint8.
    form = Profile(
        "onnxruntime", 13, np.uint8, 128, "uint8",
        integer_bias=True, integer_relu=True, axis=True,
        transposed_per_channel=True, numbered=False,
        repeats=True, one_scale=False, depth_to_space=True, voxels=True, scatter_sums=True,
        runner="onnxruntime",
    )  # fmt: skip

    def lint_pairs(self, pairs: Pairs, file: LintFile) -> Iterator[Finding]:
        """In which integers, and where, pairs must stand to run as integers."""
        yield from _onnxruntime.check_onnxruntime(pairs, file.cpu)

    def commands(self, path: Path, *, quantized: bool = True) -> tuple[str, ...]:
        """One line of Python."""
        del quantized
        return (f'onnxruntime.InferenceSession("{path.name}")',)


ONNXRUNTIME = _OnnxRuntime()
