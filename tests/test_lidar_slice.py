"""fusion, quantizers, qnn and sparse together, on a residual sparse network in spconv's modules."""

from __future__ import annotations

import copy
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from bevquant_fusion import fuse_model
from bevquant_qnn import QuantSparseConvolution, quantize_model
from bevquant_quantizers import calibrate, load_ranges, quantization_disabled, save_ranges
from bevquant_sparse import use_bevquant_kernels

with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    spconv = pytest.importorskip("spconv.pytorch", reason="spconv is not installed")


class Block(spconv.SparseModule):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.conv1 = spconv.SubMConv3d(width, width, 3, padding=1, bias=False, indice_key="subm")
        self.bn1 = nn.BatchNorm1d(width)
        self.relu = nn.ReLU(inplace=True)
        self.conv2 = spconv.SubMConv3d(width, width, 3, padding=1, bias=False, indice_key="subm")
        self.bn2 = nn.BatchNorm1d(width)

    def forward(self, x: Any) -> Any:
        out = self.conv1(x)
        out = out.replace_feature(self.relu(self.bn1(out.features)))
        out = self.conv2(out)
        out = out.replace_feature(self.bn2(out.features) + x.features)
        return out.replace_feature(self.relu(out.features))


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.stem = spconv.SparseSequential(
            spconv.SubMConv3d(5, 16, 3, padding=1, bias=False, indice_key="subm"),
            nn.BatchNorm1d(16),
            nn.ReLU(),
        )
        self.stage = spconv.SparseSequential(Block(16), Block(16))
        self.down = spconv.SparseSequential(
            spconv.SparseConv3d(16, 32, 3, stride=2, padding=1, bias=False, indice_key="down"),
            nn.BatchNorm1d(32),
            nn.ReLU(),
        )
        self.up = spconv.SparseInverseConv3d(32, 8, 3, bias=False, indice_key="down")

    def forward(self, x: Any) -> Any:
        return self.up(self.down(self.stage(self.stem(x))))


def frame(seed: int) -> Any:
    generator = torch.Generator().manual_seed(seed)
    occupied = torch.rand(2, 8, 24, 24, generator=generator) < 0.05
    indices = occupied.nonzero().int()
    features = torch.randn(len(indices), 5, generator=generator)
    return spconv.SparseConvTensor(features, indices.contiguous(), [8, 24, 24], 2)


def float_net() -> Net:
    torch.manual_seed(0)
    net = Net().eval()
    for module in net.modules():
        if isinstance(module, nn.BatchNorm1d):
            module.running_mean.normal_(0, 0.2)
            module.running_var.uniform_(0.05, 0.2)
            nn.init.normal_(module.weight)
            nn.init.normal_(module.bias, std=0.1)
    use_bevquant_kernels(net)
    return net


def quantized_net() -> nn.Module:
    fused = fuse_model(float_net(), frame(0)).model
    return quantize_model(fused, example_inputs=frame(0)).model


def sqnr_db(reference: Tensor, other: Tensor) -> float:
    noise = (reference - other).square().sum()
    return float((10 * torch.log10(reference.square().sum() / noise)).detach())


def test_folding_keeps_the_function_and_the_float_model() -> None:
    net = float_net().double()
    before = copy.deepcopy(net.state_dict())
    x = frame(1)
    x = x.replace_feature(x.features.double())
    expected = net(x).features
    result = fuse_model(net, x)
    assert not result.skipped
    assert len(result.fused) == 6
    assert not any(isinstance(m, nn.BatchNorm1d) for m in result.model.modules())
    error = (result.model(x).features - expected).abs().max() / expected.abs().max()
    assert float(error.detach()) <= 1e-10
    after = net.state_dict()
    assert all(torch.equal(after[k], before[k]) for k in before)


def test_calibrated_model_follows_the_float_model() -> None:
    net, quantized = float_net(), quantized_net()
    calibrate(quantized, [frame(s) for s in range(3)], method="mse")
    unseen = frame(7)
    expected = net(unseen).features
    with quantization_disabled(quantized):
        torch.testing.assert_close(quantized(unseen).features, expected, rtol=1e-4, atol=1e-4)
    assert sqnr_db(expected, quantized(unseen).features) > 20


def test_one_quantizer_per_tensor() -> None:
    quantized = quantized_net()
    first, second = quantized.get_submodule("stage.0"), quantized.get_submodule("stage.1")
    down = quantized.get_submodule("down.0")
    for block in (first, second):
        assert block.conv1._input_quantizer is block.quant_add._input_quantizer
    assert first.conv1._input_quantizer is not second.conv1._input_quantizer
    assert down._input_quantizer is not second.conv1._input_quantizer


def test_ranges_and_weights_rebuild_the_model(tmp_path: Path) -> None:
    quantized = quantized_net()
    calibrate(quantized, [frame(0)])
    save_ranges(quantized, tmp_path / "ranges.json")
    other = quantized_net()
    load_ranges(other, tmp_path / "ranges.json")
    assert torch.equal(other(frame(3)).features, quantized(frame(3)).features)


def test_training_moves_the_float_weights_and_lowers_the_loss() -> None:
    torch.manual_seed(0)
    quantized = quantized_net()
    calibrate(quantized, [frame(0)])
    target = frame(0)
    wanted = torch.randn(len(target.features), 8)
    weights = [m.weight for m in quantized.modules() if isinstance(m, QuantSparseConvolution)]
    before = [w.detach().clone() for w in weights]
    optimizer = torch.optim.Adam(quantized.parameters(), 1e-2)
    losses = []
    for _ in range(20):
        optimizer.zero_grad()
        loss = (quantized(target).features - wanted).square().mean()
        loss.backward()
        optimizer.step()
        losses.append(float(loss.detach()))
    assert losses[-1] < 0.9 * losses[0]
    assert all(not torch.equal(w, b) for w, b in zip(weights, before, strict=True))
