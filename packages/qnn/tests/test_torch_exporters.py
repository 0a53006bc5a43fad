"""torch's own exporters write the fake quantization of `use_fb_fake_quant` as QDQ pairs."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from bevquant_qnn import QuantConfig, freeze, learn_ranges, quantize_model
from bevquant_quantizers import TensorQuantizer, calibrate


class Residual(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Conv2d(3, 4, 3, padding=1), nn.Conv2d(4, 4, 1)

    def forward(self, x: Any) -> Any:
        x = torch.relu(self.first(x))
        return torch.cat([self.second(x) + x, x], 1)


NETS: dict[str, tuple[nn.Module, tuple[int, ...], int]] = {
    "dense": (nn.Sequential(nn.Conv2d(3, 8, 3), nn.ReLU(), nn.Conv2d(8, 4, 1)), (1, 3, 8, 8), 4),
    "transposed": (nn.Sequential(nn.ConvTranspose2d(3, 4, 2)), (1, 3, 5, 5), 2),
    "linear": (nn.Sequential(nn.Linear(6, 5), nn.ReLU(), nn.Linear(5, 2)), (3, 6), 4),
    "residual": (Residual(), (1, 3, 6, 6), 4),
}


def calibrated(kind: str, per_channel: bool, state: str) -> tuple[nn.Module, torch.Tensor, int]:
    torch.manual_seed(0)
    net, shape, pairs = NETS[kind]
    x = torch.randn(shape)
    config = QuantConfig(weight_per_channel=per_channel)
    model = quantize_model(net.eval(), config, x).model
    calibrate(model, [x])
    if state == "frozen":
        freeze(model)
    if state == "learned":
        learn_ranges(model)
    return model, x, pairs


STATES = [*((kind, "calibrated") for kind in NETS), ("dense", "frozen"), ("dense", "learned")]


# Each two values of the three settings meet: every state has both of each switch, in two cases.
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(
    ("kind", "state", "per_channel", "dynamo"),
    [
        (*state, per_channel, per_channel == (number % 2 == 0))
        for number, state in enumerate(STATES)
        for per_channel in (True, False)
    ],
)
def test_files_hold_pairs(
    kind: str,
    state: str,
    per_channel: bool,
    dynamo: bool,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    onnx = pytest.importorskip("onnx")
    pytest.importorskip("onnxscript")
    monkeypatch.setattr(TensorQuantizer, "use_fb_fake_quant", True)
    model, x, pairs = calibrated(kind, per_channel, state)
    file = tmp_path / "model.onnx"
    with torch.no_grad():
        torch.onnx.export(model, (x,), file, dynamo=dynamo, verbose=False)
    kinds = [node.op_type for node in onnx.load(file).graph.node]
    assert (kinds.count("QuantizeLinear"), kinds.count("DequantizeLinear")) == (pairs, pairs)


# As above: every kind with both states and both values of the switch.
@pytest.mark.parametrize(
    ("kind", "state", "switch"),
    [
        (kind, state, (number % 2 == 0) == (state == "calibrated"))
        for number, kind in enumerate(NETS)
        for state in ("calibrated", "learned")
    ],
)
def test_programs_compute_the_same(
    kind: str, state: str, switch: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(TensorQuantizer, "use_fb_fake_quant", switch)
    model, x, _ = calibrated(kind, True, state)
    with torch.no_grad():
        wanted = model(x)
        assert torch.equal(torch.export.export(model, (x,)).module()(x), wanted)
        torch._dynamo.reset()
        assert torch.equal(torch.compile(model, backend="aot_eager")(x), wanted)
