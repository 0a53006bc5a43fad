"""The other documents' listings, run from their own text with their slips mended."""

from __future__ import annotations

import re

import pytest
import torch
from torch import nn

from bevquant_hybrid import runtime
from bevquant_hybrid.nn import qat
from bevquant_hybrid.partition import partition

onnx = pytest.importorskip("onnx")
pytestmark = pytest.mark.filterwarnings("ignore:.*torch.jit:DeprecationWarning")


def indented(code: str) -> str:
    """Give a listing whose indentation was lost its indentation back."""
    lines, inside, method, depth, pending = [], False, False, 0, False
    for line in code.splitlines():
        text = line.strip()
        level = 0
        if text.startswith("class "):
            inside, method = True, False
        elif inside and depth == 0 and text.startswith("def "):
            level, method = 1, True
        elif inside and (method or depth):
            level = 2
        if (
            depth == 0
            and text
            and inside
            and method
            and re.match(r"data_shape|model =|#\s*\d", text)
        ):
            inside, method, level = False, False, 0
        if text.startswith("#"):
            level = 0
        lines.append("    " * (level + pending) + text)
        depth += sum(map(text.count, "([{")) - sum(map(text.count, ")]}"))
        pending = text.startswith("for ") and text.endswith(":")
    return "\n".join(lines)


@pytest.fixture(scope="module")
def listings(document):
    """The listing without and the one with CPU operators."""
    text = document("002").replace("horizon_plugin_pytorch", "bevquant_hybrid")
    starts = [m.start() for m in re.finditer(r"^import torch\n|^import numpy as np\n", text, re.M)]
    plain = text[starts[0] : text.index("2.2 异构方案")]
    mixed = text[starts[1] : text.index("8. 使用hb_mapper工具完成定点转换&模型编译\n最简")]
    # A slip: x is read before it is set.
    start = "def forward(self, input):\nx = self.selu("
    mixed = mixed.replace(f"{start}x)", f"{start}input)")
    return indented(plain), indented(mixed), text


def test_the_listing_without_cpu_operators(listings, tmp_path, monkeypatch, capsys) -> None:
    monkeypatch.chdir(tmp_path)
    names: dict = {}
    exec(listings[0], names)
    assert "This model is supported!\nHBDK model check PASS\n" in capsys.readouterr().out
    compiled = runtime.load(tmp_path / "model_output" / "model.hbm")
    assert torch.equal(compiled(names["data"]), names["quantize_res"])
    assert onnx.load("qat.onnx").opset_import[0].version == 11
    model = names["qat_model"]
    kinds = {name: type(module) for name, module in model.named_modules()}
    assert kinds["layer0.0"] is qat.ConvReLU2d
    assert kinds["layer1.add"] is qat.ConvAddReLU2d
    assert kinds["layer2.add"] is qat.ConvAddReLU2d
    assert kinds["layer1.conv"] is kinds["layer1.relu"] is nn.Identity
    assert kinds["layer2.conv"] is kinds["layer2.bn"] is kinds["layer2.relu"] is nn.Identity
    assert kinds["layer0.1"] is kinds["layer0.2"] is nn.Identity
    assert kinds["conv1"] is qat.Conv2d
    assert model.conv1.activation_post_process is None
    expected = names["model"].eval()(names["data"])
    assert (names["qat_res"] - expected).norm() < 0.05 * expected.norm()


class ConvBNReLU(nn.Sequential):
    """The block that the second listing takes from the first, with the names it refers to."""

    def __init__(self, channels: int = 3) -> None:
        super().__init__()
        self.conv, self.bn, self.relu = (
            nn.Conv2d(channels, channels, 1),
            nn.BatchNorm2d(channels),
            nn.ReLU(),
        )


def test_the_hybrid_listing_numbers_its_convolution_as_documented(
    listings, tmp_path, monkeypatch
) -> None:
    monkeypatch.chdir(tmp_path)
    names: dict = {"ConvBNReLU": ConvBNReLU}
    exec(listings[1], names)
    proto = onnx.load("qat.onnx")
    nodes = {node.name: node for node in proto.graph.node}
    assert 'run_on_cpu: "Conv_32"' in listings[2]
    weights = {w.name for w in proto.graph.initializer}
    # The convolution that the user put on the CPU: its weight is not quantized, its input is.
    conv = nodes["Conv_32"]
    assert set(conv.input) & weights == {"conv0.weight", "conv0.bias"}
    producer = next(n for n in proto.graph.node if conv.input[0] in n.output)
    assert producer.op_type == "DequantizeLinear"
    convs = (n for n in proto.graph.node if n.op_type == "Conv")
    layer1 = next(n for n in convs if _before(proto, n) == "Selu")
    assert layer1.name == "Conv_16"
    settings = (tmp_path / "qat.yaml").read_text()
    assert 'run_on_cpu: "Conv_32"\n' in settings
    documented = listings[2][listings[2].index("model_parameters:") :]
    documented = documented[: documented.index("模型转换")]
    # The document names the binary "hybrid"; here it has the file's name.
    values = dict(setting_lines(documented), output_model_file_prefix="qat")
    assert dict(setting_lines(settings)) == values
    assert [key for key, _ in setting_lines(settings)] == [*values]
    assert names["quantize_res"].shape == names["float_res"].shape
    runs_where_the_documents_pictures_show(names["qat_model"])


def setting_lines(yaml: str) -> list[tuple[str, str]]:
    found = re.findall(r"^ *(\w+): *(.*)$", yaml, re.M)
    return [(key, value.strip("'\"")) for key, value in found]


def runs_where_the_documents_pictures_show(model) -> None:
    """selu, layer1.conv and conv0 on the CPU; three BPU parts, the last with a 32-bit output."""
    plan = partition(model, "bayes")
    # Under fx's names: the module layer1.conv is fused with what follows it.
    on_cpu = [n.name for n in plan.nodes if n.place == "CPU" and n.kind == "operator"]
    assert on_cpu == ["selu", "selu_1", "layer1_conv", "conv0", "selu_2"]
    on_bpu = [segment.nodes for segment in plan.segments if segment.place == "BPU"]
    assert on_bpu == [("layer0_conv",), ("layer2_conv",), ("conv1",)]
    for path in ("layer0.conv", "layer2.conv"):
        assert model.get_submodule(path).activation_post_process is not None
    assert model.conv1.activation_post_process is None


def _before(proto, node) -> str:
    producer = next((n for n in proto.graph.node if node.input[0] in n.output), None)
    return producer.op_type if producer is not None else ""
