"""The command ``bevquant-lint``."""

from __future__ import annotations

import argparse
import json
import sys
import textwrap
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

from bevquant_export._version import __version__
from bevquant_export.lint._lint import lint_onnx, rules
from bevquant_export.lint._predict import (
    LayerMatch,
    match_layers,
    nothing_compared,
    predict_layers,
    read_engine_layers,
)
from bevquant_export.lint._rule import Finding, Rule, quoted
from bevquant_export.targets._cpu import CPUS, HERE
from bevquant_export.targets._target import find_target, target_names, targets


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
            rows += f"{_engine(match):<10}"
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


def _engine(match: LayerMatch) -> str:
    if match.layer is None:
        return "-"
    return quoted(match.layer.runs or "not told", plain=True)


def _targets(rule: Rule) -> list[str]:
    """Names of the targets of a rule."""
    return [target.name for target in targets() if target.holds(rule)]


def _indented(text: str, by: int) -> list[str]:
    return textwrap.wrap(
        text, _WIDTH, initial_indent=" " * by, subsequent_indent=" " * by, break_long_words=True
    )
