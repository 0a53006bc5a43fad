"""Files for onnxruntime: its integer kernels run, and make the simulator's integers."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import onnx
import pytest
import torch
from onnx import numpy_helper
from torch import Tensor, nn
from torch.nn import functional as F

from bevquant_export import TensorDifference, compare_qdq_onnx, export_qdq_onnx
from bevquant_int8sim import simulate
from bevquant_qnn import QuantAdd

Fixture = Callable[..., Any]


class Residual(nn.Module):
    """Both operands of the sum are quantized, with one scale."""

    def __init__(self) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(8, 8, 3, padding=1, bias=False)
        self.bn1 = nn.BatchNorm2d(8)
        self.conv2 = nn.Conv2d(8, 8, 3, padding=1)
        self.join = QuantAdd()
        self.out = nn.Conv2d(8, 4, 1)

    def forward(self, x: Tensor) -> Tensor:
        y = self.conv2(F.relu(self.bn1(self.conv1(x))))
        return self.out(F.relu(self.join(y, x)))


class Bottleneck(nn.Module):
    """The sum reads the accumulators of the third convolution."""

    def __init__(self) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(8, 4, 1, bias=False)
        self.bn1 = nn.BatchNorm2d(4)
        self.conv2 = nn.Conv2d(4, 4, 3, stride=2, padding=1)
        self.conv3 = nn.Conv2d(4, 8, 1)
        self.downsample = nn.Conv2d(8, 8, 1, stride=2)
        self.relu = nn.ReLU(inplace=True)
        self.out = nn.Conv2d(8, 4, 1)

    def forward(self, x: Tensor) -> Tensor:
        y = self.relu(self.conv2(self.relu(self.bn1(self.conv1(x)))))
        y = self.conv3(y)
        y += self.downsample(x)
        return self.out(self.relu(y))


class Neck(nn.Module):
    """Resizing behind convolutions whose output is quantized, and a concatenation."""

    def __init__(self, mode: str) -> None:
        super().__init__()
        self.fine = nn.Conv2d(8, 8, 3, padding=1)
        self.coarse = nn.Conv2d(8, 8, 3, stride=2, padding=1)
        self.smooth = nn.Conv2d(16, 8, 3, padding=1)
        self.settings = {"mode": mode} | ({} if mode == "nearest" else {"align_corners": False})

    def forward(self, x: Tensor) -> Tensor:
        fine, coarse = F.relu(self.fine(x)), F.relu(self.coarse(x))
        coarse = F.interpolate(coarse, size=fine.shape[2:], **self.settings)
        return self.smooth(torch.cat([fine, coarse], 1))


def by_operation(differences: tuple[TensorDifference, ...]) -> dict[str, tuple[int, int]]:
    """Operation to its mismatches and the largest of them."""
    found: dict[str, tuple[int, int]] = {}
    for d in differences:
        count, largest = found.get(d.op, (0, 0))
        found[d.op] = count + d.different, max(largest, d.largest)
    return found


def test_a_chain_runs_in_integers_and_makes_the_same(
    calibrated: Fixture, run: Fixture, tmp_path: Path
) -> None:
    x = torch.randn(2, 8, 16, 16)
    net = nn.Sequential(
        nn.Conv2d(8, 16, 3, bias=False), nn.BatchNorm2d(16), nn.ReLU(),
        nn.Conv2d(16, 8, 1), nn.ReLU6(), nn.MaxPool2d(2), nn.Conv2d(8, 4, 1),
    )  # fmt: skip
    model = calibrated(net, x)
    file = export_qdq_onnx(model, x, tmp_path / "net.onnx", "onnxruntime")
    made, operators = run(file, x)
    # The last convolution's output is float, so it has no integers to be fused with.
    assert (operators["QLinearConv"], operators["Conv"]) == (2, 1)
    assert operators["QuantizeLinear"] == 1
    assert set(by_operation(compare_qdq_onnx(file, model, x)).values()) == {(0, 0)}
    torch.testing.assert_close(made[0], simulate(model, x)(x), rtol=1e-5, atol=1e-5)


def test_a_residual_block_fuses_to_two_convolutions_and_a_sum(
    calibrated: Fixture, run: Fixture, tmp_path: Path
) -> None:
    x = torch.randn(2, 8, 12, 12)
    model = calibrated(Residual(), x)
    file = export_qdq_onnx(model, x, tmp_path / "net.onnx", "onnxruntime")
    made, operators = run(file, x)
    assert (operators["QLinearConv"], operators["QLinearAdd"]) == (2, 1)
    assert "Relu" not in operators
    found = by_operation(compare_qdq_onnx(file, model, x))
    assert found["conv"] == found["add"] == found["quantize"] == (0, 0)
    torch.testing.assert_close(made[0], simulate(model, x)(x), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("integer_sums", [False, True])
def test_sums_of_accumulators_are_exact_in_float_and_in_integers(
    integer_sums: bool, calibrated: Fixture, run: Fixture, tmp_path: Path
) -> None:
    x = torch.randn(2, 8, 12, 12)
    model = calibrated(Bottleneck(), x)
    file = export_qdq_onnx(
        model, x, tmp_path / "net.onnx", "onnxruntime", integer_sums=integer_sums
    )
    _, operators = run(file, x)
    assert operators["QLinearConv"] == (4 if integer_sums else 3)
    assert operators["QLinearAdd"] == int(integer_sums)
    assert list(file.sum_ranges) == (["conv3"] if integer_sums else [])
    # Other inputs reach beyond the ranges of the file, and are clipped to them.
    for inputs in (x, 2 * torch.randn(2, 8, 12, 12)):
        found = compare_qdq_onnx(file, model, inputs)
        assert max(d.unexplained for d in found) == 0
        assert by_operation(found)["conv"] == (0, 0)


@pytest.mark.parametrize("mode", ["nearest", "bilinear"])
def test_a_neck_resizes_and_joins_integers(
    mode: str, calibrated: Fixture, run: Fixture, tmp_path: Path
) -> None:
    x = torch.randn(2, 8, 14, 10)
    model = calibrated(Neck(mode), x)
    file = export_qdq_onnx(model, x, tmp_path / "net.onnx", "onnxruntime")
    made, operators = run(file, x)
    assert (operators["QLinearConv"], operators["QLinearConcat"]) == (2, 1)
    found = by_operation(compare_qdq_onnx(file, model, x))
    assert found["conv"] == found["layout"] == (0, 0)
    count, largest = found["resize"]
    assert largest <= (mode == "bilinear")
    assert count <= 0.05 * made[0].numel()


def test_nearest_resize_to_a_size_that_no_factor_reaches(
    calibrated: Fixture, run: Fixture, tmp_path: Path
) -> None:
    class Odd(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.conv, self.out = nn.Conv2d(3, 4, 1), nn.Conv2d(4, 4, 1)

        def forward(self, x: Tensor) -> Tensor:
            return self.out(F.interpolate(self.conv(x), size=(7, 11)))

    x = torch.randn(1, 3, 3, 5)
    model = calibrated(Odd(), x)
    file = export_qdq_onnx(model, x, tmp_path / "net.onnx", "onnxruntime")
    torch.testing.assert_close(run(file, x)[0][0], simulate(model, x)(x), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("groups", [1, 2])
def test_transposed_convolutions(
    groups: int, calibrated: Fixture, run: Fixture, tmp_path: Path
) -> None:
    x = torch.randn(2, 8, 6, 6)
    up = nn.ConvTranspose2d(8, 8, 3, stride=2, padding=1, output_padding=1, groups=groups)
    with torch.no_grad():
        up.weight *= torch.logspace(-1, 0, 8 // groups).view(1, -1, 1, 1)
    model = calibrated(nn.Sequential(nn.Conv2d(8, 8, 1), up, nn.ReLU(), nn.Conv2d(8, 4, 1)), x)
    file = export_qdq_onnx(model, x, tmp_path / "net.onnx", "onnxruntime")
    count, largest = by_operation(compare_qdq_onnx(file, model, x))["conv_transpose"]
    assert largest <= 1
    assert count <= 0.001 * x.numel() * 4
    assert bool(file.notes) == (groups > 1)


def test_a_layer_left_float_keeps_its_float_weights(
    calibrated: Fixture, run: Fixture, tmp_path: Path
) -> None:
    # onnxruntime quantizes weights by itself, per tensor, between quantized tensors.
    floats = nn.Conv2d(8, 8, 3)
    with torch.no_grad():
        floats.weight *= torch.logspace(-2, 0, 8).view(-1, 1, 1, 1)
    x = torch.randn(2, 8, 12, 12)
    net = nn.Sequential(nn.MaxPool2d(2), floats, nn.Conv2d(8, 4, 1))
    model = calibrated(net, x, exclude=("1",))
    file = export_qdq_onnx(model, x, tmp_path / "net.onnx", "onnxruntime")
    assert [line.split(":")[0] for line in file.floats] == ["1"]
    made, _ = run(file, x)
    torch.testing.assert_close(made[0], simulate(model, x)(x), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("rank", [2, 3])
def test_linear_layers_of_any_rank_run_in_integers(
    rank: int, calibrated: Fixture, run: Fixture, tmp_path: Path
) -> None:
    x = torch.randn(*(2, 5, 6)[3 - rank :])
    model = calibrated(nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 3)), x)
    file = export_qdq_onnx(model, x, tmp_path / "net.onnx", "onnxruntime")
    made, operators = run(file, x)
    assert operators["QGemm"] == 2
    assert set(by_operation(compare_qdq_onnx(file, model, x)).values()) == {(0, 0)}
    torch.testing.assert_close(made[0], simulate(model, x)(x), rtol=1e-5, atol=1e-5)


def test_average_pooling_is_at_most_a_step_off(
    calibrated: Fixture, run: Fixture, tmp_path: Path
) -> None:
    net = nn.Sequential(
        nn.Conv2d(3, 8, 3), nn.ReLU(), nn.AvgPool2d(2), nn.Conv2d(8, 8, 1),
        nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(8, 4),
    )  # fmt: skip
    x = torch.randn(2, 3, 14, 14)
    model = calibrated(net, x)
    file = export_qdq_onnx(model, x, tmp_path / "net.onnx", "onnxruntime")
    _, operators = run(file, x)
    assert operators["QLinearAveragePool"] + operators["QLinearGlobalAveragePool"] == 2
    found = by_operation(compare_qdq_onnx(file, model, x))
    assert found["avg_pool"][1] <= 1
    assert found["conv"] == (0, 0)


@pytest.mark.parametrize("weights", ["uint8", "int8"])
def test_weights_are_integers_of_the_type_asked_for(
    weights: str, calibrated: Fixture, run: Fixture, tmp_path: Path
) -> None:
    net = nn.Sequential(nn.Conv2d(3, 8, 3), nn.Conv2d(8, 4, 1))
    x = torch.randn(1, 3, 8, 8)
    model = calibrated(net, x)
    file = export_qdq_onnx(model, x, tmp_path / "net.onnx", "onnxruntime", weights=weights)
    constants = {c.name: numpy_helper.to_array(c) for c in onnx.load(file.path).graph.initializer}
    weight = constants["0.weight"]
    assert weight.dtype == weights
    zero = 128 if weights == "uint8" else 0
    quantized = (weight.astype(float) - zero) * constants["0.weight_scale"].reshape(-1, 1, 1, 1)
    want = model.get_submodule("0").quantized_weight().detach().double()
    torch.testing.assert_close(torch.from_numpy(quantized), want, rtol=1e-6, atol=1e-7)
    assert run(file, x)[1]["QLinearConv"] == 1


def test_a_narrow_range_never_reaches_minus_128(
    calibrated: Fixture, run: Fixture, tmp_path: Path
) -> None:
    x = torch.randn(1, 3, 8, 8)
    net = nn.Sequential(nn.Conv2d(3, 8, 3), nn.Conv2d(8, 4, 1))
    model = calibrated(net, x, narrow_range=True)
    file = export_qdq_onnx(model, x, tmp_path / "net.onnx", "onnxruntime")
    beyond = x * 3
    assert set(by_operation(compare_qdq_onnx(file, model, beyond)).values()) == {(0, 0)}
    made, _ = run(file, beyond)
    torch.testing.assert_close(made[0], simulate(model, x)(beyond), rtol=1e-5, atol=1e-5)


def test_comparison_counts_a_changed_weight(calibrated: Fixture, tmp_path: Path) -> None:
    x = torch.randn(1, 3, 8, 8)
    net = nn.Sequential(nn.Conv2d(3, 8, 3), nn.Conv2d(8, 8, 1), nn.Conv2d(8, 4, 1))
    model = calibrated(net, x)
    file = export_qdq_onnx(model, x, tmp_path / "net.onnx", "onnxruntime")
    with torch.no_grad():
        model.get_submodule("1").bias += 1.0
    found = {d.path: d.different > 0 for d in compare_qdq_onnx(file, model, x)}
    # The layers in front of it and behind it read the right integers, so only it differs.
    assert found == {"input": False, "0": False, "1": True}
