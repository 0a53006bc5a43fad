"""Every operator of the documented table, as a model writes it: trained quantized, in integers."""

from __future__ import annotations

import warnings

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from bevquant_hybrid import nn as horizon_nn
from bevquant_hybrid.nn.qat import QuantStub as QATQuantStub
from bevquant_hybrid.operators import load_support_table
from bevquant_hybrid.quantization import (
    DeQuantStub,
    QuantStub,
    convert_fx,
    get_default_calib_qconfig,
    get_default_qat_qconfig,
    prepare_calibration_fx,
    prepare_qat_fx,
    set_fake_quantize,
)

PICTURE = (2, 4, 6, 6)
_UNARY = {
    name: getattr(torch, name)
    for name in (
        *("abs", "acos", "acosh", "asin", "asinh", "atan", "atanh", "ceil", "cos", "cosh", "erf"),
        *("exp", "floor", "log", "reciprocal", "selu", "sin", "sinh", "sqrt", "tan"),
    )
}
_COMPARED = ("eq", "ge", "greater", "greater_equal", "gt", "le", "less", "less_equal")
# Row: a module, or a function of one picture, or of two.
ROWS: dict[str, nn.Module | object] = {
    **{f"torch.{name}": function for name, function in _UNARY.items()},
    "torch.Tensor.abs": lambda x: x.abs(),
    "torch.pow": lambda x: torch.pow(x, 2),
    "torch.add": lambda x, y: x + y,
    "torch.sub": lambda x, y: x - y,
    "torch.mul": lambda x, y: x * y,
    "torch.div": lambda x, y: x / y,
    "torch.maximum": torch.maximum,
    "torch.minimum": torch.minimum,
    "torch.matmul": torch.matmul,
    "torch.cat": lambda x, y: torch.cat([x, y], 1),
    "torch.clamp": lambda x: torch.clamp(x, 0.25, 0.75),
    "torch.clip": lambda x: torch.clip(x, max=0.5),
    "torch.Tensor.clamp": lambda x: x.clamp(0.25, 0.75),
    "torch.Tensor.clip": lambda x: x.clip(0.25, 0.75),
    "torch.mean": lambda x: torch.mean(x, (2, 3), keepdim=True),
    "torch.sum": lambda x: torch.sum(x, 1, keepdim=True),
    "torch.split": lambda x: torch.split(x, 2, 1)[1],
    "torch.gather": lambda x: torch.gather(x, 1, torch.zeros(PICTURE, dtype=torch.long)),
    "torch.topk": lambda x: torch.topk(x, 2, 1)[0],
    "torch.max": lambda x: torch.max(x, 1)[0],
    "torch.min": lambda x: torch.min(x, 1)[0],
    "torch.Tensor.max": lambda x: x.max(1)[0],
    "torch.Tensor.min": lambda x: x.min(1)[0],
    "torch.argmax": lambda x: torch.argmax(x, 1),
    "torch.argmin": lambda x: torch.argmin(x, 1),
    "torch.Tensor.argmax": lambda x: x.argmax(1),
    "torch.Tensor.argmin": lambda x: x.argmin(1),
    "torch.lt": lambda x: torch.lt(x, 0.5),
    **{f"torch.{n}": lambda x, n=n: getattr(torch, n)(x, 0.5) for n in _COMPARED},
    **{f"torch.Tensor.{n}": lambda x, n=n: getattr(x, n)(0.5) for n in _COMPARED},
    "torch.Tensor.getitem": lambda x: x[:, 1:3],
    "torch.Tensor.transpose": lambda x: x.transpose(1, 2),
    "torch.Tensor.reshape": lambda x: x.reshape(2, 8, 18),
    "torch.Tensor.expand": lambda x: x[:, :1].expand(2, 3, 6, 6),
    "torch.Tensor.repeat": lambda x: x.repeat(1, 2, 1, 1),
    "torch.Tensor.tile": lambda x: x.tile(1, 2, 1, 1),
    "torch.nn.functional.interpolate": lambda x: F.interpolate(x, scale_factor=2, mode="bilinear"),
    "torch.nn.functional.grid_sample": lambda x: F.grid_sample(
        x, torch.linspace(-1, 1, 2 * 25 * 2).reshape(2, 5, 5, 2), align_corners=False
    ),
    "torch.nn.functional.pad": lambda x: F.pad(x, (1, 2)),
    "torch.nn.functional.relu": F.relu,
    "torch.nn.functional.relu6(fused)": F.relu6,
    "torch.nn.AdaptiveAvgPool2d": nn.AdaptiveAvgPool2d(2),
    "torch.nn.AvgPool2d": nn.AvgPool2d(2),
    "torch.nn.BatchNorm2d": nn.BatchNorm2d(4),
    "torch.nn.BatchNorm3d": nn.Sequential(nn.Unflatten(1, (2, 2)), nn.BatchNorm3d(2)),
    "torch.nn.SyncBatchNorm": nn.SyncBatchNorm(4),
    "torch.nn.ChannelShuffle": nn.ChannelShuffle(2),
    "torch.nn.ConstantPad2d": nn.ConstantPad2d(1, 0.5),
    "torch.nn.ReplicationPad2d": nn.ReplicationPad2d(1),
    "torch.nn.ZeroPad2d": nn.ZeroPad2d(1),
    "torch.nn.Conv2d": nn.Conv2d(4, 3, 3),
    "torch.nn.Conv3d": nn.Sequential(nn.Unflatten(1, (2, 2)), nn.Conv3d(2, 3, 2)),
    "torch.nn.ConvTranspose2d": nn.ConvTranspose2d(4, 3, 2, 2),
    "torch.nn.Linear": nn.Linear(6, 5),
    "torch.nn.Dropout": nn.Dropout(),
    "torch.nn.Dropout2d": nn.Dropout2d(),
    "torch.nn.Identity": nn.Identity(),
    "torch.nn.ELU": nn.ELU(),
    "torch.nn.GELU": nn.GELU(),
    "torch.nn.GLU": nn.GLU(1),
    "torch.nn.HardSigmoid": nn.Hardsigmoid(),
    "torch.nn.LeakyReLU": nn.LeakyReLU(0.1),
    "torch.nn.PReLU": nn.PReLU(),
    "torch.nn.ReLU": nn.ReLU(),
    "torch.nn.ReLU6": nn.ReLU6(),
    "torch.nn.SiLU": nn.SiLU(),
    "torch.nn.Sigmoid": nn.Sigmoid(),
    "torch.nn.Softplus": nn.Softplus(),
    "torch.nn.Tanh": nn.Tanh(),
    "torch.nn.LayerNorm": nn.LayerNorm(6),
    "torch.nn.Softmax": nn.Softmax(1),
    "torch.nn.MaxPool2d": nn.MaxPool2d(2),
    "torch.nn.PixelShuffle": nn.PixelShuffle(2),
    "torch.nn.PixelUnshuffle": nn.PixelUnshuffle(2),
    "torch.nn.Upsample": nn.Upsample(scale_factor=2),
    "torch.nn.UpsamplingBilinear2d": nn.UpsamplingBilinear2d(scale_factor=2),
    "torch.nn.UpsamplingNearest2d": nn.UpsamplingNearest2d(scale_factor=2),
    "horizon.nn.Correlation": horizon_nn.Correlation(3, 2, 1, 2, 2),
    "torchvision.ops.MultiScaleRoIAlign": horizon_nn.MultiScaleRoIAlign(2, [4]),
}
ELSEWHERE = {
    # Stubs are in every model here; the others have tests of their own.
    *("torch.quantization.QuantStub", "torch.quantization.DeQuantStub"),
    *("torch.nn.LSTMCell", "torch.nn.MultiheadAttention"),
    *("horizon.nn.PointPillarsScatter", "horizon.nn.functional.point_pillars_preprocess"),
    *("horizon.nn.DetectionPostProcess", "horizon.nn.DetectionPostProcessV1"),
    *("horizon.nn.RcnnPostProcess", "torchvision.models.detection.rpn.AnchorGenerator"),
}
NOT_QUANTIZED = {"torchvision.ops.RoIAlign"}  # torchvision's own
BOXES = [torch.tensor([[2.0, 3.0, 15.0, 18.0]]), torch.tensor([[0.0, 0.0, 20.0, 9.0]])]


