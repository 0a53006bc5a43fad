"""Files that ONNX Runtime and PyTorch quantized, and those of `export_qdq_onnx`, in integers."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
import torch
import torch.nn.functional as F
from onnxruntime.quantization import (
    CalibrationDataReader,
    QuantFormat,
    QuantType,
    quantize_static,
)
from torch import Tensor, nn

from bevquant_export import (
    export_float_onnx,
    export_qdq_onnx,
    float_qdq_model,
    load_qdq_onnx,
)
from bevquant_fusion import fuse_model
from bevquant_int8sim import IntegerModel, compare, simulate
from bevquant_qnn import quantize_model
from bevquant_quantizers import TensorQuantizer, calibrate

from .qdq_graphs import run_file


class Net(nn.Module):
    """Residual sum, ReLU6, concatenation, pools, resizing, a transposed convolution and a head."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, 8, 3, 2, 1)
        self.depthwise = nn.Conv2d(8, 8, 3, 1, 1, groups=8)
        self.mix = nn.Conv2d(8, 8, 1)
        self.up = nn.ConvTranspose2d(16, 4, 2, 2)
        self.head = nn.Linear(4, 5)

    def forward(self, image: Tensor) -> tuple[Tensor, Tensor]:
        x = torch.relu(self.stem(image))
        y = F.relu6(self.depthwise(x))
        x = torch.cat([x + self.mix(y), y], 1)
        x = F.interpolate(F.max_pool2d(x, 3, 2, 1), scale_factor=2.0)
        x = torch.sigmoid(self.up(x))
        return self.head(x.mean((2, 3))), x


class Frames(CalibrationDataReader):
    def __init__(self, name: str) -> None:
        rng = np.random.default_rng(0)
        images = (rng.standard_normal((2, 3, 16, 16)).astype(np.float32) for _ in range(2))
        self.frames: Iterator[Any] = iter([{name: image} for image in images])

    def get_next(self) -> Any:
        return next(self.frames, None)


IMAGE = torch.randn(2, 3, 16, 16, generator=torch.Generator().manual_seed(0))


@pytest.fixture(scope="module")
def net() -> nn.Module:
    torch.manual_seed(0)
    net = Net().eval()
    with torch.no_grad():
        net.depthwise.weight.mul_(8)  # so that ReLU6 clips
    return net


@pytest.fixture(scope="module")
def float_file(net: nn.Module, tmp_path_factory: Any) -> Callable[[int], Path]:
    """The net's float file in an operator set, from torch's older exporter up to 17."""

    @cache
    def write(opset: int) -> Path:
        path = Path(tmp_path_factory.mktemp("float")) / "net.onnx"
        axes: Any = {"dynamic_axes": {"image": {0: "batch"}}}
        if opset > 17:
            axes = {"dynamic_shapes": ({0: torch.export.Dim("batch")},)}
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # the older exporter is deprecated
            torch.onnx.export(
                net, (IMAGE,), path, input_names=["image"], opset_version=opset, dynamo=opset > 17,
                verbose=False, **axes,
            )  # fmt: skip
        return path

    return write


