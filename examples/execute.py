"""Run a notebook's cells and write their outputs into it: `python examples/execute.py NOTEBOOK …`.

For a change of the code cells: edit them, run this, look at the notebook. No Jupyter is needed.
"""

from __future__ import annotations

import ast
import io
import json
import os
import sys
import tempfile
from contextlib import chdir, redirect_stderr, redirect_stdout
from pathlib import Path
from typing import Any


def run_cell(source: str, names: dict[str, Any]) -> tuple[str, Any]:
    """Execute a cell; its printed text, and the value of an expression in its last line."""
    tree = ast.parse(source)
    last = tree.body.pop() if tree.body and isinstance(tree.body[-1], ast.Expr) else None
    printed, value = io.StringIO(), None
    with redirect_stdout(printed), redirect_stderr(io.StringIO()):
        exec(compile(tree, "cell", "exec"), names)
        if isinstance(last, ast.Expr):
            value = eval(compile(ast.Expression(last.value), "cell", "eval"), names)
    return printed.getvalue(), value


def code_cells(notebook: dict[str, Any]) -> list[dict[str, Any]]:
    """The cells that are run, in order."""
    return [cell for cell in notebook["cells"] if cell["cell_type"] == "code"]


def execute(path: Path) -> None:
    """Run all cells in a temporary folder, in one namespace, and store what they show."""
    notebook = json.loads(path.read_text(encoding="utf-8"))
    names: dict[str, Any] = {"__name__": "__main__"}
    with tempfile.TemporaryDirectory() as folder, chdir(folder):
        for number, cell in enumerate(code_cells(notebook), 1):
            printed, value = run_cell("".join(cell["source"]), names)
            outputs: list[dict[str, Any]] = []
            if printed:
                lines = printed.replace(folder + os.sep, "").splitlines(keepends=True)
                outputs.append({"name": "stdout", "output_type": "stream", "text": lines})
            if value is not None:
                data = {"text/plain": str(value).splitlines(keepends=True)}
                if hasattr(value, "_repr_html_"):
                    data["text/html"] = value._repr_html_().splitlines(keepends=True)
                outputs.append(
                    {"data": data, "execution_count": number, "metadata": {},
                     "output_type": "execute_result"}
                )  # fmt: skip
            cell["outputs"], cell["execution_count"] = outputs, number
    path.write_text(json.dumps(notebook, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")


if __name__ == "__main__":
    for argument in sys.argv[1:]:
        execute(Path(argument).resolve())
