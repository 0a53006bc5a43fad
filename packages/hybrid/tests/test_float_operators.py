"""What prepare makes of arithmetic and functions, what it refuses, and what runs on the CPU."""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.quantization import DeQuantStub

from bevquant_hybrid.march import March, set_march
from bevquant_hybrid.quantization import (
    FakeQuantState,
    QuantStub,
    check_model,
    compile_model,
    convert_fx,
    get_default_qat_qconfig,
    prepare_qat_fx,
    set_fake_quantize,
)
from bevquant_hybrid.runtime import load


class Of(nn.Module):
    """A function between stubs, with a parameter at hand."""

    def __init__(self, function: Callable[..., Tensor]) -> None:
        super().__init__()
        self.quant, self.dequant = QuantStub(), DeQuantStub()
        self.weight, self.bias = nn.Parameter(torch.rand(4) + 0.5), nn.Parameter(torch.randn(4))
        self.gain = nn.Parameter(torch.rand(1, 4, 1, 1) + 0.5)
        self.function = function

    def forward(self, x: Tensor) -> Tensor:
        x = self.quant(x)
        y = self.function(self, x) if len(_names(self.function)) == 2 else self.function(x)
        return self.dequant(y)


def _names(function: Callable[..., Tensor]) -> list[str]:
    return list(inspect.signature(function).parameters)


def _in_place(x: Tensor) -> Tensor:
    y = x * 2
    kept = y
    y += x
    return kept - y + y  # kept is y


# name: function, modules that compute it, and the error of 8 bits in steps of the result
QUANTIZED: dict[str, tuple[Callable[..., Tensor], list[str], float]] = {
    "scale of attention": (lambda x: x * (x.shape[1] ** -0.5), ["mul_scalar"], 2),
    "math.sqrt of a size": (lambda x: x / math.sqrt(x.shape[-1]), ["mul_scalar"], 2),
    "divided by a root": (lambda x: x / x.shape[1] ** 0.5, ["mul_scalar"], 2),
    "1 - x": (lambda x: 1 - x, ["mul_scalar", "add_scalar"], 3),
    "-x": (lambda x: -x, ["mul_scalar"], 2),
    "x - number": (lambda x: x - x.shape[1], ["add_scalar"], 2),
    "x += y": (_in_place, ["mul_scalar", "add", "sub", "add"], 5),
    "add with alpha": (lambda x: torch.add(x, x, alpha=2), ["mul_scalar", "add"], 4),
    "number / x": (lambda x: 2 / (x.abs() + 1), ["add_scalar", "reciprocal", "mul_scalar"], 5),
    "square": (lambda x: x.square(), ["mul"], 3),
    "where": (lambda x: torch.where(x > 0, x, x * 2), ["mul_scalar", "where"], 3),
    "where with a number": (lambda x: torch.where(x > 0, x, 0.0), ["where"], 2),
    "stack": (lambda x: torch.stack([x, x * 2], 1), ["mul_scalar", "cat"], 3),
    "einsum": (lambda x: torch.einsum("nchw,nkhw->nkc", x, x), ["matmul"], 3),
    "einsum of rows": (lambda x: torch.einsum("nchw,nkwl->nhlck", x, x), ["matmul"], 3),
    "outer product": (
        lambda x: torch.einsum("nc,nk->nck", x[:, :, 0, 0], x[:, :, 1, 1]),
        ["matmul"],
        3,
    ),
    "normalize": (lambda x: F.normalize(x, dim=1), ["normalize"], 5),
    "group_norm": (lambda m, x: F.group_norm(x, 2, m.weight, m.bias), ["group_norm"], 5),
    "layer_norm": (
        lambda m, x: F.layer_norm(x.permute(0, 2, 3, 1), (4,), m.weight, m.bias),
        ["layer_norm"],
        3,
    ),
    "attention": (
        lambda x: F.scaled_dot_product_attention(x, x, x),
        ["matmul", "mul_scalar", "softmax", "matmul"],
        6,
    ),
    "baddbmm": (lambda x: torch.baddbmm(x[:, 0], x[:, 1], x[:, 2]), ["matmul", "add"], 4),
    "parameter": (lambda m, x: x * m.gain, ["quant", "mul"], 4),
    "sum of a list": (lambda x: sum([x, x, x]), ["add", "add"], 3),
    "prelu": (lambda m, x: F.prelu(x, m.weight[:1].detach()), [], 0),
}
del QUANTIZED["prelu"]


