"""Pictures: every file is written, drawing never warns, same values give same bytes."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from matplotlib.image import imread

from bevfusion.model import CONFIGS
from bevfusion.pictures import bev_picture, layer_picture
from bevfusion.quantization import StageMaps, StageRow
from bevquant_qnn import LayerRow

CONFIG = CONFIGS["tiny"].lidar
POINTS = np.array([[-50, -48, -1], [-50, -48, 1.5], [36, -24, -3]], np.float32)


def stage(scale: float) -> StageMaps:
    wanted = np.random.default_rng(0).random((40, 40), np.float32) * np.float32(scale)
    got = wanted + np.float32(0.01 * scale)
    row = StageRow("fuser", "Fused", 8, 30.0 if scale else None, 1.0 if scale else None)
    return StageMaps(row, wanted, got, got - wanted, "norm", "error")


@pytest.mark.parametrize("scale", [0.0, 1.0])
def test_birds_eye_views(tmp_path: Path, scale: float) -> None:
    path = bev_picture(tmp_path, CONFIG, POINTS, "points", stage(scale))
    assert path.name == "bev.png"
    pixels = imread(path)
    assert min(pixels.shape[:2]) > 1000
    assert pixels[..., :3].std() > 0.05


def test_layers(tmp_path: Path) -> None:
    rows = [
        LayerRow(f"l{i}", "QuantSparseConvolution", 4, 9.0, decibels, 1.0, 0.0, 1.0)
        for i, decibels in enumerate([30.0, -2.0, None, 25.0])
    ]
    (path,) = layer_picture(tmp_path, rows)
    assert path.name == "layers.png"
    assert layer_picture(tmp_path, [rows[2]]) == []


@pytest.mark.parametrize("count", [3, 90])
def test_layer_pictures_stay_of_a_size_to_look_at(tmp_path: Path, count: int) -> None:
    rows = [
        LayerRow(f"encoders.l{i}", "QuantConv2d", 4, 9.0, 20.0 + i % 7, 1.0, 0.0, 1.0)
        for i in range(count)
    ]
    (path,) = layer_picture(tmp_path, rows)
    assert imread(path).shape[0] < 2200


def test_same_values_same_bytes(tmp_path: Path) -> None:
    (tmp_path / "b").mkdir()
    for folder in (tmp_path, tmp_path / "b"):
        bev_picture(folder, CONFIG, POINTS, "points", stage(1.0))
    assert (tmp_path / "bev.png").read_bytes() == (tmp_path / "b" / "bev.png").read_bytes()
