"""Frames with different numbers of pillars, and the file that takes all of them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from bevfusion.frameworks import with_equal_rows
from bevquant_export import export_detector, open_onnx
from bevquant_qnn import quantize_model
from bevquant_quantizers import calibrate


class Pillars(nn.Module):
    """Pillars to cells of a map, as PointPillars."""

    def __init__(self) -> None:
        super().__init__()
        self.encode, self.conv = nn.Linear(4, 8), nn.Conv2d(8, 2, 3, padding=1)

    def forward(self, pillars: dict[str, Tensor]) -> Tensor:
        points = self.encode(pillars["points"]).relu().amax(1)
        cells = pillars["cells"].long()
        canvas = points.new_zeros(64, 8).index_copy(0, cells[:, 0] * 8 + cells[:, 1], points)
        made: Tensor = self.conv(canvas.view(1, 8, 8, 8).permute(0, 3, 1, 2))
        return made


class Mean(Pillars):
    def forward(self, pillars: dict[str, Tensor]) -> Tensor:
        return self.encode(pillars["points"]).mean((0, 1))


class PerRow(Pillars):
    def forward(self, pillars: dict[str, Tensor]) -> Tensor:
        return self.encode(pillars["points"])


def frame(rows: int, seed: int) -> tuple[dict[str, Tensor], Tensor]:
    made = torch.Generator().manual_seed(seed)
    cells = torch.randperm(64, generator=made)[:rows]
    points = torch.randn(rows, 5, 4, generator=made)
    return {"points": points, "cells": torch.stack([cells // 8, cells % 8], 1).int()}, torch.ones(1)


class WithImage(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.pillars = Pillars()

    def forward(self, pillars: dict[str, Tensor], image: Tensor) -> Tensor:
        made: Tensor = self.pillars(pillars) * image
        return made


FRAMES = [frame(12, 0), frame(30, 1), frame(20, 2)]


def test_the_fullest_frame_decides() -> None:
    torch.manual_seed(0)
    network = WithImage().eval()
    longer, note = with_equal_rows(network, FRAMES)
    assert [len(pillars["points"]) for pillars, _ in longer] == [30, 30, 30]
    assert [len(pillars["cells"]) for pillars, _ in longer] == [30, 30, 30]
    assert [len(image) for _, image in longer] == [1, 1, 1]
    assert "takes 30 rows (pillars), the most of 3 frames" in note
    for given, more in zip(FRAMES, longer, strict=True):
        assert torch.allclose(network(*given), network(*more), atol=1e-6)


@pytest.mark.parametrize("kind", [Mean, PerRow])
def test_rows_that_change_the_result_are_not_repeated(kind: Any) -> None:
    batches = [(pillars,) for pillars, _ in FRAMES]
    longer, note = with_equal_rows(kind().eval(), batches)
    assert [len(pillars["points"]) for (pillars,) in longer] == [12, 30, 20]
    assert note == ""


def test_one_file_takes_all_frames(tmp_path: Path) -> None:
    pytest.importorskip("onnxruntime")
    torch.manual_seed(0)
    batches = [(pillars,) for pillars, _ in FRAMES]
    longer, _ = with_equal_rows(Pillars().eval(), batches)
    model = quantize_model(Pillars().eval(), example_inputs=batches[0]).model
    calibrate(model, batches)
    made = export_detector(model, longer[0], tmp_path, "onnxruntime", batches=longer[1:])
    assert made.dense is not None
    assert all(not check.not_run for check in made.checks)
    assert len(made.checks) == 2
    run = open_onnx(made.dense.path, "onnxruntime")
    for given, (pillars,) in zip(batches, longer, strict=True):
        inputs = {
            name: pillars[key] for name in made.dense.inputs for key in pillars if key in name
        }
        (got,) = run(inputs).values()
        want = model(*given).detach()
        assert (got - want).norm() < 0.02 * want.norm()
