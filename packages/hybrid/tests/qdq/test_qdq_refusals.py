"""What cannot be written is refused by name, and the model stays as it was."""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from bevquant_hybrid.quantization import (
    DeQuantStub,
    FakeQuantState,
    QuantStub,
    convert_fx,
    get_default_calib_qconfig,
    get_default_qat_qconfig,
    prepare_calibration_fx,
    prepare_qat,
    prepare_qat_fx,
    set_fake_quantize,
)

Fixture = Callable[..., Any]


class Of(nn.Module):
    def __init__(self, function: Callable[[Tensor], Any]) -> None:
        super().__init__()
        self.function = function

    def forward(self, x: Tensor) -> Any:
        return self.function(x)


@pytest.fixture
def x() -> Tensor:
    return torch.randn(1, 8, 8, 8)


@pytest.fixture
def refused(export: Any, tmp_path: Path) -> Callable[..., str]:
    """What an export says that fails and leaves no file."""

    def attempt(model: nn.Module, args: Any, kind: type[Exception] = ValueError) -> str:
        with pytest.raises(kind) as caught:
            export.export_qdq_onnx(model, args, tmp_path / "net.onnx")
        assert list(tmp_path.iterdir()) == []
        message = str(caught.value)
        assert message.startswith("export_qdq_onnx: ")
        return message

    return attempt


def test_quantizers_that_saw_nothing_are_listed(
    between: Fixture, refused: Fixture, x: Tensor
) -> None:
    net = between(nn.Conv2d(8, 8, 1), nn.Sigmoid())
    qat = prepare_qat_fx(net, {"": get_default_qat_qconfig()}).eval()
    paths = ("quant", "net.0", "net.1")
    listed = ", ".join(f"{path}.activation_post_process" for path in paths)
    assert f"{listed}: no values seen" in refused(qat, x)
    calibration = prepare_calibration_fx(net, {"": get_default_calib_qconfig()}).eval()
    assert f"{listed}: no values seen" in refused(calibration, x)


def test_sixteen_bits_are_refused(
    between: Fixture, prepared: Fixture, refused: Fixture, x: Tensor
) -> None:
    net = between(nn.Conv2d(8, 8, 1), nn.Sigmoid())
    wide = {"module_name": [("net.1", get_default_qat_qconfig(dtype="qint16"))]}
    assert "net.1: its result is quantized to 16 bits" in refused(prepared(net, x, wide), x)
    wide = {"module_name": [("net.0", get_default_qat_qconfig(weight_dtype="qint16"))]}
    assert "net.0: its weight is qint16; expected qint8" in refused(prepared(net, x, wide), x)


@pytest.mark.parametrize(
    ("function", "hybrid", "message"),
    [
        (lambda x: F.interpolate(x, scale_factor=2, mode="bicubic"), True, "net.1: interpolate"),
        (lambda x: F.pad(x, (-1, 1, 0, 0), mode="circular"), True, "net.1: pad of floats"),
    ],
)
def test_operators_that_are_not_on_the_list_are_named(
    function: Any, hybrid: bool, message: str,
    between: Fixture, prepared: Fixture, refused: Fixture, x: Tensor,
) -> None:  # fmt: skip
    net = between(nn.Conv2d(8, 8, 1), Of(function))
    where = {"hybrid": True, "hybrid_dict": {"module_name": ["net.1"]}} if hybrid else {}
    qat = prepared(net, x, **where)
    assert message in refused(qat, x)


def test_converted_models_are_sent_back(
    between: Fixture, prepared: Fixture, refused: Fixture, x: Tensor
) -> None:
    converted = convert_fx(prepared(between(nn.Conv2d(8, 8, 1)), x))
    assert "quant (Quantize) computes in integers" in refused(converted, x)


