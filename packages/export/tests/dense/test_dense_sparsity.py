"""2:4 sparse weights in files: the zeros are there, where an engine looks for them."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx
import pytest
import torch
from onnx import numpy_helper
from torch import nn

from bevquant_export import compare_qdq_onnx, export_qdq_onnx
from bevquant_qnn import QuantConfig, keep_sparsity, quantize_model, round_weights, sparsify
from bevquant_quantizers import calibrate


@pytest.mark.parametrize("target", ["onnxruntime", "tensorrt10", "tensorrt11"])
@pytest.mark.parametrize("bits", [8, 4])
def test_weights_are_sparse_along_input_channels(target: str, bits: int, tmp_path: Path) -> None:
    torch.manual_seed(0)
    x = torch.randn(2, 4, 8, 8)
    net = nn.Sequential(nn.Conv2d(4, 8, 3), nn.ReLU(), nn.Conv2d(8, 8, 3), nn.Flatten(1))
    net.append(nn.Linear(8 * 16, 4))
    model = quantize_model(net.eval(), QuantConfig(weight_bits=bits), x).model
    calibrate(model, [x], progress=False)
    sparsify(model)
    round_weights(model, [x])
    optimizer = torch.optim.SGD(model.parameters(), 1e-2)
    assert len(keep_sparsity(model, optimizer)) == 3
    before = model[2].weight.detach().clone()
    model(x).square().mean().backward()
    optimizer.step()
    assert not torch.equal(model[2].weight, before)
    file = export_qdq_onnx(model, x, tmp_path / "net.onnx", target)
    assert sum(row.unexplained for row in compare_qdq_onnx(file, model, x)) == 0
    graph = onnx.load(file.path).graph
    held = {t.name: numpy_helper.to_array(t) for t in graph.initializer if len(t.dims) >= 2}
    weights = {name: w for name, w in held.items() if name.endswith("weight")}
    assert sorted(len(w.shape) for w in weights.values()) == [2, 4, 4]
    for weight in weights.values():
        zero = 128 if weight.dtype == np.uint8 else 0
        axis = 1 if weight.ndim == 4 or weight.shape[0] == 4 else 0
        fours = (np.moveaxis(weight, axis, -1) != zero).reshape(-1, 4).sum(1)
        assert fours.max() <= 2
        assert (fours == 2).mean() > 0.5
