"""Size of the source, and how often it holds an idea twice. Prints before and after.

    python benchmarks/economy.py [REVISION]

Reads the files under ``packages/*/src`` and ``apps/*/src``: as they are now and, where a git
revision is given, as they were there. It imports none of them. Counted are

- lines of each package, as ``wc -l`` counts, with the share of comment lines;
- files that name 8 or more ATen operators, as ``aten.permute`` or as a string ``"permute"``;
- classes that capture or interpret a model: `fx.Tracer`, `fx.Interpreter`, torch's modes;
- classes of results of comparisons: those with a field for SQNR, cosine, largest steps, or the
  number of differing or matched values. Names say little: many a Table compares nothing.
"""

from __future__ import annotations

import ast
import subprocess
import sys
import tarfile
from collections import Counter
from collections.abc import Iterator, Mapping
from io import BytesIO
from pathlib import Path

import torch

ROOT = Path(__file__).parent.parent
ATEN = {
    name.removeprefix("aten::").split(".")[0]
    for name in torch._C._dispatch_get_all_op_names()
    if name.startswith("aten::") and not name.startswith("aten::_")
}
TRACERS = ("Tracer", "Interpreter", "TorchFunctionMode", "TorchDispatchMode", "HybridTracer")
RESULTS = {"sqnr_db", "fake_sqnr_db", "cosine", "max_steps", "different", "differ", "matched"}


def sources(revision: str | None) -> dict[str, str]:
    """Text of each source file by path, of the working tree or of a git revision."""
    if revision is None:
        files = (
            p for folder in ("packages", "apps") for p in (ROOT / folder).glob("*/src/**/*.py")
        )
        return {p.relative_to(ROOT).as_posix(): p.read_text() for p in files}
    command = ["git", "archive", revision, "packages", "apps"]
    archive = subprocess.run(command, cwd=ROOT, check=True, capture_output=True).stdout
    with tarfile.open(fileobj=BytesIO(archive)) as tar:
        return {
            member.name: content.read().decode()
            for member in tar.getmembers()
            if "/src/" in member.name
            and member.name.endswith(".py")
            and (content := tar.extractfile(member)) is not None
        }


def operators(tree: ast.AST) -> set[str]:
    """ATen operators that a file names: ``aten.NAME``, and strings of operators' names alone."""
    named = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and ast.unparse(node.value).split(".")[-1] == "aten":
            named.add(node.attr)
        elif isinstance(node, ast.Constant) and isinstance(node.value, str):
            words = {word.removeprefix("aten::").split(".")[0] for word in node.value.split()}
            named |= words if words <= ATEN else set()
    return named


def classes(tree: ast.AST) -> Iterator[tuple[list[str], list[str]]]:
    """Fields and bases of each class of a file."""
    for node in ast.walk(tree):
        if isinstance(node, ast.ClassDef):
            fields = [ast.unparse(a.target) for a in node.body if isinstance(a, ast.AnnAssign)]
            yield fields, [ast.unparse(base).split(".")[-1] for base in node.bases]


def figures(files: Mapping[str, str]) -> dict[str, float]:
    """The counts, by the name of their line in the table."""
    counts: Counter[str] = Counter()
    comments = 0
    for path, text in files.items():
        tree = ast.parse(text)
        lines = text.splitlines()
        counts["lines"] += len(lines)
        counts[f"  {path.split('/')[1]}"] += len(lines)
        comments += sum(line.lstrip().startswith("#") for line in lines)
        counts["files"] += 1
        counts["files with 8 or more ATen operators"] += len(operators(tree)) >= 8
        for fields, bases in classes(tree):
            counts["tracers, interpreters, modes"] += any(base in TRACERS for base in bases)
            counts["result classes of comparisons"] += not RESULTS.isdisjoint(fields)
    return {**counts, "comment lines, %": 100 * comments / counts["lines"]}


def main() -> None:
    """Print the table."""
    now = figures(sources(None))
    before = figures(sources(sys.argv[1])) if sys.argv[1:] else {}
    print(f"{'':36}" + (f"{sys.argv[1][:12]:>14}" if before else "") + f"{'now':>14}")
    for name in sorted({*now, *before}, key=lambda name: (name.startswith(" "), name)):
        shown = [
            f"{part.get(name, 0):14,.{1 if '%' in name else 0}f}" for part in (before, now) if part
        ]
        print(f"{name:36}" + "".join(shown))


if __name__ == "__main__":
    main()
