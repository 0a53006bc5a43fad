"""Choices among equal scores: a right file is written, one with another choice is refused."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

pytest.importorskip("onnxscript", reason="the float extra is not installed")

from bevquant_export import _float_file as floats_module
from bevquant_export import compare_float_onnx, export_float_onnx, export_qdq_onnx
from bevquant_export.runtime._alike import StableChoices
from bevquant_qnn import quantize_model
from bevquant_quantizers import calibrate


class Head(nn.Module):
    """A heat map with empty cells, the best of which choose columns of a map."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind = kind
        self.stem, self.heat = nn.Conv2d(3, 4, 3, padding=1), nn.Conv2d(4, 2, 1)
        self.columns = nn.Conv2d(4, 8, 1)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        y = self.stem(x).relu()
        scores, columns = self.heat(y).sigmoid().flatten(1), self.columns(y).flatten(2)
        if self.kind == "topk":
            best = scores.topk(400).indices
        elif self.kind == "unsorted":
            best = scores.topk(400, sorted=False).indices
        elif self.kind == "smallest":
            best = scores.topk(400, largest=False, sorted=True)[1]
        elif self.kind == "sort":
            best = torch.sort(scores, dim=-1, descending=True)[1][..., :400]
        else:
            best = scores.argsort(dim=-1)[..., :400]
        best = best % columns.shape[2]
        return columns.gather(2, best[:, None].expand(-1, 8, -1)), best


def empty_cells() -> Tensor:
    torch.manual_seed(0)
    x = torch.randn(1, 3, 16, 16)
    x[:, :, 4:] = 0
    return x


@pytest.mark.parametrize("kind", ["topk", "unsorted", "smallest", "sort", "argsort"])
def test_equal_scores_are_no_difference(tmp_path: Path, kind: str) -> None:
    net, x = Head(kind).eval(), empty_cells()
    file = export_float_onnx(net, x, tmp_path / "net.onnx")
    assert "equal scores" in str(file)
    assert all(row.relative < 1e-5 for row in compare_float_onnx(file, net, x))
    model = quantize_model(net, example_inputs=x).model
    calibrate(model, [x])
    assert "equal scores" in str(export_qdq_onnx(model, x, tmp_path / "q.onnx", "onnxruntime"))


def test_another_choice_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    right = floats_module.exported

    def smallest(*args: object, **kwargs: object) -> object:
        proto = right(*args, **kwargs)
        node = next(node for node in proto.graph.node if node.op_type == "TopK")
        next(a for a in node.attribute if a.name == "largest").i = 0
        return proto

    monkeypatch.setattr(floats_module, "exported", smallest)
    with pytest.raises(ValueError, match="other than torch"):
        export_float_onnx(Head("topk").eval(), empty_cells(), tmp_path / "net.onnx")


@pytest.mark.parametrize("shape", [(), (0,), (3, 0), (2, 5)])
def test_only_the_order_of_equal_values_changes(shape: tuple[int, ...]) -> None:
    x = torch.randn(shape).round()
    wanted = torch.sort(x, descending=True).values
    with StableChoices() as choices:
        values, order = torch.sort(x, descending=True)
        least = x.topk(min(x.shape[-1], 2), largest=False).values if x.dim() else x
    assert torch.equal(values, wanted)
    if x.dim():
        assert torch.equal(x.gather(-1, order), values)
        assert torch.equal(least, wanted.flip(-1)[..., : least.shape[-1]])
    assert bool(choices.notes()) == (choices.ties > 0)


@pytest.mark.parametrize("least", [False, True])
def test_scores_that_rounding_may_swap_are_named(least: bool) -> None:
    x = torch.tensor([[0.5, 1.0, 1.0 + 2**-22, 0.5 + 2**-22, 0.25]])
    x = -x if least else x
    for columns, count, close in (([0, 1, 2], 1, True), ([0, 1, 4], 2, False), ([0, 3], 1, True)):
        with StableChoices() as choices:
            x[:, columns].topk(count, largest=not least)
        assert bool(choices.close) is close
        assert ("distinct scores" in choices.doubt) is close
    with StableChoices() as choices:
        (x > 0.6).sort(descending=True)
        (x > 0.6).long().argsort()
    assert not choices.doubt
