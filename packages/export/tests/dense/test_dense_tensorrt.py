"""Files for TensorRT: what its parser refuses is not in them, and they say what was simulated."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
import torch
from onnx import TensorProto, numpy_helper
from torch import Tensor, nn
from torch.nn import functional as F

from bevquant_export import compare_qdq_onnx, export_qdq_onnx, lint_onnx
from bevquant_int8sim import simulate
from bevquant_qnn import QuantAdd

Fixture = Callable[..., Any]


class Net(nn.Module):
    """A stem, a residual sum, one with QuantAdd, two scales joined, a linear layer."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Sequential(nn.Conv2d(3, 8, 3, bias=False), nn.BatchNorm2d(8), nn.ReLU())
        self.block = nn.Conv2d(8, 8, 3, padding=1)
        self.second = nn.Conv2d(8, 8, 3, padding=1)
        self.join = QuantAdd()
        self.down = nn.Conv2d(8, 8, 2, stride=2)
        self.up = nn.ConvTranspose2d(8, 8, 2, stride=2)
        self.smooth = nn.Conv2d(16, 8, 1)
        self.last = nn.Linear(8, 4)

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x)
        x = F.relu(self.block(x) + x)
        x = F.relu(self.join(self.second(x), x))
        up = F.relu(self.up(F.relu(self.down(x))))
        y = F.relu(self.smooth(torch.cat([x, up], 1)))
        return self.last(F.adaptive_avg_pool2d(y, 1).flatten(1))


class File:
    """Who makes and who reads which tensor."""

    def __init__(self, path: Path) -> None:
        self.graph = onnx.load(path).graph
        self.opset = onnx.load(path).opset_import[0].version
        self.constants = {c.name: numpy_helper.to_array(c).copy() for c in self.graph.initializer}
        self.maker = {name: node for node in self.graph.node for name in node.output}

    def of(self, *operators: str) -> Iterator[Any]:
        return (node for node in self.graph.node if node.op_type in operators)

    def readers(self, name: str) -> list[Any]:
        return [node for node in self.graph.node if name in node.input]

    def made_by(self, name: str) -> str:
        return self.maker[name].op_type if name in self.maker else ""


@pytest.fixture
def written(calibrated: Fixture, tmp_path: Path) -> tuple[nn.Module, Tensor, Any, File]:
    x = torch.randn(2, 3, 14, 14)
    model = calibrated(Net(), x)
    file = export_qdq_onnx(model, x, tmp_path / "net.onnx", "tensorrt")
    return model, x, file, File(file.path)


def test_pairs_are_symmetric_int8_with_constant_scales(written: Any) -> None:
    file = written[3]
    assert file.opset == 13
    assert TensorProto.UINT8 not in {c.data_type for c in file.graph.initializer}
    pairs = list(file.of("QuantizeLinear", "DequantizeLinear"))
    assert len(pairs) > 20
    for node in pairs:
        scale, zero = file.constants[node.input[1]], file.constants[node.input[2]]
        assert scale.shape == zero.shape
        assert (scale > 0).all()
        assert zero.dtype == np.int8
        assert not zero.any()


def test_activations_have_one_scale_and_weights_one_per_output_channel(written: Any) -> None:
    file = written[3]
    for node in file.of("QuantizeLinear"):
        source = node.input[0]
        scale = file.constants[node.input[1]]
        if source not in file.constants:
            assert scale.shape == ()
            continue
        axis = next(a.i for a in node.attribute if a.name == "axis")
        assert scale.shape == (file.constants[source].shape[axis],)
        assert file.constants[source].dtype == np.float32


def test_layers_read_pairs_and_their_bias_is_float(written: Any) -> None:
    file = written[3]
    for node in file.of("Conv", "Gemm"):
        assert [file.made_by(name) for name in node.input[:2]] == ["DequantizeLinear"] * 2
        assert file.constants[node.input[2]].dtype == np.float32
        (reader,) = file.readers(node.output[0]) or [None]
        # Nothing is quantized between a convolution and its ReLU.
        assert reader is None or reader.op_type in ("Relu", "QuantizeLinear", "Add")


