"""All rules of a target, applied to one file; among them the rules on the file's metadata."""

from __future__ import annotations

import json
import os
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from bevquant_export._size_guards import first_refused, frames_of, guards_of
from bevquant_export.lint import (
    _graph,
    _model,
    _qdq,
    _read,
    _shapes,
    _tensors,
)
from bevquant_export.lint._read import load_model
from bevquant_export.lint._rule import Finding, Rule, quoted
from bevquant_export.targets._cpu import CPUS, HERE, cpu_at_hand, cpu_of
from bevquant_export.targets._target import LintFile, Target, find_target, target_names, targets
from bevquant_graph import file_path
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


ASKED = Rule(
    "ONX024",
    "warning",
    "the model does not ask about sizes that the file leaves free",
    "give the engine inputs of such sizes only, or take the question out of the forward, and "
    "export again",
)


def check_guards(model: onnx.ModelProto) -> Iterator[Finding]:
    """Report the conditions in a file's metadata, which engines do not read, and damaged ones."""
    try:
        guards, _ = guards_of(model), frames_of(model)
    except ValueError as error:
        yield ASKED.found("file", str(error))
        return
    for guard in guards:
        if first_refused(guard) is None:
            continue
        yield ASKED.found(guard.sizes[0][0], f"the file is right where {quoted(guard, plain=True)}")


_SHARED: tuple[Rule, ...] = (
    *(_read.UNREADABLE, _read.EMPTY, _graph.TENSOR_NAMES, _graph.NODE_NAMES),
    *(_graph.MISSING, _graph.ORDER, _graph.INNER_ORDER, _graph.CYCLE, _graph.NOT_MADE),
    *(_tensors.ESCAPES, _tensors.MISSING_DATA, _tensors.SIZES),
    *(_graph.DEEP, _graph.REPEATED_ATTRIBUTE),
    *(_model.VERSIONS, _model.UNKNOWN_OP, _model.LEAKED, _model.UNREAD),
    *(_model.WINDOWS, _model.CHANNELS, _model.SIZES),
    *(_shapes.SHAPES, _shapes.FREE, _shapes.FORM),
    *_qdq.RULES,
    POOR,
    ASKED,
)
_MOST_OF_ONE = 100


def rules() -> tuple[Rule, ...]:
    """Every rule: those of all files, then each target's own."""
    return tuple(dict.fromkeys((*_SHARED, *(rule for t in targets() for rule in t.rules))))


def lint_onnx(
    path: str | os.PathLike[str], target: str, *, cpu: str | None = None
) -> list[Finding]:
    """Report what a file's target refuses, misreads or runs slowly. Nothing is executed.

    The file may have any content. Files that are not ONNX, truncated files and impossible sizes
    give a finding, with memory bounded by the size of the file. Each rule is reported at most 100
    times.

    Args:
        path: The file.
        target: ``"libspconv"`` (NVIDIA's sparse engine), ``"tensorrt10"`` (``"tensorrt"``),
            ``"tensorrt11"``, ``"onnxruntime"`` (CPU), ``"openvino"`` (CPU), ``"horizon"``
            (hb_mapper; its settings beside the file are read too), or another name of
            `bevquant_export.targets.target_names`.
        cpu: CPU on which a file for CPUs will run: ``"vnni"``, ``"any"`` or ``"here"``
            (`cpu_at_hand`). Default: the CPU in the file's metadata, else ``"any"``.

    Returns:
        Findings, errors first, by rule; empty where no rule is broken.

    Raises:
        ValueError: An unknown target or CPU.
        OSError: The file does not exist (FileNotFoundError), cannot be opened, or is not a regular
            file.

    Example:
        >>> import tempfile
        >>> file = Path(tempfile.mkdtemp()) / "cut.onnx"
        >>> _ = file.write_bytes(bytes([58, 5, 10]))
        >>> [finding.id for finding in lint_onnx(file, "tensorrt")]
        ['ONX001']
    """
    if target not in target_names():
        raise ValueError(
            f"lint_onnx: target {target!r}; expected one of {', '.join(target_names())}"
        )
    engine = find_target(target)
    if cpu is not None and cpu not in (*CPUS, HERE):
        raise ValueError(f"lint_onnx: cpu {cpu!r}; expected one of {', '.join((*CPUS, HERE))}")
    cpu = cpu_at_hand() if cpu == HERE else cpu
    file = file_path(path, "ONNX file")
    model = _read.read_model(file)
    if isinstance(model, Finding):
        return [model]
    counts: Counter[str] = Counter()
    kept = []
    for finding in _findings(model, file, engine, cpu or cpu_of(model)):
        counts[finding.id] += 1
        if counts[finding.id] <= _MOST_OF_ONE:
            kept.append(finding)
    every = rules()
    for rule in every:
        if counts[rule.id] > _MOST_OF_ONE:
            kept.append(rule.found("file", f"{counts[rule.id] - _MOST_OF_ONE} more places like it"))
    places = {rule.id: place for place, rule in enumerate(every)}
    return sorted(kept, key=lambda f: (f.severity != "error", places[f.id]))


def _findings(model: onnx.ModelProto, path: Path, target: Target, cpu: str) -> Iterator[Finding]:
    graphs: list[_graph.Graph] = []
    for item in _graph.graphs_of(model):
        if isinstance(item, _graph.Graph):
            graphs.append(item)
        else:
            yield item
    shared = [finding for graph in graphs for finding in _graph.check_structure(graph)]
    shared += _model.check_model(model, graphs, target, path.parent)
    yield from shared
    yield from _shapes.free_sizes(graphs)
    if target.kind == "dense":
        yield from _shaped(model, graphs, target, path.parent, shared)
    yield from check_calibration(model)
    yield from check_guards(model)
    yield from target.lint(LintFile(path, model, graphs, cpu))


def _shaped(
    model: onnx.ModelProto,
    graphs: list[_graph.Graph],
    target: Target,
    folder: Path,
    shared: list[Finding],
) -> Iterator[Finding]:
    """Inferred shapes and types, where the structure allows it."""
    stops = [f for f in shared if f.severity == "error" and f.id != _model.CHANNELS.id]
    if stops or any(f.id == _graph.ORDER.id for f in shared):
        return
    wrong = list(_shapes.check_forms(model, graphs, target))
    yield from wrong
    told = {finding.node for finding in shared}
    for finding in () if wrong else _shapes.check_shapes(model, graphs, target, folder):
        if finding.node not in told:
            yield finding
