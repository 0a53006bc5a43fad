"""Messages are made by the code that raises them: nobody cuts or replaces text in another's."""

from __future__ import annotations

import ast
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from bevquant_export import export_qdq_onnx, export_sparse_onnx
from bevquant_int8sim import simulate
from bevquant_qnn import quantize_model

ROOT = Path(__file__).parent.parent
EDITS = {"replace", "removeprefix", "removesuffix"}
# Messages of Python itself, which carry no fields.
ALLOWED = {"packages/hybrid/src/bevquant_hybrid/_fx/_recipes.py"}


def edited(tree: ast.AST) -> list[int]:
    """Lines of ``str(error).replace(…)`` and the like, `error` bound by an ``except``."""
    caught = {n.name for n in ast.walk(tree) if isinstance(n, ast.ExceptHandler)}
    return [
        node.lineno
        for node in ast.walk(tree)
        if isinstance(node, ast.Call)
        and isinstance(node.func, ast.Attribute)
        and node.func.attr in EDITS
        and isinstance(node.func.value, ast.Call)
        and ast.unparse(node.func.value.func) == "str"
        and {ast.unparse(a) for a in node.func.value.args} & caught
    ]


def test_no_message_is_edited() -> None:
    files = [p for top in ("packages", "apps") for p in (ROOT / top).glob("*/src/**/*.py")]
    found = set()
    for path in files:
        text = path.read_text()
        if "str(" in text and any(f".{name}(" in text for name in EDITS):  # a few of them
            found |= {f"{path.relative_to(ROOT)}:{line}" for line in edited(ast.parse(text))}
    assert {f.partition(":")[0] for f in found} <= ALLOWED, sorted(found)


class _Branches(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(3, 4, 1)

    def forward(self, x: Tensor) -> Tensor:
        return self.conv(x) if float(x.sum()) > 0 else self.conv(-x)


@pytest.mark.parametrize("called", [simulate, export_qdq_onnx, export_sparse_onnx])
def test_the_function_that_was_called_is_named_first(
    called: Callable[..., Any], tmp_path: Path
) -> None:
    x, more = torch.ones(1, 3, 4, 4), () if called is simulate else (tmp_path / "net.onnx",)
    uncalibrated = quantize_model(nn.Sequential(nn.Conv2d(3, 4, 1)).eval(), example_inputs=x).model
    training = nn.Sequential(nn.Conv2d(3, 4, 1))
    for model in (uncalibrated, training, _Branches().eval()):
        with pytest.raises(ValueError, match=f"^{called.__name__}: "):
            called(model, x, *more)
