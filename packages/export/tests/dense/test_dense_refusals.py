"""What cannot be written is refused by name, and leaves nothing behind."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any, cast

import onnx
import pytest
import torch
from torch import Tensor, nn

from bevquant_export import export_float_onnx, export_qdq_onnx, open_onnx
from bevquant_int8sim import simulate
from bevquant_qnn import QuantConfig, quantize_model
from bevquant_quantizers import calibrate, hb_mapper

Fixture = Callable[..., Any]


@pytest.fixture
def x() -> Tensor:
    return torch.randn(1, 3, 8, 8)


@pytest.fixture
def model(calibrated: Fixture, x: Tensor) -> nn.Module:
    net = nn.Sequential(nn.Conv2d(3, 4, 3), nn.ReLU(), nn.Conv2d(4, 4, 1))
    made: nn.Module = calibrated(net, x)
    return made


class Unlisted(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.gamma, self.second = nn.Conv2d(3, 4, 1), Gamma(), nn.Conv2d(4, 4, 1)

    def forward(self, x: Tensor) -> Tensor:
        return self.second(self.gamma(self.first(x)))


class Gamma(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return torch.lgamma(x.abs() + 1)


def test_an_operation_that_is_not_on_the_list_is_named(
    calibrated: Fixture, x: Tensor, tmp_path: Path
) -> None:
    model = calibrated(Unlisted(), x)
    target = tmp_path / "net.onnx"
    target.write_bytes(b"before")
    with pytest.raises(ValueError, match=r"gamma: lgamma of floats has no form.*replace it"):
        export_qdq_onnx(model, x, target, "horizon")
    assert [p.name for p in tmp_path.iterdir()] == ["net.onnx"]
    assert target.read_bytes() == b"before"


def test_an_example_without_frames_is_refused_by_name(model: nn.Module, tmp_path: Path) -> None:
    """Its file was compared in no value, and some models ended in torch's message."""
    message = r"input input of shape \(0, 3, 8, 8\) has no values.*give a frame"
    with pytest.raises(ValueError, match=message):
        export_qdq_onnx(model, torch.zeros(0, 3, 8, 8), tmp_path / "net.onnx")
    with pytest.raises(ValueError, match=message):
        export_float_onnx(nn.Conv2d(3, 4, 1).eval(), torch.zeros(0, 3, 8, 8), tmp_path / "net.onnx")
    assert not list(tmp_path.iterdir())