class Overwriting(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.quant, self.dequant = QuantStub(), DeQuantStub()
        self.conv = nn.Conv2d(8, 8, 1)

    def forward(self, x: Tensor) -> Tensor:
        y = self.dequant(self.conv(self.quant(x)))
        return F.relu(y, inplace=True) + y


class Residual(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.quant, self.dequant = QuantStub(), DeQuantStub()
        self.conv, self.relu = nn.Conv2d(8, 8, 1), nn.ReLU(inplace=True)
        self.last = nn.Conv2d(8, 8, 1)

    def forward(self, x: Tensor) -> Tensor:
        y = self.conv(self.quant(x))
        return self.dequant(self.last(self.relu(y)) * y)


@pytest.mark.parametrize("hybrid", [False, True])
def test_a_tensor_that_is_written_into_is_exported_as_its_readers_see_it(
    prepared: Fixture, export: Any, tmp_path: Path, x: Tensor, hybrid: bool
) -> None:
    """What is written in place has the new values for every later reader."""
    settings = {"hybrid": True, "hybrid_dict": {"module_name": ["relu"]}} if hybrid else {}
    for model in (Overwriting().eval(), Residual().eval()):
        qat = prepared(model, x, **settings)
        set_fake_quantize(qat, FakeQuantState.CALIBRATION)
        assert torch.allclose(qat.eval()(x.clone()), model(x.clone()), atol=1e-5)
        set_fake_quantize(qat, FakeQuantState.VALIDATION)
        export.export_qdq_onnx(qat, x, tmp_path / "net.onnx")


class Branching(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.quant, self.conv = QuantStub(), nn.Conv2d(8, 8, 1)

    def forward(self, x: Tensor) -> Tensor:
        return self.conv(self.quant(x)) if x.sum() > -1e9 else x


def test_an_eager_forward_that_does_not_trace_is_refused(refused: Fixture, x: Tensor) -> None:
    model = Branching().eval()
    model.qconfig = get_default_qat_qconfig()
    qat = prepare_qat(model).eval()
    qat(x)
    assert "cannot be traced" in refused(qat, x)


def test_inputs_are_checked(
    between: Fixture, prepared: Fixture, refused: Fixture, x: Tensor
) -> None:
    qat = prepared(between(nn.Conv2d(8, 8, 1)), x)
    assert "the forward takes x, and the example has 2 positional" in refused(
        qat, (x, x), TypeError
    )
    assert "0 positional inputs and y named" in refused(qat, {"y": x}, TypeError)
    assert "input x is torch.float64; expected float32" in refused(qat, x.double())
    assert "net.0: its input has shape (8, 8, 8); expected 4 axes" in refused(qat, x[0])


def test_the_model_stays_as_it_is(
    between: Fixture, prepared: Fixture, export: Any, tmp_path: Path, x: Tensor
) -> None:
    qat = prepared(between(nn.Conv2d(8, 8, 1), nn.BatchNorm2d(8), nn.ReLU()), x).train()
    before = copy.deepcopy(qat.state_dict())
    export.export_qdq_onnx(qat, 100 * x, tmp_path / "net.onnx")
    assert all(torch.equal(value, before[name]) for name, value in qat.state_dict().items())
    assert all(module.training for module in qat.modules())


def test_names_containers_and_numbers_of_the_forward(
    prepared: Fixture, export: Any, tmp_path: Path, x: Tensor
) -> None:
    class Several(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.quant, self.dequant = QuantStub(), DeQuantStub()
            self.conv = nn.Conv2d(8, 8, 1)

        def forward(self, maps: dict[str, Any], prior: Tensor, factor: float = 2.0) -> Any:
            y = self.conv(self.quant(maps["fine"] + maps["more"][0]))
            return {"score": self.dequant(y) * factor, "box": (self.dequant(y), prior)}

    given = {"fine": x, "more": [x]}
    qat = prepare_qat_fx(Several().eval(), {"": get_default_qat_qconfig()}, hybrid=True).eval()
    qat(given, x)
    for args in ((given, x), {"prior": x, "maps": given}):
        file = export.export_qdq_onnx(qat, args, tmp_path / "net.onnx")
        assert sorted(file.inputs) == ["maps_fine", "maps_more_0", "prior"]
        assert sorted(file.outputs) == ["box_0", "box_1", "score"]
        assert [line.split(": ")[1] for line in file.floats] == ["add", "mul"]
        assert all(d.largest == 0 for d in export.compare_qdq_onnx(file, qat, args))
