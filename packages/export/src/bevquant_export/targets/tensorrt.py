"""TensorRT 10, weakly typed, and 11, which takes its types from the file."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from bevquant_export._target import LintFile
from bevquant_export.dense.nodes._profile import Profile
from bevquant_export.lint import _tensorrt
from bevquant_export.lint._read import load_model
from bevquant_export.lint._tensors import FLOAT8
from bevquant_export.targets.qdq import QdqTarget

if TYPE_CHECKING:
    from bevquant_export.lint._graph import Finding, Rule
    from bevquant_export.lint._tensors import Pairs

__all__ = ["TENSORRT10", "TENSORRT11"]

_UNRUN = "no TensorRT was at hand: the rules follow its documents and its parser's operator table"


class _TensorRT10(QdqTarget):
    """Versions 8 to 10: precisions are flags of the build."""

    name, title = "tensorrt10", "TensorRT"
    aliases: tuple[str, ...] = ("tensorrt",)
    family = "tensorrt"
    sparse = "libspconv"
    rules: tuple[Rule, ...] = _tensorrt.RULES
    unverified: tuple[str, ...] = (_UNRUN,)
    # Zero points of 0 only, no uint8 and a float bias.
    form = Profile(
        "tensorrt10", 13, np.int8, 0, "float",
        integer_bias=False, integer_relu=False, axis=True,
        transposed_per_channel=False,
        repeats=True, one_scale=True, plugins="1", float8=("fp8_e4m3",),
        absent=_tensorrt.NOT_IMPORTED,
    )  # fmt: skip

    def lint_pairs(self, pairs: Pairs, file: LintFile) -> Iterator[Finding]:
        """Operators that the parser imports, and pair positions."""
        functions = {(f.domain, f.name) for f in file.model.functions}
        yield from _tensorrt.check_tensorrt(pairs, functions)

    def commands(self, path: Path, *, quantized: bool = True) -> tuple[str, ...]:
        """Precisions are flags; bindings are halves, as CUDA-BEVFusion asserts."""
        graph = load_model(path, external_data=False).graph
        halves = [",".join(["fp16:chw"] * len(ports)) for ports in (graph.input, graph.output)]
        precision = "--fp16 --int8" if quantized else "--fp16"
        if any(tensor.data_type in FLOAT8 for tensor in graph.initializer):
            precision += " --fp8"
        return (
            f"trtexec --onnx={path.name} {precision} --inputIOFormats={halves[0]} "
            f"--outputIOFormats={halves[1]} --saveEngine={path.stem}.plan",
        )


class _TensorRT11(_TensorRT10):
    """Version 11: every network is strongly typed, by the types of the file."""

    name, title, aliases = "tensorrt11", "TensorRT 11", ()
    rules = (*_tensorrt.RULES, *_tensorrt.TYPED_RULES)
    unverified = (
        _UNRUN,
        "whether TensorRT 11 folds the Casts between half bindings and pairs into their neighbours "
        "was not measured",
    )
    form = replace(_TensorRT10.form, name="tensorrt11", half=True, plugins="2",
                   float8=("fp8_e4m3", "nvfp4"))  # fmt: skip

    def lint_pairs(self, pairs: Pairs, file: LintFile) -> Iterator[Finding]:
        """As for 10, and the types."""
        yield from super().lint_pairs(pairs, file)
        yield from _tensorrt.check_types(pairs, file.model)

    def commands(self, path: Path, *, quantized: bool = True) -> tuple[str, ...]:
        """No precision flags, which 11 refuses; types of the bindings are in the file."""
        del quantized
        return (f"trtexec --onnx={path.name} --saveEngine={path.stem}.plan",)


TENSORRT10, TENSORRT11 = _TensorRT10(), _TensorRT11()
