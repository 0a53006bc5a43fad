"""What TensorRT is predicted to run in which type, beside what an engine says of itself."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import onnx
import pytest
import torch
from torch import Tensor, nn

from bevquant_export import export_qdq_onnx
from bevquant_export.lint import (
    LayerPrediction,
    main,
    match_layers,
    predict_layers,
    read_engine_layers,
)
from bevquant_fusion import fuse_model
from bevquant_qnn import quantize_model
from bevquant_quantizers import calibrate


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(4, 4, 3, padding=1)
        self.conv2 = nn.Conv2d(4, 4, 3, padding=1)
        self.gate = nn.Sigmoid()
        self.out = nn.Conv2d(4, 2, 1)

    def forward(self, x: Tensor) -> Tensor:
        y = torch.relu(self.conv2(torch.relu(self.conv1(x))) + x)
        return self.out(self.gate(y))


@pytest.fixture
def file(tmp_path: Path) -> Path:
    torch.manual_seed(0)
    x = torch.randn(1, 4, 8, 8)
    model = quantize_model(fuse_model(Block().eval(), (x,)).model, example_inputs=x).model.eval()
    calibrate(model, [x], method="max")
    return export_qdq_onnx(model, x, tmp_path / "net.onnx", "tensorrt11").path


def by_name(path: Path, target: str = "tensorrt11") -> dict[str, LayerPrediction]:
    return {item.name: item for item in predict_layers(path, target)}


def test_layers_are_predicted_with_reasons(file: Path) -> None:
    found = by_name(file)
    assert (found["conv1.Conv"].runs, found["conv2.Conv"].runs) == ("int8", "int8")
    assert found["conv1.Relu"].into == "conv1.Conv"
    assert found["Add"].into == "conv2.Conv"
    assert found["Relu"].into == "conv2.Conv"
    assert found["gate.Sigmoid"].runs == "fp16"
    assert "no int8 kernel" in found["gate.Sigmoid"].reason
    assert found["gate.Sigmoid"].reformats


def test_what_breaks_int8_is_named(file: Path) -> None:
    proto = onnx.load(file)
    conv = next(n for n in proto.graph.node if n.name == "conv2.Conv")
    pair = next(n for n in proto.graph.node if n.output[0] == conv.input[0])
    quantizer = next(n for n in proto.graph.node if n.output[0] == pair.input[0])
    conv.input[0] = quantizer.input[0]
    onnx.save(proto, file)
    item = by_name(file)["conv2.Conv"]
    assert item.runs == "float32"
    assert item.reason.endswith("has no pair: quantize it")
    assert by_name(file, "tensorrt10")["conv2.Conv"].runs == "fp16"


def layer(name: str, reads: str, **more: Any) -> dict[str, Any]:
    port = {"Name": "t", "Dimensions": [1], "Format/Datatype": reads}
    return {
        "Name": name,
        "LayerType": "CaskConvolution",
        "Inputs": [port],
        "Outputs": [port],
        **more,
    }


@pytest.fixture
def engine(tmp_path: Path) -> Path:
    layers = [
        layer("Reformatting CopyNode for Input Tensor 0 to conv1.Conv", "Row major linear FP32"),
        layer("conv1.weight + conv1.Conv + conv1.Relu", "Channel major Int8 format"),
        layer("fused", "Row major linear FP16 format", Metadata="[ONNX Layer: conv2.Conv]"),
        layer("PWN(gate.Sigmoid)", "Row major Half"),
    ]
    path = tmp_path / "layers.json"
    path.write_text(json.dumps({"Layers": layers, "Bindings": ["x"]}))
    return path


def test_an_engines_layers_stand_beside_the_prediction(file: Path, engine: Path) -> None:
    matches = {
        m.predicted.name: m
        for m in match_layers(predict_layers(file, "tensorrt11"), read_engine_layers(engine))
    }
    assert matches["conv1.Conv"].agrees is True
    assert matches["conv1.Relu"].agrees is True
    assert matches["conv2.Conv"].agrees is False
    assert matches["conv2.Conv"].layer is not None
    assert matches["conv2.Conv"].layer.runs == "fp16"
    assert matches["out.Conv"].agrees is None


def test_the_command_shows_both(
    file: Path, engine: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = [str(file), "--target", "tensorrt11", "--against", str(engine)]
    assert main(words) == 1
    printed = capsys.readouterr().out
    line = next(text for text in printed.splitlines() if "conv2.Conv (Conv)" in text)
    assert line.split()[:2] == ["int8", "fp16"]
    assert "other than predicted" in line
    assert main([*words, "--json"]) == 1
    told = {item["name"]: item for item in json.loads(capsys.readouterr().out)}
    assert told["conv1.Conv"]["agrees"] is True
    assert main([str(file), "--target", "tensorrt11", "--layers"]) == 0
    assert "predicted kernels: " in capsys.readouterr().out


def test_a_list_of_names_tells_no_types(file: Path, tmp_path: Path) -> None:
    path = tmp_path / "names.json"
    path.write_text(json.dumps({"Layers": ["conv1.Conv + conv1.Relu", "out.Conv"]}))
    matches = match_layers(predict_layers(file, "tensorrt11"), read_engine_layers(path))
    known = {m.predicted.name: m for m in matches}
    assert known["conv1.Conv"].layer is not None
    assert known["conv1.Conv"].agrees is None


@pytest.mark.parametrize(
    ("layers", "message"),
    [
        (["conv1.Conv + conv1.Relu", "out.Conv"], "--profilingVerbosity=detailed"),
        ([layer("backbone.stem.Conv", "Row major Half")], "none of the file's layers"),
        ([], "no layer"),
    ],
    ids=["names", "another engine", "empty"],
)
def test_nothing_to_compare_is_no_success(
    layers: list[object],
    message: str,
    file: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    path = tmp_path / "layers.json"
    path.write_text(json.dumps({"Layers": layers}))
    assert main([str(file), "--target", "tensorrt11", "--against", str(path), "--json"]) == 2
    printed = capsys.readouterr()
    assert message in printed.err
    assert json.loads(printed.out)  # the prediction is still there


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("{", "no JSON"),
        ("[" * 100_000, "no JSON"),
        ('{"Bindings": []}', 'no list "Layers"'),
        ('{"Layers": [{"LayerType": "x"}]}', "layer 0 has no name"),
    ],
)
def test_what_is_no_list_of_layers_is_refused(
    content: str, message: str, file: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "layers.json"
    path.write_text(content)
    assert main([str(file), "--target", "tensorrt11", "--against", str(path)]) == 2
    assert message in capsys.readouterr().err


def test_other_targets_have_no_prediction(file: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([str(file), "--target", "onnxruntime", "--layers"]) == 2
    assert "expected a TensorRT" in capsys.readouterr().err
