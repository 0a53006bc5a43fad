"""Pillars scattered into a picture, RoIAlign and sampling by a grid, against plain loops."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import nn

from bevquant_hybrid.nn import MultiScaleRoIAlign, PointPillarsScatter
from bevquant_hybrid.nn.qat import qat_form
from bevquant_hybrid.nn.quantized import fixed_point_form
from bevquant_hybrid.qtensor import QTensor
from bevquant_hybrid.quantization import (
    DeQuantStub,
    QuantStub,
    convert_fx,
    get_default_qat_qconfig,
    prepare_qat_fx,
    set_fake_quantize,
)

QAT = get_default_qat_qconfig()


def quantized(*shape: int, scale: float = 0.031) -> QTensor:
    values = torch.randint(-128, 128, shape, dtype=torch.int8)
    return QTensor(values, torch.tensor([scale]), "qint8")


def test_pillars_stand_where_their_coordinates_say() -> None:
    features = quantized(40, 3, 2)
    cells = torch.randperm(2 * 5 * 7)[:40]
    coords = torch.stack([cells // 35, torch.zeros_like(cells), cells % 35 // 7, cells % 7], 1)
    expected = np.zeros((2, 6, 5, 7), np.int8)
    for values, (n, _, y, x) in zip(features.int_repr().numpy(), coords.tolist(), strict=True):
        expected[n, :, y, x] = values.reshape(-1)
    for given in ((2, 6, 5, 7), torch.tensor([2, 6, 5, 7])):
        result = PointPillarsScatter(given)(features, coords)
        assert result.scale is features.scale
        assert np.array_equal(result.int_repr().numpy(), expected)
    floats = features.dequantize().requires_grad_()
    picture = PointPillarsScatter()(floats, coords, (2, 6, 5, 7))
    assert np.allclose(picture.detach().numpy(), expected * np.float32(0.031))
    picture.sum().backward()
    assert torch.equal(floats.grad, torch.ones_like(floats))


def test_of_two_pillars_at_one_place_the_last_counts_and_negative_samples_none() -> None:
    features = torch.tensor([[1.0], [2.0], [3.0]])
    coords = torch.tensor([[0, 0, 0, 1], [0, 0, 0, 1], [-1, 9, 9, 9]])
    picture = PointPillarsScatter((1, 1, 1, 2))(features, coords)
    assert picture.flatten().tolist() == [0.0, 2.0]
    empty = PointPillarsScatter((1, 1, 1, 2))(features[:0], coords[:0])
    assert empty.flatten().tolist() == [0.0, 0.0]


@pytest.mark.parametrize(
    ("coords", "shape", "what"),
    [
        ([[0, 0, 5, 0]], (1, 2, 5, 7), r"a pillar at \[0, 0, 5, 0\] lies outside \(1, 2, 5, 7\)"),
        ([[1, 0, 0, 0]], (1, 2, 5, 7), "lies outside"),
        ([[0, 0, 0, 0]], (1, 3, 5, 7), r"expected features \[M, 3\].*got \(1, 2\)"),
        ([[0, 0, 0, 0]], None, "no output_shape"),
    ],
)
def test_pillars_that_do_not_fit_are_named(coords, shape, what: str) -> None:
    with pytest.raises(ValueError, match=what):
        PointPillarsScatter(shape)(torch.zeros(1, 2), torch.tensor(coords))


class Pillars(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.quant, self.dequant = QuantStub(), DeQuantStub()
        self.scatter, self.conv = PointPillarsScatter((1, 4, 6, 6)), nn.Conv2d(4, 2, 3)

    def forward(self, features: torch.Tensor, coords: torch.Tensor) -> torch.Tensor:
        return self.dequant(self.conv(self.scatter(self.quant(features), coords)))


def test_a_model_scatters_quantized_pillars() -> None:
    features, coords = torch.randn(5, 4), torch.randint(0, 6, (5, 4))
    coords[:, 0] = 0
    model = Pillars()
    made = prepare_qat_fx(model, {"": QAT})
    made(features, coords)
    set_fake_quantize(made, "validation")
    result = made(features, coords)
    assert (result - model(features, coords)).abs().max() < 0.05
    step = made.conv.activation_post_process.scale.item()
    assert (convert_fx(made)(features, coords) - result).abs().max() <= 1.01 * step


def bilinear(plane: np.ndarray, y: float, x: float) -> float:
    height, width = plane.shape
    if not (-1 <= y <= height and -1 <= x <= width):
        return 0.0
    y, x = min(max(y, 0.0), height - 1), min(max(x, 0.0), width - 1)
    top, left = int(y), int(x)
    bottom, right = min(top + 1, height - 1), min(left + 1, width - 1)
    upper = plane[top, left] * (1 - (x - left)) + plane[top, right] * (x - left)
    lower = plane[bottom, left] * (1 - (x - left)) + plane[bottom, right] * (x - left)
    return upper * (1 - (y - top)) + lower * (y - top)


def align_one(plane, box, size, scale: float, ratio: int, aligned: bool) -> np.ndarray:
    """RoIAlign of one channel and box, sample by sample."""
    left, top, right, bottom = (float(v) * scale - (0.5 if aligned else 0.0) for v in box)
    width, height = right - left, bottom - top
    if not aligned:
        width, height = max(width, 1.0), max(height, 1.0)
    result = np.zeros(size)
    rows = ratio if ratio > 0 else math.ceil(height / size[0])
    columns = ratio if ratio > 0 else math.ceil(width / size[1])
    for i in range(size[0]):
        for j in range(size[1]):
            values = [
                bilinear(
                    plane,
                    top + (i + (a + 0.5) / rows) * height / size[0],
                    left + (j + (b + 0.5) / columns) * width / size[1],
                )
                for a in range(rows)
                for b in range(columns)
            ]
            result[i, j] = np.mean(values) if values else 0.0
    return result


def level_of(box, strides, scale0: float, level0: float) -> int:
    side = math.sqrt(max(0.0, float((box[2] - box[0]) * (box[3] - box[1]))))
    levels = [int(math.log2(s)) for s in strides]
    wanted = math.floor(level0 + math.log2(side / scale0) + 1e-6) if side else -99
    return levels.index(min(max(wanted, min(levels)), max(levels)))


BOXES = torch.tensor(
    [
        [3.0, 5.0, 21.0, 17.0],
        [-9.0, -4.0, 6.5, 3.0],
        [30.0, 30.0, 75.0, 90.0],  # beyond the map
        [1.0, 2.0, 62.0, 61.0],
        [10.0, 10.0, 10.0, 10.0],
        [10.0, 10.0, 14.0, 10.0],
        [10.0, 10.0, 10.0, 14.0],
    ]
)


@pytest.mark.parametrize(("ratio", "aligned"), [(1, False), (2, True), (0, False), (-1, True)])
def test_boxes_are_aligned_on_the_map_that_fits_them(ratio: int, aligned: bool) -> None:
    strides, size = [4, 8], (2, 3)
    maps = [torch.randn(2, 2, 16, 16, dtype=torch.double), torch.randn(2, 2, 8, 8).double()]
    boxes = [BOXES[:3].double(), BOXES[3:].double().unsqueeze(0)]
    align = MultiScaleRoIAlign(size, strides, ratio, 32, 3, aligned)
    result = align(maps, boxes).numpy()
    rows = [(n, box) for n, given in enumerate(boxes) for box in given.reshape(-1, 4).tolist()]
    used = set()
    for k, (n, box) in enumerate(rows):
        level = level_of(box, strides, 32, 3)
        used.add(level)
        for c in range(2):
            plane = maps[level][n, c].numpy()
            expected = align_one(plane, box, size, 1 / strides[level], ratio, aligned)
            assert np.allclose(result[k, c], expected, atol=1e-12)
    assert used == {0, 1}


@pytest.mark.parametrize("ratio", [0, 2])
def test_no_boxes_are_no_values(ratio: int) -> None:
    maps = [torch.randn(1, 3, 16, 16), torch.randn(1, 3, 8, 8)]
    for strides in ([4], [4, 8]):
        align = MultiScaleRoIAlign((2, 3), strides, ratio, 32, 3)
        assert align(maps[: len(strides)], [BOXES[:0]]).shape == (0, 3, 2, 3)


def test_alignment_is_differentiable() -> None:
    maps = [torch.randn(1, 1, 6, 6, dtype=torch.double, requires_grad=True) for _ in range(2)]
    align = MultiScaleRoIAlign((2, 2), [2, 4], 2, 8, 2)
    boxes = [torch.tensor([[1.0, 1.0, 5.0, 4.0], [0.0, 2.0, 11.0, 10.0]], dtype=torch.double)]
    assert torch.autograd.gradcheck(lambda *m: align(list(m), boxes), maps)


@pytest.mark.parametrize("strides", [[4], [4, 8]])
def test_aligned_integers_are_rounded_once(strides: list[int]) -> None:
    maps = [quantized(2, 3, 64 // s, 64 // s, scale=0.03 + 0.01 * i) for i, s in enumerate(strides)]
    made = qat_form(MultiScaleRoIAlign((3, 2), strides, 2, 32, 3), QAT)
    made.activation_post_process.set_qparams(0.027)
    made.activation_post_process.disable_observer()
    boxes = [BOXES[:3], BOXES[3:]]
    layer = fixed_point_form(made, "align", "half_up")
    result = layer(maps, boxes).int_repr().numpy()
    step = float(layer.scale.double())
    rows = [(n, box) for n, given in enumerate(boxes) for box in given.tolist()]
    mismatches = 0
    for k, (n, box) in enumerate(rows):
        level = level_of(box, strides, 32, 3) if len(strides) > 1 else 0
        for c in range(3):
            plane = maps[level].int_repr()[n, c].numpy().astype(np.float64)
            exact = align_one(plane, box, (3, 2), 1 / strides[level], 2, False)
            exact = exact * (float(maps[level].scale.double()) / step)
            mismatches += int((result[k, c] != np.clip(np.floor(exact + 0.5), -128, 127)).sum())
    assert mismatches == 0
    trained = made([m.like(m.dequantize()) for m in maps], boxes).int_repr()
    assert (trained.int() - torch.tensor(result).int()).abs().max() <= 1


def test_boxes_and_maps_that_do_not_fit_are_named() -> None:
    align = MultiScaleRoIAlign(2, [4, 8])
    maps = [torch.zeros(1, 1, 8, 8), torch.zeros(1, 1, 4, 4)]
    with pytest.raises(ValueError, match=r"expected 2 feature maps .* got 1"):
        align(maps[:1], [BOXES])
    with pytest.raises(ValueError, match=r"boxes \[n, 4\].*each of 1 samples, got \[\(7, 4\), \(7"):
        align(maps, [BOXES, BOXES])
    with pytest.raises(ValueError, match=r"feature_strides=\[3\]: expected .* powers of 2"):
        MultiScaleRoIAlign(2, [3])


class Sampled(nn.Module):
    def __init__(self, **settings) -> None:
        super().__init__()
        self.quant, self.quant_grid, self.dequant = QuantStub(), QuantStub(), DeQuantStub()
        self.settings = settings

    def forward(self, x: torch.Tensor, grid: torch.Tensor) -> torch.Tensor:
        sampled = F.grid_sample(self.quant(x), self.quant_grid(grid), **self.settings)
        return self.dequant(sampled)


@pytest.mark.parametrize("mode", ["bilinear", "nearest"])
@pytest.mark.parametrize("padding_mode", ["zeros", "border"])
def test_a_grid_samples_integers_of_the_inputs_scale(mode: str, padding_mode: str) -> None:
    settings = {"mode": mode, "padding_mode": padding_mode, "align_corners": False}
    x, grid = torch.randn(2, 3, 6, 5), torch.rand(2, 4, 7, 2) * 2.4 - 1.2
    wide = get_default_qat_qconfig(dtype="qint16")
    made = prepare_qat_fx(Sampled(**settings), {"": QAT, "module_name": {"quant_grid": wide}})
    made(x, grid)
    set_fake_quantize(made, "validation")
    result, converted = made(x, grid), convert_fx(made)
    step = made.quant.activation_post_process.scale.item()
    places = made.quant_grid(grid).dequantize()
    integers = converted.quant(x).int_repr().numpy().astype(np.float64)
    height, width = integers.shape[2:]
    expected = np.zeros((2, 3, 4, 7))
    for n, i, j in np.ndindex(2, 4, 7):
        px, py = (
            ((float(v) + 1) * s - 1) / 2
            for v, s in zip(places[n, i, j], (width, height), strict=True)
        )
        for c in range(3):
            expected[n, c, i, j] = sampled_value(integers[n, c], py, px, mode, padding_mode)
    exact = np.floor(expected + 0.5) * step
    assert np.abs(converted(x, grid).numpy() - exact).max() <= 1e-5
    assert (result - torch.tensor(exact).float()).abs().max() <= 1.01 * step


def sampled_value(plane: np.ndarray, y: float, x: float, mode: str, padding_mode: str) -> float:
    height, width = plane.shape
    if padding_mode == "border":
        y, x = min(max(y, 0.0), height - 1.0), min(max(x, 0.0), width - 1.0)

    def at(row: int, column: int) -> float:
        inside = 0 <= row < height and 0 <= column < width
        return plane[row, column] if inside else 0.0

    if mode == "nearest":
        return at(round(y), round(x))
    top, left = math.floor(y), math.floor(x)
    return sum(
        at(top + a, left + b) * (1 - abs(y - top - a)) * (1 - abs(x - left - b))
        for a in (0, 1)
        for b in (0, 1)
    )


def test_sampling_that_a_bpu_does_not_do_is_refused() -> None:
    x, grid = quantized(1, 1, 3, 3), torch.zeros(1, 2, 2, 2)
    with pytest.raises(NotImplementedError, match=r"mode='bicubic'.*'nearest' or 'bilinear'"):
        F.grid_sample(x, grid, mode="bicubic", align_corners=False)
    plain = F.grid_sample(x.dequantize(), quantized(1, 2, 2, 2), align_corners=False)
    assert type(plain) is torch.Tensor
