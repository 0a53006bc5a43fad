"""A detector as one file for ONNX Runtime, where its parts have no form of their own.

Voxels are functions of this file, with any number of rows, and the forward's decisions are checked
in it.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path
from typing import Any

from torch import nn

from bevquant_export._errors import UnsplitError
from bevquant_export.dense import QdqFile
from bevquant_export.dense._source import program_of
from bevquant_export.dense.verify._compare import verified
from bevquant_export.detector._chain import DetectorExport, FrameCheck, counted, same_frame
from bevquant_export.lint import lint_onnx
from bevquant_export.targets.qdq import QdqTarget
from bevquant_graph import problem_of, reported_by


@reported_by("export_detector")
def one_file(
    model: nn.Module, frames: list[Any], engine: QdqTarget, path: Path, why: UnsplitError,
    **options: Any,
) -> DetectorExport:  # fmt: skip
    """Write all of a model, and run the example and the first frame of its decisions through it.

    `frames` are the example and further frames, `why` is the problem of the model's parts.
    """
    example, *others = frames
    file = engine.write(model, example, path, **options)
    file = replace(file, notes=(f"one file, as {why.place} has no form in a part", *file.notes))
    checks = []
    if options["verify"]:
        checks = [FrameCheck("example", tensors=counted(file.differences))]
        checks += _first(file, example, others, sums=bool(options.get("integer_sums")))
    return DetectorExport(
        folder=path.parent,
        target=engine.name,
        sparse=None,
        dense=file,
        outputs={name: (path.name, name) for name in file.outputs},
        findings=tuple(lint_onnx(path, engine.name)),
        checks=tuple(checks),
    )


def _first(file: QdqFile, example: Any, frames: Iterable[Any], *, sums: bool) -> list[FrameCheck]:
    """The first other frame that the integer model takes; else the reason for the last one."""
    checks: list[FrameCheck] = []
    integers = file.integer_model
    assert integers is not None
    assert integers.source is not None
    for number, frame in enumerate(frames):
        name = f"batches[{number}]"
        if same_frame(integers.source.graph, frame, example):
            continue
        try:
            integers.run(frame, record=False)
        except ValueError as error:
            checks = [FrameCheck(name, not_run=problem_of(error))]
            continue
        program = program_of(integers, frame, sums, verify=False)
        ran = verified(file, file.path.read_bytes(), program, frame, integer_sums=sums)
        return [FrameCheck(name, tensors=counted(ran.differences))]
    return checks