@pytest.fixture
def x() -> Tensor:
    return torch.randn(2, 4, 8, 8, generator=torch.Generator().manual_seed(3))


@torch.no_grad()
@pytest.mark.parametrize("name", QUANTIZED)
def test_what_has_a_quantized_form_is_replaced_in_prepare(name: str, x: Tensor) -> None:
    function, made, steps = QUANTIZED[name]
    model = Of(function).eval()
    qat = prepare_qat_fx(
        model, {"": get_default_qat_qconfig(activation_qkwargs={"averaging_constant": 1.0})}
    )
    generated = [n.rsplit("_", 1)[0].partition("generated_")[2] for n in qat._modules]
    assert [n for n in generated if n] == made
    qat.eval()
    set_fake_quantize(qat, FakeQuantState.CALIBRATION)
    wanted = model(x)
    tolerance = 1e-5 * float(wanted.abs().max())
    assert torch.allclose(
        qat(x), wanted, atol=max(tolerance, 1e-5)
    )  # unrounded, it is the function
    set_fake_quantize(qat, FakeQuantState.VALIDATION)
    trained = qat(x)
    step = float(wanted.abs().max()) / 127.5
    assert float((trained - wanted).abs().max()) <= steps * step
    converted = convert_fx(qat)(x)
    assert float((converted - trained).abs().max()) <= 2.01 * step


def test_a_number_of_shapes_is_the_one_of_each_call() -> None:
    """What the size of a picture gives is no constant of the first picture."""
    qat = prepare_qat_fx(Of(lambda x: x / x.shape[-1]), {"": get_default_qat_qconfig()}).eval()
    set_fake_quantize(qat, FakeQuantState.CALIBRATION)
    for side in (2, 4):
        assert torch.allclose(qat(torch.ones(1, 4, 2, side)), torch.full((1, 4, 2, side), 1 / side))


