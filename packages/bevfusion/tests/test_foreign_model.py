"""Detectors in other code: which of their layers stay in float."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from bevfusion.frameworks import ForeignDetector, ForeignModel
from bevfusion.quantization import quantize_detector
from bevquant_quantizers import TensorQuantizer


class Encoder(nn.Module):
    """Layers on points under a framework's name, and one on what it makes of them."""

    def __init__(self, name: str) -> None:
        super().__init__()
        self.name, self.after = name, nn.Linear(8, 8)
        self.add_module(name, nn.ModuleList([nn.Linear(4, 8), nn.Linear(8, 8)]))

    def forward(self, points: Tensor) -> Tensor:
        for layer in self.get_submodule(self.name).children():
            points = layer(points).relu()
        return self.after(points)


def test_the_first_layer_on_points_stays_in_float() -> None:
    for name, kept in (
        ("pfn_layers", ["network.0"]),
        ("vfe_layers", ["network.0.vfe_layers.0"]),
        ("mlps", []),
    ):
        network = nn.Sequential(Encoder(name), nn.Linear(8, 2)).eval()
        model = ForeignModel(ForeignDetector(network, lambda frame: (torch.zeros(3, 4),)))
        assert list(model.kept_in_float) == kept
        quantized = quantize_detector(model, (torch.randn(5, 4),), model.parts).model
        of = {
            path.rpartition(".")[0]
            for path, module in quantized.named_modules()
            if isinstance(module, TensorQuantizer)
        }
        assert (f"network.0.{name}.0" in of) is (not kept)
        inside = {f"network.0.{name}.1", "network.0.after"}
        assert inside & of == (set() if kept == ["network.0"] else inside)
        assert "network.1" in of
