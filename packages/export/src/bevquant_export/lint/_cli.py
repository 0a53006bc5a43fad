"""All rules of a target, applied to one file; and the command ``bevquant-lint``.

Rules on the file's metadata (calibration, free sizes) are here too.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import textwrap
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING

from bevquant_export._cpu import CPUS, HERE, cpu_at_hand, cpu_of
from bevquant_export._size_guards import first_refused, frames_of, guards_of
from bevquant_export._target import LintFile, Target, find_target, target_names, targets
from bevquant_export._version import __version__
from bevquant_export.lint import _graph, _model, _read, _shapes, _tensors
from bevquant_export.lint._graph import Finding, Rule, quoted
from bevquant_export.lint._predict import (
    LayerMatch,
    match_layers,
    nothing_compared,
    predict_layers,
    read_engine_layers,
)
from bevquant_export.lint._read import load_model
from bevquant_graph import file_path
from bevquant_quantizers import write_whole

if TYPE_CHECKING:
    import onnx

# fmt: off
POOR = Rule("CAL001", "warning",
    "the scales come from a calibration that may be right",
    "calibrate with whole, varied frames without broken values, and export again")
ASKED = Rule("ONX024", "warning",
    "the model does not ask about sizes that the file leaves free",
    "give the engine inputs of such sizes only, or take the question out of the forward, and "
    "export again")
# fmt: on
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
    *_tensors.RULES,
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
        Findings, errors first, by rule; empty if no rule is broken.

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
    reported = {finding.node for finding in shared}
    for finding in () if wrong else _shapes.check_shapes(model, graphs, target, folder):
        if finding.node not in reported:
            yield finding


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command.

    Args:
        arguments: Words after the command's name; those of the process if None.

    Returns:
        0 without errors (warnings do not count), 1 with errors, 2 for a file that cannot be read,
        or for an engine's layers without anything to compare.

    Raises:
        SystemExit: With 2 for wrong usage, with 0 after ``--help``.
    """
    parser = argparse.ArgumentParser(
        prog="bevquant-lint",
        description="Find what a target will refuse, misread or run slowly in an ONNX file.",
        epilog="Exits 1 on errors, 2 on wrong usage, an unreadable file or an engine's layers that "
        "cannot be compared, else 0.",
    )
    parser.add_argument("file", nargs="?", type=Path, metavar="FILE", help="the ONNX file")
    parser.add_argument("--target", choices=target_names(), help="what the file is for")
    parser.add_argument("--cpu", choices=(*CPUS, HERE), help="where a file for a CPU shall run")
    parser.add_argument("--json", action="store_true", help="print JSON instead of a table")
    parser.add_argument(
        "--layers", action="store_true", help="predict the type of every layer (TensorRT)"
    )
    parser.add_argument(
        "--against", type=Path, metavar="LAYERS.json",
        help="show the prediction beside what trtexec --exportLayerInfo wrote for an engine built "
        "with --profilingVerbosity=detailed",
    )  # fmt: skip
    parser.add_argument("--rules", action="store_true", help="list the rules and stop")
    parser.add_argument("--version", action="version", version=f"%(prog)s {__version__}")
    given = parser.parse_args(arguments)
    if given.rules:
        target = None if given.target is None else find_target(given.target)
        held = [rule for rule in rules() if target is None or target.holds(rule)]
        print(as_json(held) if given.json else rules_table(held))
        return 0
    if given.file is None or given.target is None:
        parser.error("FILE and --target are needed (or --rules)")
    if given.layers or given.against:
        return _layers(given.file, find_target(given.target).name, given.against, given.json)
    try:
        findings = lint_onnx(given.file, given.target, cpu=given.cpu)
    except (OSError, ValueError) as error:
        print(f"bevquant-lint: cannot read {given.file}: {error}", file=sys.stderr)
        return 2
    name = quoted(given.file.name, plain=True)
    print(as_json(findings) if given.json else findings_table(findings, name, given.target))
    return int(any(finding.severity == "error" for finding in findings))


