"""Autoware's TensorRT plugin for sparse convolutions: files, their contract, and a run without."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from torch import nn

from bevquant_export._target import LintFile, Target
from bevquant_export.lint import _tensorrt
from bevquant_export.lint._tensors import Pairs, check_axis, check_pairs
from bevquant_export.targets.autoware._bindings import check_bindings
from bevquant_export.targets.autoware._contract import RULES, check_contract
from bevquant_export.targets.autoware._export import (
    behind_encoder,
    export_autoware_onnx,
    join_autoware_onnx,
)
from bevquant_export.targets.autoware._plugin import DOMAIN, AutowareFile
from bevquant_export.targets.autoware._reference import (
    PLUGIN_OPERATORS,
    compare_autoware_onnx,
    run_autoware_onnx,
    run_on_frame,
)

if TYPE_CHECKING:
    from bevquant_export._differences import TensorDifference
    from bevquant_export.lint._graph import Finding

__all__ = [
    "AUTOWARE",
    "PLUGIN_OPERATORS",
    "AutowareFile",
    "behind_encoder",
    "compare_autoware_onnx",
    "export_autoware_onnx",
    "join_autoware_onnx",
    "run_autoware_onnx",
    "run_on_frame",
]


class _Autoware(Target):
    name, title = "autoware", "Autoware's TensorRT plugins"
    kind, family, domains = "dense", "tensorrt", frozenset({DOMAIN})
    rules = (*RULES, *_tensorrt.RULES)
    unverified = (
        "neither TensorRT nor the plugin was run: files follow the plugin's source, and are run "
        "by its definition in ONNX's reference evaluator",
        "int8 needs a plugin with the attribute precision, which was not merged when this was "
        "written",
    )

    @property
    def precisions(self) -> tuple[str, ...]:
        """TensorRT's."""
        return (*super().precisions, "fp8")

    def write(self, model: nn.Module, args: Any, path: Path, **options: Any) -> AutowareFile:
        """`export_autoware_onnx`."""
        return export_autoware_onnx(model, args, path, **options)

    def compare(
        self, made: AutowareFile, model: nn.Module, args: Any
    ) -> tuple[TensorDifference, ...]:
        """`compare_autoware_onnx`, with the model's results kept in the file."""
        return compare_autoware_onnx(made, args)

    def lint(self, file: LintFile) -> Iterator[Finding]:
        """The plugin's contract, and for dense parts TensorRT's rules."""
        functions = {(f.domain, f.name) for f in file.model.functions}
        own = {(DOMAIN, node.op) for graph in file.graphs for node in graph.nodes}
        whole = file.model, file.graphs[0], file.path.parent
        yield from check_contract(*whole)
        yield from check_bindings(*whole)
        for graph in file.graphs:
            pairs = Pairs(graph, file.path.parent)
            yield from check_pairs(pairs, float8=True)
            yield from check_axis(pairs)
            # The plugin's operators are no functions, and are there all the same.
            yield from _tensorrt.check_tensorrt(pairs, functions | own)

    def commands(self, path: Path, *, quantized: bool = True) -> tuple[str, ...]:
        """For a look at the engine; the node itself builds it of the file."""
        shapes = "voxels:{0}x10x5,coors:{0}x3,num_points_per_voxel:{0}"
        profile = " ".join(
            f"--{which}Shapes={shapes.format(count)}"
            for which, count in (("min", 1), ("opt", 64000), ("max", 256000))
        )
        return (
            f"trtexec --onnx={path.name} --fp16 --staticPlugins=libautoware_tensorrt_plugins.so "
            f"{profile} --saveEngine={path.stem}.engine",
        )


AUTOWARE = _Autoware()
