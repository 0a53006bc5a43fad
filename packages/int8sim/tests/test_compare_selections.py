"""Rows of selections that a model returns, and the channels that one range erases."""

import pytest
import torch
from torch import nn

from bevquant_int8sim import compare, simulate
from bevquant_qnn import quantize_model
from bevquant_quantizers import calibrate

SELECTIONS = {
    "getitem": lambda y: y[:, :2],
    "select": lambda y: y[:, 0],
    "index_select": lambda y: y.index_select(1, torch.tensor([2, 0])),
    "gather": lambda y: y.gather(1, torch.zeros(1, 1, 8, 8).long()),
    "take_along_dim": lambda y: torch.take_along_dim(y, y.argmax(1, keepdim=True), 1),
    "topk": lambda y: y.topk(2, 1)[0],
}


class Selects(nn.Module):
    def __init__(self, name):
        super().__init__()
        self.conv, self.name = nn.Conv2d(3, 4, 1), name

    def forward(self, x):
        return SELECTIONS[self.name](self.conv(x).sigmoid())


def compared(x, name):
    net = Selects(name).eval()
    quantized = quantize_model(net, example_inputs=x).model
    report = calibrate(quantized, [x])
    return compare(net, simulate(quantized, x), [x], report=report), report


@pytest.mark.parametrize("name", SELECTIONS)
def test_a_selection_that_is_returned_has_a_row(name):
    table, _ = compared(torch.randn(1, 3, 8, 8), name)
    last = table.rows[-1]
    assert (last.path, last.op) == ("<getitem>" if name == "topk" else f"<{name}>", last.path[1:-1])
    assert last.values == {"getitem": 128, "index_select": 128, "topk": 128}.get(name, 64)
    assert last.fake_sqnr_db is not None
    assert last.fake_sqnr_db > 20


def test_channels_that_one_range_erases_are_named():
    x = torch.randn(1, 3, 8, 8) * torch.tensor([1e-3, 1.0, 100.0])[:, None, None]
    table, report = compared(x, "getitem")
    notes = [str(finding) for finding in report.findings if finding.kind == "channels"]
    assert notes
    assert list(table.notes) == notes
    assert str(table).endswith(notes[-1])
