"""Pictures: every file is written, drawing never warns, same values give same bytes."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from matplotlib.image import imread

from bevfusion_quant.model import CONFIGS
from bevfusion_quant.pictures import bev_pictures, histogram_pictures, layer_picture
from bevfusion_quant.ptq import LayerRow, QuantizerValues

CONFIG = CONFIGS["tiny"]


def frame() -> tuple[torch.Tensor, torch.Tensor]:
    coords = torch.tensor([[0, 10, 20, 5], [0, 10, 20, 7], [0, 300, 100, 1]], dtype=torch.int32)
    features = torch.zeros(3, 5)
    features[:, 2] = torch.tensor([-1.0, 1.5, -3.0])
    return features, coords


@pytest.mark.parametrize("scale", [0.0, 1.0])
def test_birds_eye_views(tmp_path: Path, scale: float) -> None:
    wanted = torch.rand(1, 8, 45, 45) * scale
    got = wanted + 0.01 * scale
    paths = bev_pictures(tmp_path, CONFIG, *frame(), wanted, got)
    names = ["bev.png", "bev_input.png", "bev_float.png", "bev_quantized.png", "bev_difference.png"]
    assert [p.name for p in paths] == names
    for path in paths:
        pixels = imread(path)
        assert min(pixels.shape[:2]) > 500
        assert pixels[..., :3].std() > 0.05


def values(name: str, amax: list[float], data: np.ndarray) -> QuantizerValues:
    seen = QuantizerValues((f"a.{name}",), 8, np.array(amax))
    seen.largest = float(np.abs(data).max(initial=0))
    seen.total = data.size
    seen.counts = np.histogram(data, seen.edges)[0]
    return seen


def test_histograms_go_over_pages(tmp_path: Path) -> None:
    data = np.random.default_rng(0).standard_normal(1000)
    many = [values("_input_quantizer", [2.0], data) for _ in range(13)]
    dead = values("_input_quantizer", [0.0], np.zeros(10))
    unseen = values("_input_quantizer", [1.0], np.zeros(0))
    weight = values("_weight_quantizer", [1.0, 3.0], data)
    paths = histogram_pictures(tmp_path, [*many, dead, unseen, weight])
    assert [p.name for p in paths] == [
        "histograms_inputs_1.png",
        "histograms_inputs_2.png",
        "histograms_weights_1.png",
    ]
    assert all(p.stat().st_size > 10_000 for p in paths)


def test_layers(tmp_path: Path) -> None:
    rows = [
        LayerRow(f"l{i}", "QuantSparseConvolution", 4, 9.0, decibels, 1.0, 0.0, 1.0)
        for i, decibels in enumerate([30.0, -2.0, None, 25.0])
    ]
    (path,) = layer_picture(tmp_path, rows)
    assert path.name == "layers.png"
    assert layer_picture(tmp_path, [rows[2]]) == []


def test_same_values_same_bytes(tmp_path: Path) -> None:
    (tmp_path / "b").mkdir()
    wanted = torch.rand(1, 2, 45, 45)
    for folder in (tmp_path, tmp_path / "b"):
        bev_pictures(folder, CONFIG, *frame(), wanted, wanted * 1.01)
    assert (tmp_path / "bev.png").read_bytes() == (tmp_path / "b" / "bev.png").read_bytes()
