"""Numpy arrays and floats among a model's arguments, in files, which hold no float64."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from bevquant_export import compare_qdq_onnx, export_qdq_onnx
from bevquant_int8sim import simulate
from bevquant_qnn import quantize_model
from bevquant_quantizers import calibrate

onnx = pytest.importorskip("onnx")


class Moved(nn.Module):
    """Features at places that a camera's matrix and the car's motion give."""

    def __init__(self) -> None:
        super().__init__()
        self.value, self.out = nn.Linear(4, 16), nn.Linear(16, 4)

    def forward(self, x: Tensor, img_metas: list) -> Tensor:
        matrices = x.new_tensor(np.asarray([meta["lidar2img"] for meta in img_metas]))
        bus = img_metas[0]["can_bus"]
        length = np.sqrt(bus[0] ** 2 + bus[1] ** 2) * np.cos(bus[2] / np.pi * 180)
        places = x @ matrices[0] + x.new_tensor(length * img_metas[0]["gap"])
        return self.out(self.value(places).relu())


def frame(seed: int) -> dict:
    random = np.random.default_rng(seed)
    meta = {"lidar2img": random.normal(size=(4, 4)), "can_bus": random.normal(size=3)}
    return {
        "x": torch.from_numpy(random.normal(size=(6, 4))).float(),
        "img_metas": [meta | {"gap": float(random.normal())}],
    }


@pytest.mark.parametrize("profile", ["tensorrt11", "onnxruntime"])
def test_files_take_arrays_and_floats_without_float64(profile: str, tmp_path: Path) -> None:
    pytest.importorskip("onnxruntime")
    frames = [frame(0), frame(1)]
    torch.manual_seed(0)
    quantized = quantize_model(Moved().eval(), example_inputs=frames).model
    calibrate(quantized, [frame(seed) for seed in range(4)])
    integers = simulate(quantized, frames)
    want, got = quantized(**frame(5)), integers(**frame(5))
    assert (want - got).abs().max() <= 0.02 * want.abs().max()
    file = export_qdq_onnx(integers, frames, tmp_path / "moved.onnx", profile)
    graph = onnx.load(file.path).graph
    kinds = {port.name: port.type.tensor_type.elem_type for port in graph.input}
    assert len(kinds) == 4
    assert set(kinds.values()) <= {onnx.TensorProto.FLOAT, onnx.TensorProto.FLOAT16}
    doubles = {value.name for value in graph.initializer if value.data_type == 11}
    casts = [n for n in graph.node if n.op_type == "Cast" and n.attribute[0].i == 11]
    assert not doubles
    assert not casts
    for seed in (6, 7):
        assert not any(row.unexplained for row in compare_qdq_onnx(file, integers, frame(seed)))


class Timed(nn.Module):
    """Adds a layer of a number, which differs between frames, to a map."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.time = nn.Conv2d(3, 4, 3), nn.Linear(1, 4)
        self.last = nn.Conv2d(4, 2, 1)

    def forward(self, x: Tensor, meta: dict) -> Tensor:
        moved = self.time(x.new_tensor([meta["t"]]))
        return self.last(self.first(x).relu() + moved[:, None, None])


def test_comparison_with_the_model_of_one_frame(tmp_path: Path) -> None:
    pytest.importorskip("onnxruntime")
    frames = [{"x": torch.randn(1, 3, 8, 8), "meta": {"t": float(seed)}} for seed in (1, 2)]
    quantized = quantize_model(Timed().eval(), example_inputs=frames).model
    calibrate(quantized, frames)
    integers = simulate(quantized, frames)
    file = export_qdq_onnx(integers, frames, tmp_path / "net.onnx", "onnxruntime")
    assert not any(row.unexplained for row in compare_qdq_onnx(file, integers, frames[1]))
    # Of one frame, the number is a constant of the model.
    with pytest.raises(ValueError, match=r"which the model does not make.*simulate\(model, frames"):
        compare_qdq_onnx(file, quantized, frames[1])


class Aged(nn.Module):
    """Reads the time since the last frame of two times in float64."""

    def __init__(self, share: float) -> None:
        super().__init__()
        self.value, self.share = nn.Linear(4, 4), share

    def forward(self, x: Tensor, now: Tensor, before: Tensor) -> Tensor:
        moved = (now - before).float()
        return self.value(x) * ((1 - self.share) + self.share * moved)


@pytest.mark.parametrize(
    ("start", "share", "kept"), [(0.0, 1.0, True), (1.5e9, 1.0, False), (1.5e9, 0.01, False)]
)
def test_float64_inputs_are_float32_in_files_or_refused(
    start: float, share: float, kept: bool, tmp_path: Path
) -> None:
    torch.manual_seed(0)
    times = [torch.tensor([start + t], dtype=torch.float64) for t in (0.75, 0.25)]
    given = torch.randn(3, 4), *times
    quantized = quantize_model(Aged(share).eval(), example_inputs=given).model
    calibrate(quantized, [given])
    if not kept:
        with pytest.raises(ValueError, match=r"input now is float64 with values up to 1.5e\+09"):
            export_qdq_onnx(quantized, given, tmp_path / "aged.onnx", "tensorrt")
        return
    file = export_qdq_onnx(quantized, given, tmp_path / "aged.onnx", "tensorrt")
    kinds = {port.type.tensor_type.elem_type for port in onnx.load(file.path).graph.input}
    assert kinds == {onnx.TensorProto.FLOAT}