def _layers(file: Path, target: str, against: Path | None, as_text: bool) -> int:
    """Predicted layers beside an engine's; 1 where the engine runs a layer in another type.

    2 where a file cannot be read, or the engine's layers have nothing to compare.
    """
    read = file
    try:
        predicted = predict_layers(file, target)
        read = against or file
        engine = None if against is None else read_engine_layers(against)
    except (OSError, ValueError) as error:
        print(f"bevquant-lint: cannot read {read}: {error}", file=sys.stderr)
        return 2
    matches = match_layers(predicted, engine or ())
    print(layers_json(matches) if as_text else layers_table(matches, engine is not None))
    nothing = None if engine is None else nothing_compared(matches, engine)
    if nothing is not None:
        print(f"bevquant-lint: {against} cannot be compared: {nothing}", file=sys.stderr)
        return 2
    return int(any(match.agrees is False for match in matches))


_WIDTH = 100


def findings_table(findings: Sequence[Finding], name: str, target: str) -> str:
    """One block per finding, and a line with their number.

    Example:
        >>> one = Finding("SPC002", "error", "conv0", "it has 2 inputs", "write the bias")
        >>> print(findings_table([one], "x.onnx", "libspconv"))
        RULE    SEVERITY  NODE
        SPC002  error     conv0
                          it has 2 inputs
                          → write the bias
        x.onnx for libspconv: 1 error, 0 warnings
    """
    lines = ["RULE    SEVERITY  NODE"] if findings else []
    for finding in findings:
        lines.append(f"{finding.id:<8}{finding.severity:<10}{finding.node}")
        lines += _indented(finding.reason, 18)
        lines += _indented("→ " + finding.remedy, 18)
    errors = sum(finding.severity == "error" for finding in findings)
    warnings = len(findings) - errors
    lines.append(
        f"{name} for {target}: {errors} error{'s' * (errors != 1)}, "
        f"{warnings} warning{'s' * (warnings != 1)}"
    )
    return "\n".join(lines)


def rules_table(rules: Sequence[Rule]) -> str:
    """Every rule: id, severity, targets, requirement, remedy."""
    lines = ["RULE    SEVERITY  TARGETS"]
    for rule in rules:
        lines.append(f"{rule.id:<8}{rule.severity:<10}{', '.join(_targets(rule))}")
        lines += _indented(rule.means, 18)
        lines += _indented("→ " + rule.remedy, 18)
    return "\n".join(lines)


def as_json(items: Sequence[Finding | Rule]) -> str:
    """A list of objects with the fields of `Finding` or `Rule`."""
    rows = [
        asdict(item) | ({"targets": _targets(item)} if isinstance(item, Rule) else {})
        for item in items
    ]
    return json.dumps(rows, indent=2, ensure_ascii=False)


def layers_table(matches: Sequence[LayerMatch], against: bool) -> str:
    """One line per layer: predicted type, the engine's type where known, and the reason."""
    lines = ["PREDICTED " + ("ENGINE    " if against else "") + "LAYER"]
    for match in matches:
        item = match.predicted
        rows = f"{item.runs:<10}"
        if against:
            runs = match.layer and quoted(match.layer.runs or "not told", plain=True)
            rows += f"{runs or '-':<10}"
        mark = "" if match.agrees is not False else "  ← other than predicted"
        lines.append(f"{rows}{quoted(item.name, plain=True)} ({quoted(item.op, plain=True)}){mark}")
        more = "; ".join((item.reason, *(f"reformat: {text}" for text in item.reformats)))
        lines += _indented(more, len(rows) + 2)
    counts = Counter(match.predicted.runs for match in matches if not match.predicted.into)
    rows = ", ".join(f"{count} in {runs}" for runs, count in sorted(counts.items()))
    lines.append(f"predicted kernels: {rows or 'none'}")
    if against:
        known = [match for match in matches if match.agrees is not None]
        wrong = sum(match.agrees is False for match in known)
        lines.append(
            f"engine: {len(known)} of {len(matches)} layers found with their types, {wrong} other "
            "than predicted"
        )
    return "\n".join(lines)


def layers_json(matches: Sequence[LayerMatch]) -> str:
    """A list of objects: the prediction's fields, and ``engine`` with the layer's or null."""
    rows = [
        asdict(m.predicted)
        | {"engine": None if m.layer is None else asdict(m.layer), "agrees": m.agrees}
        for m in matches
    ]
    return json.dumps(rows, indent=2, ensure_ascii=False)


def _targets(rule: Rule) -> list[str]:
    """Names of the targets of a rule."""
    return [target.name for target in targets() if target.holds(rule)]


def _indented(text: str, by: int) -> list[str]:
    return textwrap.wrap(
        text, _WIDTH, initial_indent=" " * by, subsequent_indent=" " * by, break_long_words=True
    )
