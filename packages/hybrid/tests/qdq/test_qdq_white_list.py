"""Every operator that may stand in a file, on the BPU and on the CPU."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from bevquant_hybrid import nn as hnn
from bevquant_hybrid.nn.quantized import FloatFunctional
from bevquant_hybrid.quantization import DeQuantStub, QuantStub

Fixture = Callable[..., Any]
PROFILES = ("tensorrt", "onnxruntime", "horizon")


class Of(nn.Module):
    """A function as a module."""

    def __init__(self, function: Callable[[Tensor], Any]) -> None:
        super().__init__()
        self.function = function

    def forward(self, x: Tensor) -> Any:
        return self.function(x)


class Arithmetic(nn.Module):
    """A method of a FloatFunctional."""

    def __init__(self, call: Callable[[Any, Tensor], Tensor]) -> None:
        super().__init__()
        self.arithmetic = FloatFunctional()
        self.call = call

    def forward(self, x: Tensor) -> Tensor:
        return self.call(self.arithmetic, x)


class Branches(nn.Module):
    """Each operator reads one quantized tensor."""

    def __init__(self, operators: dict[str, nn.Module]) -> None:
        super().__init__()
        self.quant, self.first = QuantStub(), nn.Conv2d(3, 8, 3, padding=1)
        self.operators = nn.ModuleDict(operators)
        self.dequant = DeQuantStub()

    def forward(self, x: Tensor) -> Any:
        x = self.first(self.quant(x))
        return {name: self.dequant(made(x)) for name, made in self.operators.items()}


def functions() -> dict[str, nn.Module]:
    names = (
        "ELU GELU Hardsigmoid Hardswish LeakyReLU LogSigmoid Mish PReLU SELU SiLU Sigmoid Softplus "
        "Tanh ReLU ReLU6 Hardtanh"
    )
    own = "Atan Asinh Ceil Cos Cosh Erf Exp Floor Selu Sin Sinh Tan"
    return {
        **{name: getattr(nn, name)() for name in names.split()},
        **{f"own{name}": getattr(hnn, name)() for name in own.split()},
        "celu": nn.CELU(0.7), "tanh_gelu": nn.GELU("tanh"), "steep": nn.Softplus(beta=3),
        "acos": nn.Sequential(nn.Tanh(), hnn.Acos()), "asin": nn.Sequential(nn.Tanh(), hnn.Asin()),
        "acosh": nn.Sequential(Of(lambda x: F.relu(x) + 1.5), hnn.Acosh()),
        "atanh": nn.Sequential(nn.Tanh(), Of(lambda x: x * 0.9), hnn.Atanh()),
        "sqrt": nn.Sequential(nn.ReLU(), hnn.Sqrt()),
        "log": nn.Sequential(nn.ReLU(), Of(lambda x: x + 0.5), hnn.HardLog()),
        "reciprocal": nn.Sequential(nn.ReLU(), Of(lambda x: x + 0.5), hnn.Reciprocal()),
        "pow": hnn.Pow(2), "relu": Of(F.relu), "relu6": Of(F.relu6), "gelu": Of(F.gelu),
        "clamp": Of(lambda x: torch.clamp(x, -0.21, 0.33)), "abs": Of(torch.abs),
        "at_least": Of(lambda x: x.clamp(min=-0.1)), "sigmoid": Of(torch.sigmoid),
    }  # fmt: skip


def grids() -> dict[str, nn.Module]:
    return {
        "max": nn.MaxPool2d(3, 2, 1), "max_ceil": nn.MaxPool2d(3, 2, ceil_mode=True),
        "max_pool2d": Of(lambda x: F.max_pool2d(x, 2)),
        "average": nn.AvgPool2d(2), "average_padded": nn.AvgPool2d(3, 2, 1),
        "adaptive": nn.AdaptiveAvgPool2d(1), "adaptive4": nn.AdaptiveAvgPool2d(4),
        "up": nn.Upsample(scale_factor=2), "up_nearest": nn.UpsamplingNearest2d(size=(12, 20)),
        "up_bilinear": nn.Upsample(scale_factor=2, mode="bilinear"),
        "up_corners": nn.UpsamplingBilinear2d(scale_factor=2),
        "interpolate": hnn.Interpolate(scale_factor=1.5, recompute_scale_factor=True),
        "smooth": hnn.Interpolate(size=(5, 7), mode="bilinear"),
        "twice": Of(lambda x: F.interpolate(x, scale_factor=2)),
        "zero": nn.ZeroPad2d((1, 2, 0, 1)), "constant": nn.ConstantPad2d(1, 0.37),
        "replicate": nn.ReplicationPad2d(2), "pad": Of(lambda x: F.pad(x, (1, 1), value=-0.3)),
        "conv": nn.Conv2d(8, 4, (3, 5), padding="same"), "dilated": nn.Conv2d(8, 4, 3, dilation=2),
        "depthwise": nn.Conv2d(8, 8, 3, padding=1, groups=8), "bn": nn.BatchNorm2d(8),
        "folded": nn.Sequential(nn.Conv2d(8, 8, 1), nn.BatchNorm2d(8), nn.ReLU6()),
        "up_conv": nn.ConvTranspose2d(8, 6, 2, 2),
        "grouped_up": nn.ConvTranspose2d(8, 6, 3, 2, 1, 1, groups=2),
        "linear": nn.Sequential(nn.Flatten(), nn.Linear(512, 7)),
        "last": nn.Sequential(nn.Linear(8, 5), nn.ReLU()),
    }  # fmt: skip


def moves() -> dict[str, nn.Module]:
    return {
        "flatten": nn.Flatten(), "unflatten": nn.Unflatten(1, (2, 4)),
        "shuffle": nn.PixelShuffle(2),
        "same": nn.Sequential(nn.Identity(), nn.Dropout()), "unshuffle": nn.PixelUnshuffle(2),
        "channels": nn.ChannelShuffle(4), "view": Of(lambda x: x.view(x.size(0), -1)),
        "reshape": Of(lambda x: torch.reshape(x, (x.shape[0], 16, -1))),
        "permute": Of(lambda x: x.permute(0, 2, 3, 1)),
        "transpose": Of(lambda x: x.transpose(1, -1).contiguous()),
        "chunk": Of(lambda x: x.chunk(2, 1)), "part": Of(lambda x: x.split([3, 5], 1)[1]),
        "slice": Of(lambda x: x[:, 1:5, ::2]), "narrow": Of(lambda x: x.narrow(1, 2, 3)),
        "squeeze": Of(lambda x: x.unsqueeze(1).squeeze(1)), "one": Of(lambda x: x[:, 2]),
        "expand": Of(lambda x: x[:, :, :1].expand(-1, -1, 4, -1)),
        "repeat": Of(lambda x: x.repeat(2, 1, 1, 2, 1)),
        "tile": Of(lambda x: torch.tile(x, (1, 2))),
        "groups": Of(lambda x: torch.channel_shuffle(x, 2)),
    }  # fmt: skip


def arithmetic() -> dict[str, nn.Module]:
    return {
        "sum": Of(lambda x: x + x * 0.5), "difference": Of(lambda x: x * x - x),
        "number": Of(lambda x: x + 1.5), "less": Of(lambda x: x - 0.25),
        "third": Of(lambda x: x / 3),
        "mean": Of(lambda x: x.mean((2, 3), keepdim=True)), "mean1": Of(lambda x: torch.mean(x, 1)),
        "total": Of(lambda x: x.sum(1, keepdim=True)),
        "cat": Of(lambda x: torch.cat([x, x * 2], 1)),
        "maximum": Of(lambda x: torch.maximum(x, x * 0.3)),
        "minimum": Of(lambda x: torch.minimum(x, x * 0.3)),
        "matmul": Of(lambda x: torch.matmul(x, x.transpose(-1, -2))),
        "turned": Arithmetic(lambda f, x: f.matmul(x, x, x_trans=True)),
        "sum2": Arithmetic(lambda f, x: f.sum(x, dim=2)),
        "add_relu": Arithmetic(lambda f, x: f.add_relu(x, x)),
        "div": Of(lambda x: x / (x * 0.5)), "softmax": nn.Softmax(dim=1),
        "last": Of(lambda x: F.softmax(x, dim=-1)), "glu": nn.GLU(1),
        "norm": nn.LayerNorm([8, 8]), "channels": hnn.LayerNorm([8, 1, 1], dim=1),
    }  # fmt: skip


# onnxruntime interpolates in other steps, and has integer kernels of its own for these.
_LOOSE = {"resize": 0.05, "float": 0.1, "conv_transpose": 0.01}
# Pairs that a BPU has in other places than TensorRT wants them.
_TENSORRT = {"TRT012", "TRT014"}


Operators = Callable[[], dict[str, nn.Module]]


@pytest.fixture(scope="module")
def trained(prepared: Fixture) -> Fixture:
    """Branches that train quantized, or run on the CPU, and their input: made for all profiles."""

    @functools.cache
    def make(operators: Operators, on_cpu: bool = False) -> tuple[nn.Module, Tensor]:
        torch.manual_seed(0)
        x = torch.randn(2, 3, 8, 8)
        branches = operators()
        if not on_cpu:
            return prepared(Branches(branches).eval(), x), x
        branches.pop("div", None)  # 0/0 is NaN in floats
        wishes = {"module_name": [f"operators.{name}" for name in branches]}
        return prepared(Branches(branches).eval(), x, hybrid=True, hybrid_dict=wishes), x

    return make


@pytest.mark.parametrize("profile", PROFILES)
@pytest.mark.parametrize("operators", [functions, grids, moves, arithmetic])
def test_each_operator_makes_the_models_integers(
    operators: Operators, profile: str, trained: Fixture, found: Fixture
) -> None:
    qat, x = trained(operators)
    file, counted, lint = found(qat, x, profile)
    assert lint <= (_TENSORRT if profile == "tensorrt" else set())
    assert file.floats == ()
    assert counted["quantize"][0] == 0
    for op, (different, elements, largest) in counted.items():
        assert largest <= 1, op
        allowed = _LOOSE.get(op, 0.01) if profile == "onnxruntime" or op == "resize" else 1e-3
        assert different <= allowed * elements, op


def _runs(export: Any, file: Any, x: Tensor) -> dict[str, Tensor]:
    import onnxruntime

    options = onnxruntime.SessionOptions()
    options.log_severity_level = 3
    options.graph_optimization_level = onnxruntime.GraphOptimizationLevel.ORT_DISABLE_ALL
    content = export.lift_horizon_onnx(file.path).SerializeToString()
    session = onnxruntime.InferenceSession(content, options, ["CPUExecutionProvider"])
    made = session.run(None, dict(zip(file.inputs, [x.numpy()], strict=True)))
    return dict(zip(file.outputs, map(torch.tensor, made), strict=True))


@pytest.mark.parametrize("profile", ["tensorrt", "horizon"])
@pytest.mark.parametrize("operators", [functions, grids, moves, arithmetic])
def test_operators_on_the_cpu_stand_bare(
    operators: Operators, profile: str, trained: Fixture, found: Fixture, export: Any
) -> None:
    qat, x = trained(operators, on_cpu=True)
    file, counted, _ = found(qat, x, profile)
    # Sums before the function that needs them in its domain stay where they are: on the CPU too.
    assert set(counted) == {"quantize", "conv"}
    with torch.no_grad():
        want = qat(x)
    flat = [t for value in want.values() for t in (value if isinstance(value, tuple) else [value])]
    for made, expected in zip(_runs(export, file, x).values(), flat, strict=True):
        assert torch.isclose(made, expected, rtol=1e-3, atol=1e-4).float().mean() > 0.99
