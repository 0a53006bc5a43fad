"""Findings on a file's calibration, in its metadata."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

from bevquant_export.lint._read import load_model
from bevquant_export.lint._rule import Finding, Rule, quoted
from bevquant_quantizers import write_whole

if TYPE_CHECKING:
    import onnx

POOR = Rule(
    "CAL001",
    "warning",
    "the scales come from a calibration that may be right",
    "calibrate with whole, varied frames without broken values, and export again",
)
_KEY = "bevquant.calibration"


def note_calibration(path: str | os.PathLike[str], findings: Sequence[object]) -> None:
    """Write findings on the calibration into a file's metadata, where the linter reports them.

    Engines do not read the metadata. Without findings, the file is not changed.

    Args:
        path: An ONNX file.
        findings: Texts, such as `CalibrationReport.poor` of `bevquant_quantizers`.

    Example:
        >>> import tempfile, pathlib, onnx
        >>> graph = onnx.helper.make_graph([onnx.helper.make_node("Relu", ["a"], ["b"])], "g",
        ...     *([onnx.helper.make_tensor_value_info(n, 1, [1])] for n in "ab"))
        >>> file = pathlib.Path(tempfile.mkdtemp(), "relu.onnx")
        >>> _ = file.write_bytes(onnx.helper.make_model(graph).SerializeToString())
        >>> note_calibration(file, ["conv1: all zero"])
        >>> [item.reason for item in check_calibration(onnx.load(file))]
        ["'conv1: all zero'"]
    """
    if not findings:
        return

    model = load_model(path, external_data=False)
    entry = model.metadata_props.add()
    entry.key, entry.value = _KEY, json.dumps([str(finding) for finding in findings])
    write_whole(path, model.SerializeToString(deterministic=True))


def check_calibration(model: onnx.ModelProto) -> Iterator[Finding]:
    """Return the findings that `note_calibration` wrote."""
    for entry in model.metadata_props:
        if entry.key == _KEY:
            for text in _texts(entry.value):
                yield POOR.found("file", quoted(text))


def _texts(value: str) -> list[object]:
    """The findings; the whole text where another tool wrote it."""
    try:
        texts = json.loads(value)
    except (ValueError, RecursionError):
        return [value]
    return texts if isinstance(texts, list) else [value]
