"""Models of other packages: what they say of themselves is written and compared."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from bevquant_export import QdqProgram, compare_qdq_onnx, export_qdq_onnx, lint_onnx
from bevquant_int8sim.program import (
    PROGRAM_READERS,
    FloatCall,
    Integers,
    Program,
    Quantize,
    Ref,
    Value,
)


class Grid(nn.Module):
    """Rounds to steps of a tenth: what another package's models consist of."""

    def forward(self, x: Tensor) -> Tensor:
        return (x / 0.1).round().clamp(-128, 127) * 0.1


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.grid = Grid()

    def forward(self, picture: Tensor) -> Tensor:
        return torch.clamp(self.grid(picture), -0.35, 2.0)


class _Said:
    """Rounding, and a clamp whose bounds are steps."""

    names: Mapping[str, str] = {"x": "picture"}

    def __init__(self, model: nn.Module) -> None:
        form = Integers(float(torch.tensor(0.1)), 8, -128, 127)
        bounds = {"min": -4 * form.scale, "max": 20 * form.scale}
        self.program = Program(
            signature=((Ref("x"),), {}),
            sparse_inputs={},
            steps=(
                Quantize("grid", (Ref("x"),), ("q",), form=form),
                FloatCall("", (Ref("q"),), ("y",), bounds, name="clamp"),
            ),
            values={"x": Value("float", "x"), "q": Value(form, "q"), "y": Value(form, "y")},
            result=Ref("y"),
        )  # fmt: skip

    def run(self, inputs: Any, *, observe: Callable[..., None]) -> Any:
        q = (inputs / torch.tensor(0.1)).round().clamp(-128, 127).to(torch.int8)
        y = q.clamp(-4, 20)
        for step, value in zip(self.program.steps, (q, y), strict=True):
            observe(step, (), (value,))
        return y


@pytest.mark.parametrize("profile", ["tensorrt", "onnxruntime", "horizon"])
def test_a_model_that_says_its_program_is_written(
    profile: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(PROGRAM_READERS, Grid, lambda model, args: _Said(model))
    x = torch.linspace(-3, 3, 60).view(1, 3, 4, 5)
    file = export_qdq_onnx(Model(), x, tmp_path / "net.onnx", profile)
    assert file.inputs == {"picture": (1, 3, 4, 5)}
    assert lint_onnx(file.path, profile) == []
    differences = compare_qdq_onnx(file, Model(), x)
    # hb_mapper's file has one pair: a clamp hands on the scale of what it clamps.
    assert [d.op for d in differences] == ["quantize", "float"][: 1 if profile == "horizon" else 2]
    assert all(d.different == 0 for d in differences)


def test_what_a_package_refuses_is_what_the_caller_reads(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(model: nn.Module, args: Any) -> QdqProgram:
        raise ValueError("export_qdq_onnx: grid: no steps seen")

    monkeypatch.setitem(PROGRAM_READERS, Grid, refuse)
    model = nn.Sequential(Grid())
    with pytest.raises(ValueError, match=r"^export_qdq_onnx: grid: no steps seen$"):
        export_qdq_onnx(model, torch.ones(1, 3), tmp_path / "net.onnx")
    assert list(tmp_path.iterdir()) == []