def test_bits_of_two_tensors_are_refused_as_integers(tmp_path: Path) -> None:
    class Bits(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.fc = nn.Linear(4, 4)

        def forward(self, x: Tensor, n: Tensor) -> Tensor:
            return self.fc(x) + (n & n.flip(0))

    given = torch.randn(3, 4), torch.arange(12).view(3, 4)
    model = quantize_model(Bits().eval(), example_inputs=given).model
    calibrate(model, [given])
    with pytest.raises(ValueError, match=r"bitwise_and of integers has no form .*BitwiseAnd"):
        export_qdq_onnx(model, given, tmp_path / "net.onnx", "onnxruntime")


@pytest.mark.parametrize("kind", ["float16", "int64"])
def test_the_checkers_refusal_has_advice_on_halves_where_they_are_the_cause(
    kind: str, model: nn.Module, x: Tensor, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: Any, **__: Any) -> None:
        raise onnx.checker.ValidationError(f"B has inconsistent type tensor({kind})")

    monkeypatch.setattr(onnx.checker, "check_model", refuse)
    with pytest.raises(ValueError, match=f"onnx.checker refuses .*{kind}") as error:
        export_qdq_onnx(model, x, tmp_path / "net.onnx")
    assert ("model.float()" in str(error.value)) == (kind == "float16")


@pytest.mark.parametrize("target", ["onnxruntime", "tensorrt11"])
def test_bfloat16_is_refused_by_name(
    target: str, calibrated: Fixture, x: Tensor, tmp_path: Path
) -> None:
    class Rounds(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return (x.bfloat16() * 2).float()

    net = calibrated(nn.Sequential(nn.Conv2d(3, 4, 3), Rounds()), x)
    with pytest.raises(ValueError, match="bfloat16; cast its input to float32"):
        export_qdq_onnx(net, x, tmp_path / "net.onnx", target)


@pytest.mark.parametrize(
    ("dtype", "message"),
    [
        (torch.bfloat16, "output output is torch.bfloat16, .* return it as float32"),
        (torch.complex64, "is torch.complex64, .* return its real and imaginary parts"),
    ],
)
def test_output_types_without_a_form_are_refused_by_name(
    dtype: torch.dtype, message: str, calibrated: Fixture, x: Tensor, tmp_path: Path
) -> None:
    net = calibrated(nn.Sequential(nn.Conv2d(3, 4, 3), Returns(dtype)), x)
    with pytest.raises(ValueError, match=message):
        export_qdq_onnx(net, x, tmp_path / "net.onnx")


@pytest.mark.parametrize("target", ["onnxruntime", "tensorrt10", "tensorrt11"])
def test_a_half_output_is_written(
    target: str, calibrated: Fixture, x: Tensor, tmp_path: Path
) -> None:
    net = calibrated(nn.Sequential(nn.Conv2d(3, 4, 3), Returns(torch.float16)), x)
    file = export_qdq_onnx(net, x, tmp_path / "net.onnx", target)
    (port,) = onnx.load(file.path).graph.output
    assert port.type.tensor_type.elem_type == onnx.TensorProto.FLOAT16
    (made,) = open_onnx(file.path)({"input": x}).values()
    torch.testing.assert_close(made, net(x).float(), rtol=0, atol=2e-2)


class Returns(nn.Module):
    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()
        self.dtype = dtype

    def forward(self, x: Tensor) -> Tensor:
        return x.to(self.dtype)


def test_what_only_a_later_operator_set_has_is_named(
    calibrated: Fixture, x: Tensor, tmp_path: Path
) -> None:
    class Warp(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            grid = x[:, :2].permute(0, 2, 3, 1).tanh()
            return nn.functional.grid_sample(x, grid, mode="bicubic", align_corners=False)

    model = calibrated(nn.Sequential(nn.Conv2d(3, 4, 1), Warp()), x)
    with pytest.raises(ValueError, match=r"1: grid_sampler of floats .*GridSample of operator set"):
        export_qdq_onnx(model, x, tmp_path / "net.onnx", "horizon")
    assert list(tmp_path.iterdir()) == []


def test_quantizers_without_a_range_are_listed(x: Tensor, tmp_path: Path) -> None:
    model = quantize_model(nn.Sequential(nn.Conv2d(3, 4, 1)), example_inputs=x).model.eval()
    with pytest.raises(ValueError, match=r"^export_qdq_onnx: .*0\._input_quantizer.*calibrate"):
        export_qdq_onnx(model, x, tmp_path / "net.onnx")


def test_a_range_that_is_nan_is_refused(model: nn.Module, x: Tensor, tmp_path: Path) -> None:
    model.get_buffer("2._input_quantizer._amax").fill_(torch.nan)
    with pytest.raises(ValueError, match=r"2\._input_quantizer \(its range is NaN"):
        export_qdq_onnx(model, x, tmp_path / "net.onnx")


def test_training_mode_is_refused(model: nn.Module, x: Tensor, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"call model\.eval\(\)"):
        export_qdq_onnx(model.train(), x, tmp_path / "net.onnx")


@pytest.mark.parametrize("unsigned", [False, True])
def test_other_than_eight_bits_are_refused(
    calibrated: Fixture, x: Tensor, tmp_path: Path, unsigned: bool
) -> None:
    layers = nn.Sequential(nn.ReLU(), nn.Conv2d(3, 4, 1), nn.ReLU(), nn.Conv2d(4, 4, 1))
    model = calibrated(layers, x, num_bits=4, unsigned=unsigned)
    with pytest.raises(ValueError, match=r"4 bits; expected 8.*num_bits=8"):
        export_qdq_onnx(model, x, tmp_path / "net.onnx")


def test_a_layer_in_bfloat16_is_refused_with_the_remedy(
    calibrated: Fixture, x: Tensor, tmp_path: Path
) -> None:
    class Mixed(nn.Module):
        def __init__(self, dtype: torch.dtype) -> None:
            super().__init__()
            self.first, self.second = nn.Conv2d(3, 4, 1), nn.Conv2d(4, 2, 1).to(dtype)

        def forward(self, x: Tensor) -> Tensor:
            return self.second(self.first(x).to(self.second.weight.dtype)).float()

    model = simulate(calibrated(Mixed(torch.bfloat16), x), x)
    with pytest.raises(ValueError, match=r"bfloat16; cast its input to float32"):
        export_qdq_onnx(model, x, tmp_path / "mixed.onnx")
    model = simulate(calibrated(Mixed(torch.float16), x), x)  # a layer of integers
    assert not model.float_fallbacks
    assert not export_qdq_onnx(model, x, tmp_path / "half.onnx").notes


def test_hb_mapper_takes_no_inputs_of_integers(
    calibrated: Fixture, x: Tensor, tmp_path: Path
) -> None:
    class Two(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.conv = nn.Conv2d(3, 4, 1)

        def forward(self, x: Tensor, index: Tensor) -> Tensor:
            return self.conv(x)

    index = torch.arange(3)
    model = calibrated(Two(), x, index)
    with pytest.raises(ValueError, match=r"input index is torch\.int64; expected float32"):
        export_qdq_onnx(model, (x, index), tmp_path / "net.onnx", "horizon")


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"profile": "ncnn"}, "expected one of .*'tensorrt10', 'tensorrt', 'tensorrt11'"),
        ({"weights": "int8"}, "profile='tensorrt': weights='int8': expected one of 'auto'"),
        ({"integer_sums": True}, "integer_sums=True with profile='tensorrt'"),
        ({"input_names": ["a", "b"]}, r"input_names=\['a', 'b'\]: expected 1 different"),
        ({"output_names": [""]}, r"output_names=\[''\]: expected 1 different"),
        ({"output_names": ["input"]}, "output_names: 'input' is an input's name too"),
    ],
)
def test_arguments_are_checked(
    settings: dict[str, Any], message: str, model: nn.Module, x: Tensor, tmp_path: Path
) -> None:
    with pytest.raises(ValueError, match=message):
        export_qdq_onnx(model, x, tmp_path / "net.onnx", **settings)
    assert list(tmp_path.iterdir()) == []


