"""Transformers on pillars and points without sparse layers: any number of rows in one file."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from bevquant_export import compare_qdq_onnx, export_detector, export_qdq_onnx, open_onnx
from bevquant_qnn import quantize_model
from bevquant_quantizers import calibrate

pytest.importorskip("onnxruntime")
pytest.importorskip("onnxscript")


def table(seed: int, rows: int) -> tuple[Tensor, Tensor]:
    made = torch.Generator().manual_seed(seed)
    cells = torch.randperm(256, generator=made)[:rows]
    coords = torch.stack([cells * 0, cells // 16, cells % 16], 1)
    return torch.randn(rows, 8, generator=made), coords


class Grouped(nn.Module):
    """Attention in groups of eight pillars, sorted by window; then a map."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv, self.out = nn.Linear(8, 24), nn.Linear(8, 8)
        self.conv = nn.Conv2d(8, 4, 3, padding=1)

    def forward(self, x: Tensor, coords: Tensor) -> Tensor:
        rows, groups = x.shape[0], (x.shape[0] + 7) // 8
        _, window = torch.unique(coords[:, 1] // 4 * 4 + coords[:, 2] // 4, return_inverse=True)
        order = window.argsort(stable=True)
        place = torch.arange(groups * 8)
        place = place - (place >= rows) * 8
        qkv = self.qkv(x)[order][place].view(groups, 8, 3, 2, 4).permute(2, 0, 3, 1, 4)
        q, k, v = qkv.unbind(0)
        y = ((q @ k.transpose(-1, -2)).softmax(-1) @ v).transpose(1, 2).reshape(-1, 8)
        back = torch.zeros_like(x)
        back[order] = y[:rows]
        canvas = x.new_zeros(8, 256)
        canvas[:, coords[:, 1] * 16 + coords[:, 2]] = (self.out(back) + x).t()
        made: Tensor = self.conv(canvas.view(1, 8, 16, 16))
        return made


class Pooled(nn.Module):
    """Points of one coarser cell become one, and get its features back."""

    def __init__(self, reduce: str = "max") -> None:
        super().__init__()
        self.a, self.b, self.reduce = nn.Linear(8, 8), nn.Linear(8, 8), reduce

    def forward(self, x: Tensor, coords: Tensor) -> Tensor:
        code = coords[:, 1] // 2 * 8 + coords[:, 2] // 2
        _, cell, counts = torch.unique(code, return_inverse=True, return_counts=True)
        order = cell.argsort(stable=True)
        ends = torch.cat([counts.new_zeros(1), counts.cumsum(0)])
        made = torch.segment_reduce(self.a(x)[order], self.reduce, offsets=ends, axis=0)
        out: Tensor = self.b(made)[cell] + x
        return out


def quantized(model: nn.Module) -> nn.Module:
    torch.manual_seed(0)
    made = quantize_model(model.eval(), example_inputs=table(0, 50)).model
    calibrate(made, [table(0, 50), table(1, 90)])
    return made


@pytest.mark.parametrize("make", [Grouped, Pooled])
def test_tables_have_any_number_of_rows(make: type[nn.Module], tmp_path: Path) -> None:
    model = quantized(make())
    made = export_qdq_onnx(model, table(0, 50), tmp_path / "net.onnx", "onnxruntime")
    assert [isinstance(rows, str) for rows, _ in made.inputs.values()] == [True, True]
    run = open_onnx(made.path, "onnxruntime")
    for rows in (90, 17, 64):
        x, coords = table(2, rows)
        (got,) = run({"x": x, "coords": coords}).values()
        want = model(x, coords).detach()
        assert got.shape == want.shape
        assert (got - want).norm() < 0.05 * want.norm()
        assert not any(row.unexplained for row in compare_qdq_onnx(made, model, (x, coords)))


def test_a_detector_of_tables_runs_on_other_frames(tmp_path: Path) -> None:
    made = export_detector(
        quantized(Grouped()), table(0, 50), tmp_path, "onnxruntime", batches=[table(1, 90)]
    )
    assert [check.tensors[1] > 0 for check in made.checks] == [True, True]


@pytest.mark.parametrize("reduce", ["sum", "mean", "min"])
def test_segments_are_reduced(reduce: str, tmp_path: Path) -> None:
    model = quantized(Pooled(reduce))
    made = export_qdq_onnx(model, table(0, 50), tmp_path / "net.onnx", "onnxruntime")
    x, coords = table(3, 30)
    (got,) = open_onnx(made.path, "onnxruntime")({"x": x, "coords": coords}).values()
    want = model(x, coords).detach()
    assert (got - want).norm() < 0.02 * want.norm()


def test_rows_that_an_operator_needs_are_the_examples(tmp_path: Path) -> None:
    class Halves(Pooled):
        def forward(self, x: Tensor, coords: Tensor) -> Tensor:
            y = super().forward(x, coords)
            return F.adaptive_avg_pool1d(y.t()[None], 2)

    made = export_qdq_onnx(quantized(Halves()), table(0, 50), tmp_path / "net.onnx", "onnxruntime")
    assert made.inputs["x"] == (50, 8)
    assert re.search(
        r"test_rows_of_tables\.py:\d+.* numbers of rows are the example's", made.notes[-1]
    )