def test_the_list_here_is_the_table() -> None:
    rows = set(load_support_table().operators)
    assert set(ROWS) | ELSEWHERE | NOT_QUANTIZED == rows


def takes_two(operator) -> bool:
    code = getattr(operator, "__code__", None)
    if isinstance(operator, horizon_nn.Correlation):
        return True
    named = any(operator is f for f in (torch.maximum, torch.minimum, torch.matmul))
    return named or (code is not None and code.co_varnames[: code.co_argcount] == ("x", "y"))


class Model(nn.Module):
    """Two stubs, the operator, and a stub at the end."""

    def __init__(self, operator) -> None:
        super().__init__()
        self.quant, self.other, self.dequant = QuantStub(), QuantStub(), DeQuantStub()
        self.operator = operator
        self.two = takes_two(operator)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        quantized = self.quant(x)
        if isinstance(self.operator, horizon_nn.MultiScaleRoIAlign):
            return self.dequant(self.operator([quantized], BOXES))
        if self.two:
            return self.dequant(self.operator(quantized, self.other(y)))
        return self.dequant(self.operator(quantized))


@pytest.mark.parametrize("row", ROWS)
def test_integers_are_within_two_steps_of_training(row: str) -> None:
    model = Model(ROWS[row]).eval()
    support = load_support_table().operators[row].support["bayes"]
    dtype = "qint16" if support.input == ("qint16",) else "qint8"
    x, y = 0.1 + 0.8 * torch.rand(PICTURE), 0.1 + 0.8 * torch.rand(PICTURE)
    if row == "torch.acosh":
        x = x + 1.0
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        calibrated = prepare_calibration_fx(model, {"": get_default_calib_qconfig(dtype)}).eval()
        calibrated(x, y)
        made = prepare_qat_fx(calibrated, {"": get_default_qat_qconfig(dtype)}).eval()
        set_fake_quantize(made, "validation")
        trained, converted = made(x, y), convert_fx(made)(x, y)
    exact = model(x, y)
    if trained.dtype in (torch.bool, torch.int64):
        assert torch.equal(trained, converted)
        assert (trained == exact).float().mean() > 0.9
        return
    quantizers = [
        m.activation_post_process
        for m in made.modules()
        if getattr(m, "activation_post_process", None) is not None
    ]
    steps = [q.scale.item() for q in quantizers if hasattr(q, "scale") and q.scale.numel() == 1]
    stubs = [m for m in made.modules() if isinstance(m, QATQuantStub)]
    step = steps[-1] if len(steps) > len(stubs) else steps[0]
    assert (converted - trained).abs().max() <= 2.01 * step
    assert (trained - exact).norm() <= 0.05 * exact.norm()
