"""Findings and rules as a table or as JSON."""

from __future__ import annotations

import json
import textwrap
from collections.abc import Sequence
from dataclasses import asdict

from bevquant_export.lint._rule import Finding, Rule
from bevquant_export.targets._registry import targets

__all__ = ["as_json", "findings_table", "rules_table"]

_WIDTH = 100


def findings_table(findings: Sequence[Finding], name: str, target: str) -> str:
    """One block a finding, and a line that counts them.

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
    """Every rule: id, severity, targets, what a file must be, what to do."""
    lines = ["RULE    SEVERITY  TARGETS"]
    for rule in rules:
        lines.append(f"{rule.id:<8}{rule.severity:<10}{', '.join(_targets(rule))}")
        lines += _indented(rule.means, 18)
        lines += _indented("→ " + rule.remedy, 18)
    return "\n".join(lines)


def as_json(items: Sequence[Finding | Rule]) -> str:
    """A list of objects with the fields of `Finding` or `Rule`."""
    told = [
        asdict(item) | ({"targets": _targets(item)} if isinstance(item, Rule) else {})
        for item in items
    ]
    return json.dumps(told, indent=2, ensure_ascii=False)


def _targets(rule: Rule) -> list[str]:
    """Names of the targets that a rule holds for."""
    return [target.name for target in targets() if target.holds(rule)]


def _indented(text: str, by: int) -> list[str]:
    return textwrap.wrap(
        text, _WIDTH, initial_indent=" " * by, subsequent_indent=" " * by, break_long_words=True
    )
