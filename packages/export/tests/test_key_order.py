"""A frame whose keys come in another order than the example's, with inputs of equal shapes."""

from __future__ import annotations

import importlib
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from bevquant_export import (
    compare_float_onnx,
    compare_qdq_onnx,
    compare_sparse_onnx,
    export_detector,
    export_float_onnx,
    export_qdq_onnx,
    export_sparse_onnx,
    load_sparse_onnx,
    open_onnx,
)
from bevquant_int8sim import simulate
from bevquant_qnn import quantize_model
from bevquant_quantizers import calibrate
from bevquant_sparse import to_dense, use_bevquant_kernels


class Two(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.near, self.far = nn.Conv2d(3, 4, 3), nn.Conv2d(3, 4, 3)


class Named(Two):
    def forward(self, image: Tensor, depth: Tensor) -> Any:
        return self.near(image).relu() + self.far(depth)


class Batch(Two):
    def forward(self, batch: Any) -> Any:
        return {"a": self.near(batch["image"]), "b": self.far(batch["depth"]).sigmoid()}


class Returned(Two):
    """Its result has the order of the frame."""

    def forward(self, batch: Any) -> Any:
        batch["image"] = self.near(batch["image"]).tanh()
        batch["depth"] = self.far(batch["depth"]).sigmoid()
        return batch


class Field(Two):
    def forward(self, batch: Any) -> Any:
        return self.near(batch.image).relu() + self.far(batch.maps["depth"]) * batch.maps["gain"]


@dataclass
class Frame:
    image: Tensor
    maps: dict[str, Tensor]


def frames() -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    torch.manual_seed(1)
    frame = {"image": torch.randn(1, 3, 6, 6), "depth": 3 * torch.randn(1, 3, 6, 6)}
    return frame, dict(reversed(frame.items()))


def fields() -> tuple[Frame, Frame]:
    torch.manual_seed(1)
    gain = torch.ones(1, 4, 4, 4)
    image, depth = torch.randn(1, 3, 6, 6), 3 * torch.randn(1, 3, 6, 6)
    return Frame(image, {"depth": depth, "gain": gain}), Frame(
        image, {"gain": gain, "depth": depth}
    )


MODELS = {
    "named": (Named, dict, frames),
    "batch": (Batch, lambda frame: (dict(frame),), frames),
    "returned": (Returned, lambda frame: (dict(frame),), frames),
    "field": (Field, lambda frame: (frame,), fields),
}


def calibrated(name: str) -> tuple[nn.Module, Any, Any]:
    kind, called, made = MODELS[name]
    frame, other = map(called, made())
    model = quantize_model(kind().eval(), example_inputs=frame).model
    calibrate(model, [frame])
    return model, frame, other


@pytest.mark.parametrize("profile", ["onnxruntime", "tensorrt11"])
@pytest.mark.parametrize("name", MODELS)
def test_comparison_binds_by_key(name: str, profile: str, tmp_path: Path) -> None:
    model, frame, other = calibrated(name)
    file = export_qdq_onnx(model, frame, tmp_path / "net.onnx", profile)
    assert compare_qdq_onnx(file, model, other) == compare_qdq_onnx(file, model, frame)
    assert all(row.unexplained == 0 for row in file.differences)


@pytest.mark.parametrize("profile", ["onnxruntime", "tensorrt11"])
@pytest.mark.parametrize("name", MODELS)
def test_export_of_an_integer_model_binds_by_key(name: str, profile: str, tmp_path: Path) -> None:
    model, frame, other = calibrated(name)
    integers = simulate(model, frame)
    file = export_qdq_onnx(integers, other, tmp_path / "net.onnx", profile)
    assert file.verified != "no"
    assert all(row.unexplained == 0 for row in compare_qdq_onnx(file, integers, frame))


def test_comparison_refuses_positional_inputs_of_a_file_with_named_ones(tmp_path: Path) -> None:
    model, frame, _ = calibrated("named")
    file = export_qdq_onnx(model, frame, tmp_path / "net.onnx", "onnxruntime")
    with pytest.raises(TypeError, match=r"expected members \['image', 'depth'\], got \[\]"):
        compare_qdq_onnx(file, model, (frame["depth"], frame["image"]))


def test_a_file_runs_by_name(tmp_path: Path) -> None:
    model, frame, other = calibrated("named")
    run = open_onnx(export_qdq_onnx(model, frame, tmp_path / "net.onnx", "onnxruntime").path)
    one, two = run(frame), run(other)
    assert all(torch.equal(one[key], two[key]) for key in one)
    assert torch.allclose(one["output"], model(**frame), atol=0.2)


def test_float_files_bind_by_parameter(tmp_path: Path) -> None:
    model = Named().eval()
    frame, other = frames()
    file = export_float_onnx(model, other, tmp_path / "net.onnx")
    for args in (frame, other, tuple(frame.values())):
        assert compare_float_onnx(file, model, args)[0].relative < 1e-5
    export_float_onnx(model, frame, tmp_path / "half.onnx", half=True, frames=[other])
    with pytest.raises(ValueError, match="expected inputs image, depth"):
        export_float_onnx(
            model, frame, tmp_path / "net.onnx", half=True,
            frames=[{"image": frame["image"], "more": frame["depth"]}],
        )  # fmt: skip


class Detector(nn.Module):
    """Two tables of features on the same voxels, and of two cameras."""

    def __init__(self, detector: bool) -> None:
        super().__init__()
        torch.manual_seed(0)
        spconv = importlib.import_module("spconv.pytorch")  # which warns
        self.detector, self.make = detector, spconv.SparseConvTensor
        self.stem = spconv.SubMConv3d(4, 8, 3, indice_key="a")
        self.last = spconv.SubMConv3d(8, 8, 3, indice_key="a")
        self.head, self.near = nn.Conv2d(32, 4, 1), nn.Conv2d(3, 4, 1)
        self.far = nn.Conv2d(3, 4, 1)

    def forward(self, batch: Any) -> Any:
        points = batch["lidar"] + 2 * batch["radar"].abs()
        x = self.make(points, batch["coords"], [4, 8, 8], 1)
        x = self.last(self.stem(x))
        made = to_dense(x.features, x.indices, x.spatial_shape, x.batch_size)
        if not self.detector:
            return made
        beside = self.near(batch["front"]) + 2 * self.far(batch["back"]).abs()
        return self.head(made.flatten(1, 2)) + beside


def scene(seed: int, cameras: bool) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    coords = (torch.rand(1, 4, 8, 8, generator=generator) < 0.3).nonzero().int().contiguous()
    rows = {name: torch.randn(len(coords), 4, generator=generator) for name in ("lidar", "radar")}
    pictures = {name: torch.randn(1, 3, 8, 8, generator=generator) for name in ("front", "back")}
    return {**rows, **(pictures if cameras else {}), "coords": coords}


@pytest.mark.filterwarnings("ignore")
def test_sparse_files_and_both_parts_of_a_detector_bind_by_key(spconv: Any, tmp_path: Path) -> None:
    for cameras in (False, True):
        frames = [scene(seed, cameras) for seed in (1, 2)]
        other = dict(reversed(frames[1].items()))
        net = Detector(cameras).eval()
        use_bevquant_kernels(net)
        model = quantize_model(net, example_inputs=(frames[0],)).model
        calibrate(model, [(frame,) for frame in frames])
        if cameras:
            made = export_detector(model, (frames[0],), tmp_path / "detector", batches=[(other,)])
            assert [check.frame for check in made.checks] == ["example", "batches[0]"]
            assert not made.checks[1].not_run
        else:
            export_sparse_onnx(model, (frames[0],), tmp_path / "net.onnx")
            file = load_sparse_onnx(tmp_path / "net.onnx")
            rows = compare_sparse_onnx(file, model, (other,))
            assert rows == compare_sparse_onnx(file, model, (frames[1],))
            assert not any(row.different for row in rows)