KINDS: dict[str, Any] = {
    "uint8, int8": {"activation_type": QuantType.QUInt8, "weight_type": QuantType.QInt8},
    "int8, int8 per channel": {
        "activation_type": QuantType.QInt8, "weight_type": QuantType.QInt8, "per_channel": True,
    },
    "uint8, uint8": {"activation_type": QuantType.QUInt8, "weight_type": QuantType.QUInt8},
    "int16, int8": {
        "activation_type": QuantType.QInt16, "weight_type": QuantType.QInt8,
        "extra_options": {"ActivationSymmetric": True},
    },
}  # fmt: skip


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(("kind", "opset"), list(zip(KINDS, (13, 17, 20, 21), strict=True)))
def test_static_quantization(
    kind: str, opset: int, float_file: Callable[[int], Path], tmp_path: Path
) -> None:
    source, path = float_file(opset), tmp_path / "quantized.onnx"
    quantize_static(
        source, path, Frames("image"), quant_format=QuantFormat.QDQ,
        use_external_data_format=kind == "uint8, uint8", **KINDS[kind],
    )  # fmt: skip
    model = load_qdq_onnx(path, float_file=source)
    assert {f.what for f in model.float_fallbacks} == {"sigmoid"}
    steps = {s.op for s in model.steps}
    assert {"conv", "conv_transpose", "linear", "add", "max_pool", "resize", "avg_pool"} <= steps
    # In float ONNX Runtime rounds a few values near ties the other way, and what follows them.
    for got, wanted in zip(model(IMAGE), run_file(path, {"image": IMAGE.numpy()}), strict=True):
        step = np.diff(np.unique(wanted)).min()
        apart = np.abs(got.numpy() - wanted) / step
        assert apart.max() < 3.5
        assert (apart > 0.5).mean() < 0.02
    one = model(IMAGE[:1])  # the batch size stays open
    assert torch.equal(one[1], model(IMAGE)[1][:1])
    table = compare(float_qdq_model(model), model, [IMAGE])
    assert not table.wrong
    # A ReLU or ReLU6 that ONNX Runtime left out is in the float model all the same.
    sqnr = {r.path: r.fake_sqnr_db for r in table.rows if r.form != "int32"}
    assert min(v for v in sqnr.values() if v is not None) > 20, sqnr


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(
    ("activation", "options"),
    [
        (nn.ReLU(), {"CalibTensorRangeSymmetric": True}),  # a signed quantizer is in its place
        (nn.Hardtanh(0.1, 0.8), {}),  # a quantizer from 0 is
        (nn.Hardtanh(-0.3, 0.7), {}),  # its quantizer's ends are up to half a step away
    ],
)
def test_an_activation_that_the_quantizer_does_not_stand_for(
    activation: nn.Module, options: dict[str, Any], tmp_path: Path
) -> None:
    torch.manual_seed(0)
    net = nn.Sequential(nn.Conv2d(3, 4, 3), activation, nn.Conv2d(4, 2, 3)).eval()
    source, path = tmp_path / "float.onnx", tmp_path / "quantized.onnx"
    (name,) = export_float_onnx(net, IMAGE, source).inputs
    quantize_static(
        source, path, Frames(name), quant_format=QuantFormat.QDQ, extra_options=options,
        activation_type=QuantType.QUInt8, weight_type=QuantType.QInt8,
    )  # fmt: skip
    want = load_qdq_onnx(path)(IMAGE)
    if options or activation.min_val > 0:
        with pytest.raises(ValueError, match=r"reach further than .*QDQKeepRemovableActivations"):
            load_qdq_onnx(path, float_file=source)
    else:
        model = load_qdq_onnx(path, float_file=source)
        assert torch.equal(model(IMAGE), want)
        assert not compare(float_qdq_model(model), model, [IMAGE]).wrong


def test_without_the_float_file_it_is_the_file_without_quantizers(
    float_file: Callable[[int], Path], tmp_path: Path
) -> None:
    path = tmp_path / "quantized.onnx"
    quantize_static(
        float_file(17), path, Frames("image"), activation_type=QuantType.QUInt8,
        weight_type=QuantType.QInt8,
    )  # fmt: skip
    model = load_qdq_onnx(path)
    rows = compare(float_qdq_model(model), model, [IMAGE]).rows
    assert rows[1].op == "conv + ReLU"
    assert (rows[1].fake_sqnr_db or 0) > 20
    model.save(tmp_path / "saved")
    loaded = IntegerModel.load(tmp_path / "saved")
    assert all(torch.equal(a, b) for a, b in zip(loaded(IMAGE), model(IMAGE), strict=True))
    with pytest.raises(ValueError, match="what load_qdq_onnx returned"):
        float_qdq_model(loaded)


@pytest.mark.filterwarnings("ignore")
def test_another_float_file_is_refused(
    float_file: Callable[[int], Path], net: nn.Module, tmp_path: Path
) -> None:
    path, other = tmp_path / "quantized.onnx", tmp_path / "other.onnx"
    quantize_static(float_file(17), path, Frames("image"))
    torch.onnx.export(net.stem, (IMAGE,), other, dynamo=False, opset_version=17)
    with pytest.raises(ValueError, match=r"layer .* has a weight .* other.onnx has no such layer"):
        load_qdq_onnx(path, float_file=other)


