"""Where a file makes other integers than the model: beside ties, and nowhere else."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

Fixture = Callable[..., Any]


class Pyramid(nn.Module):
    """A map and what is made of its half, both ways of growing."""

    def __init__(self) -> None:
        super().__init__()
        self.down = nn.Sequential(nn.Conv2d(8, 16, 3, 2, 1), nn.BatchNorm2d(16), nn.ReLU())
        self.grown = nn.Upsample(scale_factor=2, mode="bilinear", align_corners=False)
        self.up = nn.ConvTranspose2d(16, 8, 2, stride=2)
        self.out = nn.Conv2d(24, 8, 1)

    def forward(self, x: Tensor) -> Tensor:
        y = self.down(x)
        return self.out(torch.cat([self.grown(y), self.up(y)], 1))


@pytest.mark.parametrize("profile", ["tensorrt", "onnxruntime", "horizon"])
def test_what_differs_lies_on_the_border_of_two_steps(
    between: Fixture, prepared: Fixture, export: Any, tmp_path: Path, profile: str
) -> None:
    x = torch.randn(2, 8, 64, 64)
    model = prepared(between(Pyramid()), x)
    file = export.export_qdq_onnx(model, x, tmp_path / "net.onnx", profile)
    rows = export.compare_qdq_onnx(file, model, x)
    assert [row for row in rows if row.unexplained or row.largest > 1] == []
    ops = {row.op for row in rows if row.ties}
    # onnxruntime rounds biases to int32, which these models do not.
    assert ops >= ({"resize", "conv"} if profile == "onnxruntime" else {"resize"})