def test_inputs_of_an_open_file_are_named(model: nn.Module, x: Tensor, tmp_path: Path) -> None:
    run = open_onnx(export_qdq_onnx(model, x, tmp_path / "net.onnx").path)
    with pytest.raises(TypeError, match=r"net\.onnx: expected a dictionary of input, got a Tensor"):
        run(cast(Any, x))


def test_a_march_is_one_that_hb_mapper_has(
    model: nn.Module, x: Tensor, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(hb_mapper, "marches", lambda: ("bayes", "other"))
    with pytest.raises(ValueError, match=r"march='nash': expected one of \('bayes', 'other'\)"):
        export_qdq_onnx(model, x, tmp_path / "net.onnx", "horizon", march="nash")
    assert list(tmp_path.iterdir()) == []
    # Where no package says which there are, hb_mapper does.
    monkeypatch.setattr(hb_mapper, "marches", lambda: ())
    file = export_qdq_onnx(model, x, tmp_path / "net.onnx", "horizon", march="nash")
    assert file.settings is not None
    assert 'march: "nash"' in file.settings.read_text()


def test_a_missing_folder_is_named(model: nn.Module, x: Tensor, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"there is no folder .*nowhere"):
        export_qdq_onnx(model, x, tmp_path / "nowhere" / "net.onnx")


def test_what_is_no_module_is_refused(x: Tensor, tmp_path: Path) -> None:
    with pytest.raises(
        TypeError, match=r"^export_qdq_onnx: model: expected a torch module, got the str"
    ):
        export_qdq_onnx(cast(Any, "model"), x, tmp_path / "net.onnx")


def test_a_layer_with_another_padding_is_a_pad_and_a_layer(
    x: Tensor, tmp_path: Path, calibrated: Fixture, run: Fixture
) -> None:
    net = nn.Sequential(nn.Conv2d(3, 4, 3, padding=1, padding_mode="reflect"))
    model = calibrated(net, x)
    file = export_qdq_onnx(model, x, tmp_path / "net.onnx")
    (made,), operators = run(file, x, optimised=False)
    assert (operators["Pad"], operators["Conv"]) == (1, 1)
    torch.testing.assert_close(made, simulate(model, x)(x), rtol=1e-4, atol=1e-5)


def test_a_batch_that_is_a_constant_of_the_model_is_refused(
    calibrated: Fixture, tmp_path: Path
) -> None:
    class Fixed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.conv = nn.Conv2d(3, 4, 1)

        def forward(self, x: Tensor) -> Tensor:
            return self.conv(x).view(2, 4, 64)

    x = torch.randn(2, 3, 8, 8)
    model = calibrated(Fixed(), x)
    export_qdq_onnx(model, x, tmp_path / "net.onnx")
    with pytest.raises(ValueError, match=r"dynamic_batch=True, but .*fixed batch"):
        export_qdq_onnx(model, x, tmp_path / "net.onnx", dynamic_batch=True)


def test_sparse_parts_are_sent_elsewhere(tmp_path: Path) -> None:
    from bevquant_quantizers import calibrate

    spconv = pytest.importorskip("spconv.pytorch", reason="spconv is not installed")
    net = spconv.SparseSequential(spconv.SubMConv3d(4, 8, 3))
    indices = torch.tensor([[0, 1, 1, 1], [0, 1, 1, 2]], dtype=torch.int32)
    x = spconv.SparseConvTensor(torch.randn(2, 4), indices, [4, 4, 4], 1)
    model = quantize_model(net, QuantConfig(), example_inputs=(x,)).model.eval()
    calibrate(model, [(x,)], method="max")
    with pytest.raises(ValueError, match="export_sparse_onnx"):
        export_qdq_onnx(model, (x,), tmp_path / "net.onnx")


class Windows(nn.Module):
    """Rows numbered by their window, as sets of voxels in DSVT."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(3, 4)

    def forward(self, x: Tensor, windows: Tensor) -> Tensor:
        return self.layer(x)[torch.unique(windows, return_inverse=True)[1]]


def test_an_operator_that_tensorrt_does_not_import(tmp_path: Path) -> None:
    frame = torch.randn(5, 3), torch.tensor([4, 1, 4, 7, 1])
    model = quantize_model(Windows().eval(), example_inputs=frame).model
    calibrate(model, [frame])
    line = r"Unique in ONNX, which tensorrt11 does not import.*test_dense_refusals\.py:\d+"
    with pytest.raises(ValueError, match=line):
        export_qdq_onnx(model, frame, tmp_path / "windows.onnx", "tensorrt11")
    assert not list(tmp_path.iterdir())
    assert export_qdq_onnx(model, frame, tmp_path / "windows.onnx", "onnxruntime").verified


class Pools(nn.Module):
    """The product of each place's values."""

    def forward(self, x: Tensor, places: Tensor) -> Tensor:
        return x.scatter_reduce(0, places, x, "prod")


class Wraps(nn.Module):
    """Angles between 0 and 2π."""

    def forward(self, x: Tensor, places: Tensor) -> Tensor:
        return torch.remainder(x, 6.2832) + places


@pytest.mark.parametrize(
    ("layer", "profile", "missing"),
    [
        (Pools, "tensorrt11", "ScatterElements with reduction mul in ONNX, which tensorrt11"),
        (Wraps, "horizon", "Mod in ONNX, which horizon"),
    ],
)
def test_operators_that_the_linter_rejects_are_not_written(
    layer: type[nn.Module], profile: str, missing: str, tmp_path: Path
) -> None:
    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear, self.layer = nn.Linear(3, 3), layer()

        def forward(self, x: Tensor) -> Tensor:
            return self.layer(self.linear(x), torch.tensor([[0, 1, 0], [1, 1, 0]]))

    frame = (torch.randn(2, 3),)
    model = quantize_model(Net().eval(), example_inputs=frame).model
    calibrate(model, [frame])
    with pytest.raises(ValueError, match=rf"{missing}.*test_dense_refusals\.py:\d+"):
        export_qdq_onnx(model, frame, tmp_path / "net.onnx", profile)
    assert not list(tmp_path.iterdir())
