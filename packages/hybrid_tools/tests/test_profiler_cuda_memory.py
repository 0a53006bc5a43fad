"""Memory along a model's operators."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from bevquant_hybrid.quantization import (
    DeQuantStub,
    QuantStub,
    get_default_qat_qconfig,
    prepare_qat_fx,
)
from bevquant_hybrid_tools.quant_profiler import read_memory, show_cuda_memory_consumption


def net() -> nn.Sequential:
    layers = nn.Conv2d(3, 4, 3), nn.ReLU(inplace=True), nn.Conv2d(4, 2, 1)
    return nn.Sequential(QuantStub(), *layers, DeQuantStub())


def counter():
    """Stands in for a device: 10 bytes more with every reading."""
    seen = [0]

    def read() -> tuple[int, int]:
        seen[0] += 10
        return seen[0], seen[0] + 1

    return read


@pytest.mark.parametrize("form", ["float", "qat"])
def test_operators_are_read_forward_and_then_backward(form: str) -> None:
    model = net()
    if form == "qat":
        model = prepare_qat_fx(model, {"": get_default_qat_qconfig()})
    readings = read_memory(model, torch.rand(1, 3, 8, 8), counter())
    forward = [r.name for r in readings if r.phase == "forward"]
    backward = [r.name for r in readings if r.phase == "backward"]
    fused = [] if form == "qat" else ["2"]
    assert forward == ["(start)", "0", "1", *fused, "3", "4"]
    assert backward[-1] == "(end)"
    assert backward[:-1] == sorted(backward[:-1], reverse=True)
    assert {"1", "3"} <= set(backward)
    assert [r.allocated for r in readings] == [10 * (i + 1) for i in range(len(readings))]
    assert all(r.peak == r.allocated + 1 for r in readings)
    assert not any(module._forward_hooks for module in model.modules())


def test_several_results_need_a_backward_of_their_own() -> None:
    class Two(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(2, 2)

        def forward(self, x):
            return self.linear(x), x

    with pytest.raises(TypeError, match=r"returns a tuple: expected one tensor; give a custom_ba"):
        read_memory(Two(), torch.ones(1, 2), counter())
    readings = read_memory(
        Two(), torch.ones(1, 2), counter(), None, lambda r: r[0].sum().backward()
    )
    assert [r.name for r in readings] == ["(start)", "linear", "linear", "(end)"]


def test_a_device_without_such_memory_is_refused() -> None:
    with pytest.raises(ValueError, match="device='cpu': expected a CUDA device"):
        show_cuda_memory_consumption(net(), torch.rand(1, 3, 8, 8), torch.device("cpu"))


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_the_page_on_a_device(tmp_path) -> None:
    model = net()
    path = show_cuda_memory_consumption(
        model, torch.rand(4, 3, 256, 256), torch.device("cuda"), out_dir=tmp_path
    )
    assert path == tmp_path / "mem_info.html"
    text = path.read_text()
    assert "peak since the operator before (MiB)" in text
    assert "1 (backward)" in text
    assert next(model.parameters()).device.type == "cpu"