@pytest.mark.parametrize(
    ("function", "operator", "remedy"),
    [
        (lambda x: x.cumsum(1), "cumsum", "put a DeQuantStub before it"),
        (lambda x: x.std(1), "std", "mean of squares"),
        (lambda x: F.instance_norm(x), "instance_norm", "nn.GroupNorm"),
        (lambda x: F.log_softmax(x, 1), "log_softmax", "nn.Softmax"),
        (lambda x: x // 2, "floordiv", "DeQuantStub"),
        (lambda x: x.masked_fill(x > 0, -math.inf), "masked_fill", "nn.MultiheadAttention"),
        (lambda x: F.normalize(x, p=1.0), "normalize", "p=1.0: expected 2"),
        (lambda x: torch.einsum("nchw->nc", x), "einsum", "two tensors"),
        (
            lambda x: F.scaled_dot_product_attention(x, x, x, is_causal=True),
            "scaled_dot_product_attention",
            "nn.MultiheadAttention takes masks",
        ),
        (lambda x: x + torch.zeros_like(x), "zeros_like", "DeQuantStub"),
        (lambda x: x * (x > 0), "FloatFunctional.mul", "reads gt, a float tensor"),
    ],
)
def test_what_has_none_is_refused_by_prepare_with_file_line_and_remedy(
    function: Callable[[Tensor], Tensor], operator: str, remedy: str
) -> None:
    with pytest.raises(ValueError, match="prepare_qat_fx: ") as caught:
        prepare_qat_fx(Of(function), {"": get_default_qat_qconfig()})
    message = str(caught.value)
    line = inspect.getsourcelines(function)[1]
    assert f"{Path(__file__)}:{line}: {operator} in the model" in message
    assert remedy in message
    assert "hybrid=True" in message


def test_modules_without_a_quantized_form_are_refused_too() -> None:
    model = nn.Sequential(QuantStub(), nn.Conv2d(3, 4, 1), nn.InstanceNorm2d(4))
    with pytest.raises(ValueError, match=r"InstanceNorm2d in 2 reads quantized values"):
        prepare_qat_fx(model, {"": get_default_qat_qconfig()})
    prepare_qat_fx(model, {"": get_default_qat_qconfig()}, hybrid=True)


def test_all_that_is_wrong_is_said_at_once() -> None:
    with pytest.raises(ValueError, match=r"cumsum[\s\S]*logsumexp"):
        prepare_qat_fx(
            Of(lambda x: x.cumsum(1) + x.logsumexp(1, True)), {"": get_default_qat_qconfig()}
        )


@pytest.mark.parametrize(
    "view",
    [
        lambda x: x[:, :2],
        lambda x: x.swapaxes(1, 2),
        lambda x: x.movedim(1, -1),
        lambda x: x.mT,
        lambda x: torch.narrow(x, 1, 0, 2),
        lambda x: x.tensor_split(2, 1)[0],
    ],
)
def test_writing_through_a_view_into_what_is_read_later_is_refused(view: Any) -> None:
    def function(x: Tensor) -> Tensor:
        y = x * 2
        part = view(y)
        part += 1
        return y

    with pytest.raises(ValueError, match=r"writes through a view into mul, which .* reads later"):
        prepare_qat_fx(Of(function), {"": get_default_qat_qconfig()})


def test_group_norm_is_made_of_documented_operators_and_trains_its_parameters(x: Tensor) -> None:
    model = nn.Sequential(QuantStub(), nn.GroupNorm(2, 4), DeQuantStub())
    nn.init.uniform_(model[1].weight, 0.5, 1.5)
    nn.init.normal_(model[1].bias)
    qat = prepare_qat_fx(model, {"": get_default_qat_qconfig()})
    before = [p.detach().clone() for p in qat.parameters()]
    optimizer = torch.optim.SGD(qat.parameters(), 0.1)
    qat(x).square().mean().backward()
    optimizer.step()
    assert all(not torch.equal(p, b) for p, b in zip(qat.parameters(), before, strict=True))
    again = prepare_qat_fx(model, {"": get_default_qat_qconfig()})
    set_fake_quantize(again, FakeQuantState.CALIBRATION)
    assert torch.allclose(again.eval()(x), model(x), atol=1e-5)
    assert check_model(convert_fx(qat), x, march="bayes") == 0


class Mixed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.quant, self.dequant = QuantStub(), DeQuantStub()
        self.conv, self.prelu = nn.Conv2d(3, 4, 1), nn.PReLU()

    def forward(self, x: Tensor) -> Tensor:
        x = self.conv(self.quant(x))
        x = x * (x.shape[1] ** -0.5)
        x = self.prelu(1 - x)
        return self.dequant(x.cumsum(1))


def test_in_hybrid_mode_arithmetic_is_on_the_bpu_and_the_rest_is_listed_with_reasons(
    caplog: pytest.LogCaptureFixture,
) -> None:
    with caplog.at_level("INFO", "bevquant_hybrid"):
        qat = prepare_qat_fx(Mixed(), {"": get_default_qat_qconfig()}, hybrid=True)
    generated = [n for n in qat._modules if "generated" in n]
    assert generated == [
        "_generated_mul_scalar_0",
        "_generated_mul_scalar_1",
        "_generated_add_scalar_0",
    ]
    listed = {entry.operator: entry for entry in qat.on_cpu}
    assert list(listed) == ["PReLU", "cumsum"]
    assert listed["PReLU"].reason == "the documents' hybrid example runs it on the CPU"
    assert "not among the operators that the mapper runs on a BPU" in listed["cumsum"].reason
    line = inspect.getsourcelines(Mixed.forward)[1] + 4
    assert listed["cumsum"].line == f"{__file__}:{line}"
    assert [record.getMessage() for record in caplog.records] == [
        f"on the CPU: {entry}" for entry in qat.on_cpu
    ]
    named = prepare_qat_fx(
        Mixed(), {"": get_default_qat_qconfig()}, hybrid=True, hybrid_dict={"module_name": ["conv"]}
    )
    assert named.on_cpu[0].reason == "hybrid_dict names it, or a module around it"


def test_attention_of_a_hybrid_model_multiplies_on_the_bpu(x: Tensor) -> None:
    qat = prepare_qat_fx(
        Of(lambda x: F.scaled_dot_product_attention(x, x, x)),
        {"": get_default_qat_qconfig()},
        hybrid=True,
    )
    assert [entry.operator for entry in qat.on_cpu] == ["Softmax"]
    qat(x)
    assert float((convert_fx(qat)(x) - qat(x)).abs().max()) < 0.1


def test_compile_refuses_what_the_march_does_not_have_with_the_table(tmp_path: Path) -> None:
    set_march(March.BERNOULLI2)
    qat = prepare_qat_fx(
        nn.Sequential(QuantStub(), nn.Conv2d(3, 4, 1), nn.SELU()), {"": get_default_qat_qconfig()}
    )
    image = torch.rand(1, 3, 4, 4)
    qat(image)
    converted = convert_fx(qat)
    assert check_model(converted, image) == 1
    with pytest.raises(ValueError, match=r"compile_model: 1 condition of BERNOULLI2") as caught:
        compile_model(converted, [image], hbm=tmp_path / "net.hbm")
    assert "torch.selu" in str(caught.value) or "SELU" in str(caught.value)
    assert not (tmp_path / "net.hbm").exists()
    compile_model(converted, [image], hbm=tmp_path / "net.hbm", march="bayes")
    compiled = load(tmp_path / "net.hbm")
    assert torch.equal(compiled(image).int_repr(), converted(image).int_repr())


@pytest.mark.parametrize("hybrid", [False, True])
@pytest.mark.parametrize("dynamo", [False, True])
@pytest.mark.filterwarnings("ignore")  # of the exporters
def test_torch_onnx_export_of_a_qat_model(
    hybrid: bool, dynamo: bool, tmp_path: Path, x: Tensor
) -> None:
    onnx = pytest.importorskip("onnx")
    pytest.importorskip("onnxscript")
    runtime = pytest.importorskip("onnxruntime")

    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.quant, self.dequant = QuantStub(), DeQuantStub()
            self.conv = nn.Conv2d(4, 4, 3, padding=1)
            self.norm, self.linear = nn.LayerNorm(4), nn.Linear(4, 4)

        def forward(self, x: Tensor) -> Tensor:
            x = F.relu(self.conv(self.quant(x)))
            x = F.interpolate(F.max_pool2d(x, 2), scale_factor=2, recompute_scale_factor=True)
            y = self.norm(x.flatten(2).transpose(1, 2))
            y = F.scaled_dot_product_attention(y, y, y) * (y.shape[-1] ** -0.5)
            return self.dequant(self.linear(y) + y)

    qat = prepare_qat_fx(Net(), {"": get_default_qat_qconfig()}, hybrid=hybrid)
    qat(x)
    qat.eval()
    before = {name: value.clone() for name, value in qat.state_dict().items()}
    path = tmp_path / "net.onnx"
    torch.onnx.export(qat, (x,), path, dynamo=dynamo)
    changed = [n for n, value in qat.state_dict().items() if not torch.equal(value, before[n])]
    assert changed == []
    set_fake_quantize(qat, FakeQuantState.VALIDATION)
    nodes = [node.op_type for node in onnx.load(path).graph.node]
    quantizers = sum(type(m).__name__ == "FakeQuantize" for m in qat.modules())
    softmax_parts = 0 if hybrid else 4  # drawn as one operator
    resized = 1  # and brought to the grid again
    assert nodes.count("QuantizeLinear") == quantizers - softmax_parts + resized
    options = runtime.SessionOptions()
    # Fused into integer kernels, sums saturate on x86 without VNNI.
    options.graph_optimization_level = runtime.GraphOptimizationLevel.ORT_DISABLE_ALL
    session = runtime.InferenceSession(path, options)
    got = session.run(None, {session.get_inputs()[0].name: x.numpy()})[0]
    assert abs(got - qat(x).detach().numpy()).max() < 0.12  # four steps
