"""The command ``bevquant-lint``."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from bevquant_export.lint._lint import lint_onnx, rules
from bevquant_export.lint._render import as_json, findings_table, rules_table
from bevquant_export.lint._rule import quoted
from bevquant_export.targets._registry import find_target, target_names

__all__ = ["main"]


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command.

    Args:
        arguments: Words after the command's name; those of the process if None.

    Returns:
        0 without errors (warnings do not count), 1 with errors, 2 for a file that cannot be read.

    Raises:
        SystemExit: With 2 for wrong usage, with 0 after ``--help``.
    """
    parser = argparse.ArgumentParser(
        prog="bevquant-lint",
        description="Find what a target will refuse, misread or run slowly in an ONNX file.",
        epilog="Exits 1 on errors, 2 on wrong usage or an unreadable file, else 0.",
    )
    parser.add_argument("file", nargs="?", type=Path, metavar="FILE", help="the ONNX file")
    parser.add_argument("--target", choices=target_names(), help="what the file is for")
    parser.add_argument("--json", action="store_true", help="print JSON instead of a table")
    parser.add_argument("--rules", action="store_true", help="list the rules and stop")
    given = parser.parse_args(arguments)
    if given.rules:
        target = None if given.target is None else find_target(given.target)
        held = [rule for rule in rules() if target is None or target.holds(rule)]
        print(as_json(held) if given.json else rules_table(held))
        return 0
    if given.file is None or given.target is None:
        parser.error("FILE and --target are needed (or --rules)")
    try:
        findings = lint_onnx(given.file, given.target)
    except (OSError, ValueError) as error:
        print(f"bevquant-lint: cannot read {given.file}: {error}", file=sys.stderr)
        return 2
    name = quoted(given.file.name, plain=True)
    print(as_json(findings) if given.json else findings_table(findings, name, given.target))
    return int(any(finding.severity == "error" for finding in findings))
