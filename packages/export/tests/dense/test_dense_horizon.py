"""Files for hb_mapper: operator set 11, nodes named by their place, settings beside them."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import onnx
import pytest
import torch
from onnx import numpy_helper
from torch import nn

from bevquant_export import compare_qdq_onnx, export_qdq_onnx, lint_onnx
from bevquant_qnn import QuantConcat

Fixture = Callable[..., Any]


@pytest.fixture
def net() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(3, 8, 3), nn.ReLU(), nn.MaxPool2d(2), nn.Conv2d(8, 8, 3),
        nn.ConvTranspose2d(8, 6, 2, stride=2), nn.Upsample(scale_factor=2), nn.Conv2d(6, 4, 1),
    )  # fmt: skip


def test_nodes_and_scales_are_as_the_mapper_reads_them(
    net: nn.Module, calibrated: Fixture, tmp_path: Path
) -> None:
    x = torch.randn(1, 3, 16, 16)
    file = export_qdq_onnx(calibrated(net, x), x, tmp_path / "net.onnx", "horizon")
    proto = onnx.load(file.path)
    assert (proto.opset_import[0].version, proto.ir_version) == (11, 6)
    names = [node.name for node in proto.graph.node]
    assert names == [f"{node.op_type}_{i}" for i, node in enumerate(proto.graph.node)]
    constants = {
        node.output[0]: numpy_helper.to_array(node.attribute[0].t)
        for node in proto.graph.node
        if node.op_type == "Constant"
    }
    channels = set()
    for node in proto.graph.node:
        if node.op_type in ("QuantizeLinear", "DequantizeLinear"):
            assert not node.attribute
            scale, zero = (constants[name] for name in node.input[1:])
            assert scale.ndim == 1
            assert (zero.ndim, zero.dtype, int(zero)) == (0, "int8", 0)
            channels.add(len(scale))
    assert channels == {1, 4, 6, 8}
    assert lint_onnx(file.path, "horizon") == []


def test_the_file_lifted_to_axes_makes_the_same_integers(
    net: nn.Module, calibrated: Fixture, tmp_path: Path
) -> None:
    x = torch.randn(2, 3, 16, 16)
    model = calibrated(net, x)
    file = export_qdq_onnx(model, x, tmp_path / "net.onnx", "horizon")
    differences = compare_qdq_onnx(file, model, x)
    assert len(differences) == len(set(file.integers.values()))
    assert sum(d.different for d in differences) <= 1e-4 * sum(d.elements for d in differences)


@pytest.mark.parametrize("march", ["bayes", "bernoulli2"])
def test_settings_name_what_must_stay_on_the_cpu(
    march: str, net: nn.Module, calibrated: Fixture, tmp_path: Path
) -> None:
    # The excluded layer reads integers, which only pooling stands in front of.
    net = nn.Sequential(nn.Conv2d(3, 3, 1), QuantConcat(), nn.MaxPool2d(2), net)
    x = torch.randn(1, 3, 32, 32)
    model = calibrated(net, x, exclude=("3.0",))
    file = export_qdq_onnx(model, x, tmp_path / "net.onnx", "horizon", march=march)
    assert file.settings == tmp_path / "net.yaml"
    text = file.settings.read_text()
    convs = [n for n in onnx.load(file.path).graph.node if n.op_type == "Conv"]
    (bare,) = [n.name for n in convs if "3.0.weight" in n.input]
    assert file.run_on_cpu == (bare,)
    assert f'  run_on_cpu: "{bare}"\n' in text
    assert f'  march: "{march}"\n' in text
    assert '  onnx_model: "net.onnx"\n' in text


def test_upsampling_each_channel_by_itself_stays_on_the_cpu(
    calibrated: Fixture, tmp_path: Path
) -> None:
    # As of CenterNet's necks: every group has a scale, and all share one entry of the axis.
    up = nn.ConvTranspose2d(4, 4, 4, stride=2, padding=1, groups=4, bias=False)
    x = torch.randn(1, 3, 8, 8)
    model = calibrated(nn.Sequential(nn.Conv2d(3, 4, 1), nn.ReLU(), up, nn.Conv2d(4, 2, 1)), x)
    file = export_qdq_onnx(model, x, tmp_path / "net.onnx", "horizon")
    assert [name.split("_")[0] for name in file.run_on_cpu] == ["ConvTranspose"]
    (note,) = file.notes
    assert note.startswith("2: the weight of this transposed convolution is written as float")
    assert "each of its groups has a scale" in note
    assert lint_onnx(file.path, "horizon") == []


def test_nothing_is_forced_onto_the_cpu_without_need(
    net: nn.Module, calibrated: Fixture, tmp_path: Path
) -> None:
    x = torch.randn(1, 3, 16, 16)
    file = export_qdq_onnx(calibrated(net, x), x, tmp_path / "net.onnx", "horizon")
    assert file.run_on_cpu == ()
    assert file.settings is not None
    assert "run_on_cpu" not in file.settings.read_text()


def test_what_keeps_a_scale_has_no_pair_of_its_own(calibrated: Fixture, tmp_path: Path) -> None:
    net = nn.Sequential(
        nn.Conv2d(3, 8, 3), nn.ReLU(), nn.MaxPool2d(2), nn.PixelShuffle(2),
        nn.Upsample(scale_factor=2), nn.Conv2d(2, 4, 1),
    )  # fmt: skip
    x = torch.randn(1, 3, 10, 10)
    model = calibrated(net, x)
    file = export_qdq_onnx(model, x, tmp_path / "net.onnx", "horizon")
    kinds = [node.op_type for node in onnx.load(file.path).graph.node]
    pair = ["Constant", "Constant", "QuantizeLinear", "DequantizeLinear"]
    kept = ["MaxPool", "DepthToSpace", "Resize"]
    assert kinds == [*pair, *pair, "Conv", "Relu", *pair, *kept, *pair, "Conv"]
    assert [d.different for d in compare_qdq_onnx(file, model, x)] == [0, 0]


def test_questions_about_numbers_are_comparisons(calibrated: Fixture, tmp_path: Path) -> None:
    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.conv = nn.Conv2d(3, 4, 1)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            x = 1.0 / self.conv(x).relu()  # infinite for zeros
            odd = torch.logical_xor(torch.isnan(x - x), torch.isinf(x)) ^ (x > 1)
            return torch.where(odd & torch.isfinite(x), x, 0.5)

    x = torch.randn(1, 3, 6, 6)
    model = calibrated(Net(), x)
    file = export_qdq_onnx(model, x, tmp_path / "net.onnx", "horizon")
    assert lint_onnx(file.path, "horizon") == []
    assert sum(row.unexplained for row in compare_qdq_onnx(file, model, x)) == 0