class Exported(nn.Module):
    """Operators that the profiles of `export_qdq_onnx` write in integers."""

    def __init__(self) -> None:
        super().__init__()
        self.stem, self.norm = nn.Conv2d(3, 8, 3, 2, 1), nn.BatchNorm2d(8)
        self.grouped, self.mix = nn.Conv2d(8, 8, 3, 1, 1, groups=4), nn.Conv2d(8, 8, 1)
        self.up, self.head = nn.ConvTranspose2d(16, 8, 2, 2), nn.Conv2d(8, 4, 1)

    def forward(self, image: Tensor) -> Tensor:
        x = torch.relu(self.norm(self.stem(image)))
        y = F.relu6(self.grouped(x))
        x = torch.cat([torch.relu(x + self.mix(y)), y], 1)
        x = F.interpolate(F.max_pool2d(x, 3, 2, 1), scale_factor=2.0)
        result: Tensor = self.head(torch.relu(self.up(x)))
        return result


@pytest.fixture(scope="module")
def exported() -> nn.Module:
    torch.manual_seed(1)
    made = quantize_model(fuse_model(Exported().eval(), IMAGE).model, example_inputs=IMAGE).model
    calibrate(made, [IMAGE], method="max")
    for module in made.modules():
        if isinstance(module, TensorQuantizer) and module.amax is not None:
            # Steps that float32, in which files hold them, has exactly.
            module._amax.copy_(127 * (module.amax / 127).bfloat16().float())
    return made


@pytest.mark.bits
@pytest.mark.parametrize("profile", ["tensorrt10", "onnxruntime", "openvino", "horizon"])
def test_files_of_our_own_give_their_model_back(
    profile: str, exported: nn.Module, tmp_path: Path
) -> None:
    file = export_qdq_onnx(exported, IMAGE, tmp_path / "net.onnx", profile)
    wanted = simulate(exported, IMAGE)(IMAGE)
    got = load_qdq_onnx(file.path)(IMAGE)
    assert torch.equal(got, wanted)
    assert wanted.unique().numel() > 50


@pytest.mark.filterwarnings("ignore")
def test_pt2e(net: nn.Module, tmp_path: Path) -> None:
    pytest.importorskip("torchao")
    from torchao.quantization.pt2e.quantize_pt2e import convert_pt2e, prepare_pt2e
    from torchao.quantization.pt2e.quantizer import x86_inductor_quantizer as x86

    config = x86.get_default_x86_inductor_quantization_config()
    program = torch.export.export(net, (IMAGE,)).module()
    prepared = prepare_pt2e(program, x86.X86InductorQuantizer().set_global(config))
    prepared(IMAGE)
    path = tmp_path / "pt2e.onnx"
    torch.onnx.export(
        convert_pt2e(prepared), (IMAGE,), path, dynamo=True, opset_version=21, verbose=False,
        input_names=["image"],
    )  # fmt: skip
    model = load_qdq_onnx(path)
    steps = [s.op for s in model.steps]
    assert steps.count("conv") == 3
    assert steps.count("conv_transpose") + steps.count("linear") >= 1
    for got, wanted in zip(model(IMAGE), run_file(path, {"image": IMAGE.numpy()}), strict=True):
        assert np.abs(got.numpy() - wanted).max() < 0.01 * np.abs(wanted).max()
    assert not compare(float_qdq_model(model), model, [IMAGE]).wrong


REAL = {
    "face boxes": "linzaer_rfb320/models/onnx/version-RFB-320_simplified.onnx",
}


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", REAL)
def test_real_models(name: str, tmp_path: Path, shared_data: Path) -> None:
    proto = onnx.version_converter.convert_version(onnx.load(shared_data / REAL[name]), 17)
    del proto.graph.value_info[:]
    known = {entry.name for entry in proto.graph.initializer}
    kept = [entry for entry in proto.graph.input if entry.name not in known]
    del proto.graph.input[:]
    proto.graph.input.extend(kept)
    source, path = tmp_path / "float.onnx", tmp_path / "quantized.onnx"
    onnx.save(proto, source)
    shape = [d.dim_value for d in kept[0].type.tensor_type.shape.dim]
    x = np.random.default_rng(0).standard_normal(shape).astype(np.float32)
    reader = Frames(kept[0].name)
    reader.frames = iter([{kept[0].name: x}])
    quantize_static(source, path, reader, activation_type=QuantType.QUInt8, per_channel=True)
    model = load_qdq_onnx(path, float_file=source)
    table = compare(float_qdq_model(model), model, [torch.from_numpy(x)])
    assert not table.wrong
    assert all(f.what == "softmax" for f in model.float_fallbacks)
