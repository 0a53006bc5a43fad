"""The document on float models: its class from its own text, and each thing that it asks for."""

from __future__ import annotations

import re

import pytest
import torch
from torch import Tensor, nn

import bevquant_hybrid as horizon
from bevquant_hybrid.nn import qat
from bevquant_hybrid.quantization import convert, prepare_qat, prepare_qat_fx, set_fake_quantize


@pytest.fixture(scope="module")
def example(document) -> type[nn.Module]:
    """The document's class, with its slips mended: a comma, and an input that nobody gives."""
    text = document("003")
    code = text[text.index("import torch\nimport torch.nn.quantized") :]
    code = code.replace("fuse_known_modules\nQuantStub", "fuse_known_modules,\nQuantStub")
    assert "x = self.add.add(x, y)" in code
    code = code.replace("x = self.quant(x)", "x = y = self.quant(x)")
    # The kernel of 3 shrinks the picture, which the addition then cannot take.
    code = code.replace("y = self.quant(x)", "y = self.quant(x)\ny = y[..., 1:-1, 1:-1]", 1)
    lines, depth, inside = [], 0, False
    for line in code.replace("horizon_plugin_pytorch", "bevquant_hybrid").splitlines():
        level = 1 if line.startswith("def ") else 2 if inside else 0
        level = 0 if line.startswith("class ") else level
        inside = inside or line.startswith("class ")
        lines.append("    " * (level + bool(depth)) + line)
        depth += sum(map(line.count, "([{")) - sum(map(line.count, ")]}"))
    names: dict = {}
    exec("\n".join(lines), names)
    return names["ExampleNet"]


def fused(example: type[nn.Module]) -> nn.Module:
    model = example().eval()
    model.bn.running_mean.normal_(0, 0.3)
    model.bn.running_var.uniform_(0.5, 2)
    return model


def test_the_example_is_fused_prepared_and_converted(example) -> None:
    model = fused(example)
    x = torch.randn(4, 1, 9, 9)
    expected = model(x)
    model.fuse_model()
    kinds = [type(m).__name__ for m in (model.conv, model.bn, model.add, model.act)]
    assert kinds == ["Identity", "Identity", "ConvAddReLU2d", "Identity"]
    torch.testing.assert_close(model(x), expected)
    model.set_qconfig()
    made = prepare_qat(model)
    assert type(made.quant) is qat.QuantStub
    assert type(made.add) is qat.ConvAddReLU2d
    assert type(made.out_conv) is qat.Conv2d
    # No child but the last has a qconfig: the others have their parent's.
    assert made.add.activation_post_process.dtype == "qint8"
    assert made.out_conv.activation_post_process is None
    made(x)
    set_fake_quantize(made, "validation")
    result = made(x)
    assert type(result) is Tensor
    assert (result - expected).norm() < 0.05 * expected.norm()
    step = made.add.activation_post_process.scale.item()
    gain = made.out_conv.weight.abs().sum().item()
    assert (convert(made)(x) - result).abs().max() <= 1.01 * step * gain


def test_tracing_fuses_the_example_by_itself(example) -> None:
    model = fused(example)
    x = torch.randn(4, 1, 9, 9)
    expected = model(x)
    model.set_qconfig()
    made = prepare_qat_fx(model)
    assert type(made.add) is qat.ConvAddReLU2d
    assert made.out_conv.activation_post_process is None
    assert (made(x) - expected).norm() < 0.05 * expected.norm()


@pytest.mark.parametrize("name", ["conv1", "linear1"])
def test_qconfig_attributes_as_the_document_sets_them(name: str) -> None:
    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.quant, self.dequant = horizon.quantization.QuantStub(), nn.Identity()
            self.conv1, self.linear1 = nn.Conv2d(3, 3, 1), nn.Linear(5, 4)

        def forward(self, x: Tensor) -> Tensor:
            return self.linear1(self.conv1(self.quant(x)))

    model = Model()
    model.qconfig = horizon.quantization.get_default_qat_qconfig()
    custom = horizon.quantization.get_default_qat_qconfig(dtype="qint16")
    setattr(model.get_submodule(name), "qconfig", custom)  # noqa: B010
    made = prepare_qat(model)
    dtypes = {n: made.get_submodule(n).activation_post_process.dtype for n in ("conv1", "linear1")}
    assert dtypes == {"conv1": "qint8", "linear1": "qint8", name: "qint16"}
    model.get_submodule(name).qconfig = None
    kinds = {n: type(prepare_qat(model).get_submodule(n)) for n in ("conv1", "linear1")}
    assert kinds[name] is type(model.get_submodule(name))
    assert kinds.pop("linear1" if name == "conv1" else "conv1").__module__.startswith(qat.__name__)


def test_operators_that_the_document_replaces_by_modules() -> None:
    """A function that the document replaces (relu) keeps the scale; others must be modules."""
    model = nn.Sequential(horizon.quantization.QuantStub(), nn.ReLU())
    model.qconfig = horizon.quantization.get_default_qat_qconfig()
    made = prepare_qat(model)
    x = torch.randn(2, 3)
    stub = made[0]
    assert torch.equal(made(x).dequantize(), torch.nn.functional.relu(stub(x)).dequantize())
    with pytest.raises(NotImplementedError, match=r"add cannot take a QTensor.*FloatFunctional"):
        stub(x) + stub(x)
    with pytest.raises(
        NotImplementedError, match=r"exp cannot take a QTensor.*a module for others"
    ):
        stub(x).exp()


def test_the_documents_table_of_outputs_without_a_stub_is_covered(document) -> None:
    """test_outputs_without_dequantizing runs each of these in every stage."""
    text = document("003")
    table = text[text.index("作为模型输出层时不需要 DeQuantStub 的算子 |") :]
    rows = re.findall(r"^(.*) \|$", table[: table.index("4.2.3.1.3")], re.M)[1:]
    assert rows == [
        "torch.Tensor.argmax / torch.argmax",
        "horizon_plugin_pytorch.functional.argmax",
        "horizon_plugin_pytorch.functional.filter",
        "torch.max (返回值是 index 的部分无需反量化)",
    ]