def test_sums_read_pairs_where_the_model_quantizes(written: Any) -> None:
    file = written[3]
    first, second = file.of("Add")
    # The shortcut alone, so that the sum fuses into the convolution; with QuantAdd both, by one
    # scale.
    assert sorted(file.made_by(name) for name in first.input) == ["Conv", "DequantizeLinear"]
    assert [file.made_by(name) for name in second.input] == ["DequantizeLinear"] * 2
    scales = {float(file.constants[file.maker[name].input[1]]) for name in second.input}
    assert len(scales) == 1


def test_joined_tensors_have_one_scale(written: Any) -> None:
    file = written[3]
    (join,) = file.of("Concat")
    assert {file.made_by(name) for name in join.input} == {"DequantizeLinear"}
    assert len({file.maker[name].input[1] for name in join.input}) <= 2
    assert len({float(file.constants[file.maker[n].input[1]]) for n in join.input}) == 1


def test_transposed_convolutions_have_float_weights_or_one_scale(
    written: Any, calibrated: Fixture, tmp_path: Path
) -> None:
    _, x, file, graph = written
    (node,) = graph.of("ConvTranspose")
    assert node.input[1] in graph.constants
    assert any("up" in note for note in file.notes)
    single = calibrated(Net(), x, weight_per_channel=False)
    again = export_qdq_onnx(single, x, tmp_path / "single.onnx", "tensorrt")
    assert again.notes == ()
    graph = File(again.path)
    (node,) = graph.of("ConvTranspose")
    pair = graph.maker[node.input[1]]
    assert pair.op_type == "DequantizeLinear"
    assert graph.constants[pair.input[1]].shape == ()


def test_the_linter_finds_nothing(written: Any) -> None:
    assert lint_onnx(written[2].path, "tensorrt") == []


def test_what_the_file_says_is_what_was_simulated(written: Any, run: Fixture) -> None:
    model, x, file, _ = written
    differences = compare_qdq_onnx(file, model, x)
    assert {d.op for d in differences} >= {"conv", "conv_transpose", "add", "layout"}
    assert max(d.largest for d in differences) <= 1
    # Sums in float32 instead of float64 tell apart what lies within 1e-5 of half a step.
    assert sum(d.different for d in differences) <= 1e-4 * sum(d.elements for d in differences)
    made, _ = run(file, x, optimised=False)
    torch.testing.assert_close(made[0], simulate(model, x)(x), rtol=0.02, atol=0.02)


def test_weights_pass_their_pair_unchanged(written: Any) -> None:
    model, graph = written[0], written[3]
    for path in ("stem.0", "block", "down", "last"):
        want = model.get_submodule(path).quantized_weight().detach()
        float_weight = torch.from_numpy(graph.constants[f"{path}.weight"])
        torch.testing.assert_close(float_weight, want, rtol=1e-6, atol=1e-7)
        shape = [-1] + [1] * (want.dim() - 1)
        q = float_weight.double() / torch.from_numpy(
            graph.constants[f"{path}.weight_scale"].astype(np.float64)
        ).view(shape)
        torch.testing.assert_close(q, q.round(), rtol=0, atol=1e-4)
        assert q.abs().max().round() == 127


def test_a_relu6_is_a_clip_and_a_narrow_range_is_noted(
    calibrated: Fixture, run: Fixture, tmp_path: Path
) -> None:
    class Capped(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.last = nn.Conv2d(3, 4, 1), nn.Conv2d(4, 4, 1)

        def forward(self, x: Tensor) -> Tensor:
            return self.last(F.relu6(self.first(x)))

    x = torch.randn(2, 3, 6, 6) * 8
    model = calibrated(Capped(), x, narrow_range=True)
    file = export_qdq_onnx(model, x, tmp_path / "net.onnx", "tensorrt")
    assert [node.op_type for node in File(file.path).of("Clip", "Relu")] == ["Clip"]
    assert len(file.notes) == 1
    assert "narrow_range" in file.notes[0]
    assert not any(d.different for d in compare_qdq_onnx(file, model, x))
    made, _ = run(file, x, optimised=False)
    torch.testing.assert_close(made[0], simulate(model, x)(x), rtol=1e-4, atol=1e-4)
