"""All rules for a target, run over one file."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

from bevquant_export.lint import (
    _calibration,
    _horizon,
    _horizon_limits,
    _model,
    _onnxruntime,
    _qdq,
    _read,
    _spconv_convs,
    _spconv_graph,
    _spconv_numbers,
    _spconv_places,
    _structure,
    _tensorrt,
    _tensors,
    _windows,
)
from bevquant_export.lint._graph import Graph, graphs_of
from bevquant_export.lint._rule import TARGETS, Finding, Rule

if TYPE_CHECKING:
    import onnx

__all__ = ["RULES", "lint_onnx"]

RULES: tuple[Rule, ...] = (
    *(_read.UNREADABLE, _read.EMPTY, _structure.TENSOR_NAMES, _structure.NODE_NAMES),
    *(_structure.MISSING, _structure.ORDER, _structure.CYCLE, _structure.NOT_MADE),
    *(_tensors.ESCAPES, _tensors.MISSING_DATA, _tensors.SIZES),
    *(_structure.DEEP, _structure.REPEATED_ATTRIBUTE),
    *(_model.VERSIONS, _model.UNKNOWN_OP, _model.LEAKED, _model.UNREAD),
    _windows.WINDOWS,
    *sorted(
        (
            *_spconv_convs.RULES,
            *_spconv_numbers.RULES,
            *_spconv_graph.RULES,
            *_spconv_places.RULES,
        ),
        key=lambda rule: rule.id,
    ),
    *(*_qdq.RULES, *_tensorrt.RULES, *_onnxruntime.RULES),
    *(*_horizon.RULES, *_horizon_limits.RULES),
    _calibration.POOR,
)
_MOST_OF_ONE = 100


def lint_onnx(path: str | os.PathLike[str], target: str) -> list[Finding]:
    """Inspect a file for what its target refuses, misreads or runs slowly; nothing is executed.

    The file may be anything: what is no ONNX file, is cut short or claims impossible sizes gives a
    finding, in memory bounded by the size of the file. A rule is reported at most 100 times.

    Args:
        path: The file.
        target: ``"libspconv"`` (NVIDIA's sparse engine), ``"tensorrt"``, ``"onnxruntime"`` (CPU) or
            ``"horizon"`` (hb_mapper; the settings next to the file are looked at too).

    Returns:
        Findings, errors first, by rule; empty for a file that keeps all rules.

    Raises:
        ValueError: Another target.
        OSError: The file is not there, cannot be opened, or is no regular file.

    Example:
        >>> import tempfile
        >>> file = Path(tempfile.mkdtemp()) / "cut.onnx"
        >>> _ = file.write_bytes(bytes([58, 5, 10]))
        >>> [finding.id for finding in lint_onnx(file, "tensorrt")]
        ['ONX001']
    """
    if target not in TARGETS:
        raise ValueError(f"lint_onnx: target {target!r}; expected one of {', '.join(TARGETS)}")
    file = Path(path)
    model = _read.read_model(file)
    if isinstance(model, Finding):
        return [model]
    counts: Counter[str] = Counter()
    kept = []
    for finding in _findings(model, file, target):
        counts[finding.id] += 1
        if counts[finding.id] <= _MOST_OF_ONE:
            kept.append(finding)
    for rule in RULES:
        if counts[rule.id] > _MOST_OF_ONE:
            kept.append(rule.found("file", f"{counts[rule.id] - _MOST_OF_ONE} more places like it"))
    places = {rule.id: place for place, rule in enumerate(RULES)}
    return sorted(kept, key=lambda f: (f.severity != "error", places[f.id]))


def _findings(model: onnx.ModelProto, path: Path, target: str) -> Iterator[Finding]:
    folder = path.parent
    graphs: list[Graph] = []
    for item in graphs_of(model):
        if isinstance(item, Graph):
            graphs.append(item)
        else:
            node, depth = item
            yield _structure.DEEP.found(node.name, f"it holds a graph at depth {depth + 1}")
    for graph in graphs:
        yield from _structure.check_structure(graph)
    yield from _model.check_model(model, graphs, target, folder)
    yield from _calibration.check_calibration(model)
    if target == "libspconv":
        yield from _spconv_graph.check_graph(graphs[0])
        yield from _spconv_convs.check_convs(graphs[0], folder)
        yield from _spconv_numbers.check_numbers(graphs[0], folder)
        yield from _spconv_places.check_places(graphs[0])
        return
    functions = {(f.domain, f.name) for f in model.functions}
    if target == "horizon":
        yield from _horizon.check_opset(graphs[0].opsets)
    for graph in graphs:
        yield from _windows.check_windows(graph)
        pairs = _qdq.Pairs(graph, folder)
        yield from _qdq.check_pairs(pairs)
        if target == "horizon":
            yield from _horizon.check_horizon(pairs, path)
            yield from _horizon_limits.check_limits(pairs)
            continue
        yield from _qdq.check_axis(pairs)
        if target == "tensorrt":
            yield from _tensorrt.check_tensorrt(pairs, functions)
        else:
            yield from _onnxruntime.check_onnxruntime(pairs)
