from __future__ import annotations

import io

import pytest
import torch
from torch import nn

import bevquant_hybrid as horizon
from bevquant_hybrid.quantization import (
    QuantStub,
    convert_fx,
    get_default_qat_out_qconfig,
    get_default_qat_qconfig,
    prepare_qat_fx,
    set_fake_quantize,
)
from bevquant_hybrid.utils.onnx_helper import export_quantized_onnx, export_to_onnx

onnx = pytest.importorskip("onnx")


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.quant = QuantStub()
        self.first = nn.Sequential(nn.Conv2d(3, 6, 3, padding=1), nn.BatchNorm2d(6), nn.ReLU())
        self.up = nn.ConvTranspose2d(6, 4, 2, 2)
        self.head = nn.Conv2d(4, 5, 1)
        self.dequant = horizon.quantization.DeQuantStub()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.dequant(self.head(self.up(self.first(self.quant(x)))))


@pytest.fixture
def qat():
    model = Net().eval()
    qat = prepare_qat_fx(
        model,
        {"": get_default_qat_qconfig(), "module_name": [("head", get_default_qat_out_qconfig())]},
    ).eval()
    for _ in range(3):
        qat(torch.rand(2, 3, 8, 8))
    return qat


def exported(model: nn.Module, x: torch.Tensor, **settings):
    file = io.BytesIO()
    export_to_onnx(model, x, file, operator_export_type=None, **settings)
    return onnx.load_from_string(file.getvalue())


def test_every_fake_quantizer_is_a_pair_of_standard_nodes(qat) -> None:
    proto = exported(qat, torch.rand(1, 3, 8, 8), enable_onnx_checker=True)
    assert proto.opset_import[0].version == 11
    assert [i.domain for i in proto.opset_import] == [""]
    pair = ["Constant", "Constant", "QuantizeLinear", "DequantizeLinear"]
    kinds = [node.op_type for node in proto.graph.node]
    expected = [*pair, *pair, "Conv", "Relu", *pair, *pair, "ConvTranspose", *pair, *pair, "Conv"]
    assert kinds == expected
    assert [node.name for node in proto.graph.node] == [f"{k}_{i}" for i, k in enumerate(kinds)]


def test_weights_stay_float_and_scales_are_the_models(qat) -> None:
    proto = exported(qat, torch.rand(1, 3, 8, 8))
    weights = {w.name: onnx.numpy_helper.to_array(w) for w in proto.graph.initializer}
    assert torch.equal(torch.tensor(weights["head.weight"]), qat.head.weight)
    reader = next(n for n in proto.graph.node if "head.weight" in n.input)
    scale = next(n for n in proto.graph.node if reader.input[1] in n.output)
    values = onnx.numpy_helper.to_array(scale.attribute[0].t)
    assert torch.equal(torch.tensor(values), qat.head.weight_fake_quant.scale)


def test_onnxruntime_computes_what_the_model_does(qat) -> None:
    runtime = pytest.importorskip("onnxruntime")
    x = torch.rand(1, 3, 8, 8)
    proto = exported(qat, x, opset_version=13, enable_onnx_checker=True)
    options = runtime.SessionOptions()
    # Fused into integer kernels, a tie may fall the other way.
    options.graph_optimization_level = runtime.GraphOptimizationLevel.ORT_DISABLE_ALL
    session = runtime.InferenceSession(proto.SerializeToString(), options)
    set_fake_quantize(qat, "validation")
    (result,) = session.run(None, {session.get_inputs()[0].name: x.numpy()})
    difference = (torch.tensor(result) - qat(x).dequantize().detach()).abs()
    # Sums in another order: a value beside a tie may round the other way, one step of one input.
    assert (difference > 1e-5).float().mean() < 0.02
    assert difference.max() < 0.01


def test_nothing_is_observed_while_writing(qat, tmp_path) -> None:
    before = {k: v.clone() for k, v in qat.state_dict().items()}
    export_to_onnx(qat, 100 * torch.rand(1, 3, 8, 8), tmp_path / "qat.onnx")
    assert [p.name for p in tmp_path.iterdir()] == ["qat.onnx"]
    assert all(torch.equal(v, before[k]) for k, v in qat.state_dict().items())
    assert bool(qat.quant.activation_post_process.observer_enabled)


def test_what_cannot_be_written_is_refused(qat) -> None:
    with pytest.raises(ValueError, match="opset_version=12: expected 11 or 13"):
        exported(qat, torch.rand(1, 3, 8, 8), opset_version=12)
    with pytest.raises(ValueError, match=r"quant \(Quantize\) computes in integers"):
        exported(convert_fx(qat), torch.rand(1, 3, 8, 8))
    wide = prepare_qat_fx(Net().eval(), {"": get_default_qat_qconfig(dtype="qint16")})
    with pytest.raises(ValueError, match="-32768 … 32767"):
        exported(wide, torch.rand(1, 3, 8, 8))


def test_a_converted_model_is_written_to_be_looked_at(qat, tmp_path) -> None:
    converted, x = convert_fx(qat), torch.rand(1, 3, 8, 8)
    export_quantized_onnx(converted, x, tmp_path / "fixed.onnx", input_names=["picture"])
    proto = onnx.load(tmp_path / "fixed.onnx")
    kinds = [node.op_type for node in proto.graph.node if node.domain == "bevquant_hybrid"]
    # The last layer's sums leave as they are; the others are requantized.
    layers = ["quantize_bias", "conv", "requantize"]
    assert kinds == ["quantize", *layers, *layers, "quantize_bias", "conv", "dequantize"]
    assert [i.name for i in proto.graph.input] == ["picture"]
    names = [node.name for node in proto.graph.node]
    assert names == [f"{node.op_type}_{i}" for i, node in enumerate(proto.graph.node)]
    weights = {w.name: onnx.numpy_helper.to_array(w) for w in proto.graph.initializer}
    assert (weights["head.weight"] == converted.head.weight.numpy()).all()
    assert {entry.domain for entry in proto.opset_import} == {"", "bevquant_hybrid"}


def test_a_model_that_is_not_converted_is_written_otherwise(qat) -> None:
    with pytest.raises(ValueError, match=r"no module .* computes in integers; convert it first"):
        export_quantized_onnx(qat, torch.rand(1, 3, 8, 8), io.BytesIO())
