"""Inputs beside float32: a pillar's number of points and its place, indices of a table, masks."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import onnx
import pytest
import torch
from torch import Tensor, nn

from bevquant_export import compare_qdq_onnx, cpu_at_hand, export_qdq_onnx, lint_onnx
from bevquant_int8sim import IntegerModel, simulate

Fixture = Callable[..., Any]
SIDE, POINTS, PILLARS = 8, 5, 20


class Pillars(nn.Module):
    """Points to a map: padding is masked, the largest of each pillar goes to its cell."""

    def __init__(self) -> None:
        super().__init__()
        self.features = nn.Linear(4, 16)
        self.map = nn.Conv2d(16, 8, 3, padding=1)

    def forward(self, voxels: Tensor, num_points: Tensor, coords: Tensor) -> Tensor:
        real = torch.arange(POINTS)[None] < num_points[:, None]
        best = torch.relu(self.features(voxels * real[..., None].type_as(voxels))).amax(1)
        canvas = best.new_zeros(16, SIDE * SIDE)
        canvas[:, (coords[:, 0] * SIDE + coords[:, 1]).long()] = best.t()
        made: Tensor = self.map(canvas.view(1, 16, SIDE, SIDE))
        return made


class Tokens(nn.Module):
    """Rows of a table by their numbers; what a mask names is zero."""

    def __init__(self) -> None:
        super().__init__()
        self.table, self.layer = nn.Embedding(10, 16), nn.Linear(16, 8)

    def forward(self, numbers: Tensor, mask: Tensor) -> Tensor:
        made: Tensor = self.layer(self.table(numbers)).masked_fill(mask[..., None], 0.0)
        return made


class Picture(nn.Module):
    """An image as a camera gives it, normalised by the model."""

    def __init__(self) -> None:
        super().__init__()
        self.map = nn.Conv2d(3, 8, 3)

    def forward(self, image: Tensor) -> Tensor:
        made: Tensor = self.map((image.float() - 127) / 58)
        return made


def pillars(kind: torch.dtype) -> tuple[Tensor, ...]:
    cells = torch.randperm(SIDE * SIDE)[:PILLARS]
    coords = torch.stack([cells // SIDE, cells % SIDE], 1).to(kind)
    return torch.randn(PILLARS, POINTS, 4), torch.randint(1, POINTS, (PILLARS,)).to(kind), coords


def tokens() -> tuple[Tensor, ...]:
    return torch.randint(0, 10, (2, 7)), torch.rand(2, 7) < 0.3


CASES: dict[str, tuple[type[nn.Module], Callable[[], tuple[Tensor, ...]], list[str]]] = {
    "pillars of int32": (Pillars, lambda: pillars(torch.int32), ["FLOAT", "INT32", "INT32"]),
    "pillars of int64": (Pillars, lambda: pillars(torch.int64), ["FLOAT", "INT64", "INT64"]),
    "bytes": (Picture, lambda: (torch.randint(256, (1, 3, 8, 8), dtype=torch.uint8),), ["UINT8"]),
    "tokens": (Tokens, tokens, ["INT64", "BOOL"]),
}


@pytest.mark.parametrize("profile", ["tensorrt10", "tensorrt11", "onnxruntime", "openvino"])
@pytest.mark.parametrize("case", CASES)
def test_integers_and_truth_values_keep_their_type(
    case: str, profile: str, calibrated: Fixture, once: Fixture, run: Fixture, tmp_path: Path
) -> None:
    if profile == "openvino":
        pytest.importorskip("openvino", reason="openvino is not installed")
    net, frame, types = CASES[case]

    def make() -> tuple[nn.Module, IntegerModel]:
        model = calibrated(net(), *frame())
        return model, simulate(model, frame())

    model, integer = once(case, make)
    other = frame()
    file = export_qdq_onnx(model, frame(), tmp_path / "net.onnx", profile)
    ports = onnx.load(file.path).graph.input
    found = [onnx.TensorProto.DataType.Name(p.type.tensor_type.elem_type) for p in ports]
    assert found == ["FLOAT16" if t == "FLOAT" and "11" in profile else t for t in types]
    source = integer if "tensorrt" in profile else model
    assert sum(row.unexplained for row in compare_qdq_onnx(file, source, other)) == 0
    in_float = profile == "openvino" and cpu_at_hand() == "any"  # its weights are uint8
    assert {f.id for f in lint_onnx(file.path, profile)} == ({"OVN001"} if in_float else set())
    if profile == "onnxruntime":
        (made,), _ = run(file, *other)
        torch.testing.assert_close(made, integer(*other), rtol=1e-5, atol=1e-6)


class Scaled(nn.Module):
    """A camera's map, by a number that a quantized layer makes of its pose."""

    def __init__(self) -> None:
        super().__init__()
        self.map, self.pose = nn.Conv2d(3, 8, 3, padding=1), nn.Linear(9, 4)

    def forward(self, image: Tensor, intrinsics: Tensor) -> Tensor:
        number = self.pose(torch.inverse(intrinsics).flatten(1)).sum()
        made: Tensor = torch.relu(self.map(image)) + number
        return made


def views() -> tuple[Tensor, Tensor]:
    return torch.randn(1, 3, 6, 6), torch.randn(2, 3, 3) + 3 * torch.eye(3)


@pytest.mark.parametrize("profile", ["tensorrt10", "onnxruntime", "horizon"])
def test_inverses_and_a_quantized_number_without_axes(
    profile: str, calibrated: Fixture, run: Fixture, tmp_path: Path
) -> None:
    model, other = calibrated(Scaled(), *views()), views()
    file = export_qdq_onnx(model, views(), tmp_path / "net.onnx", profile)
    assert sum(row.unexplained for row in compare_qdq_onnx(file, model, other)) == 0
    if profile == "onnxruntime":
        (made,), _ = run(file, *other)
        torch.testing.assert_close(made, simulate(model, views())(*other), rtol=1e-5, atol=1e-5)


class Splat(nn.Module):
    """Points inside of a grid to its cells, sorted and summed by differences of running sums."""

    def __init__(self) -> None:
        super().__init__()
        self.features, self.map = nn.Linear(3, 4), nn.Conv2d(4, 2, 1)

    def forward(self, points: Tensor, places: Tensor) -> Tensor:
        inside = (places >= 0) & (places < SIDE)
        rows, cells = self.features(points)[inside], places[inside].long()
        order = cells.argsort()
        rows, cells = rows[order].cumsum(0), cells[order]
        last = torch.ones(rows.shape[0], dtype=torch.bool)
        last[:-1] = cells[1:] != cells[:-1]
        rows, cells = rows[last], cells[last]
        canvas = rows.new_zeros(SIDE, 4)
        canvas[cells] = torch.cat((rows[:1], rows[1:] - rows[:-1]))
        made: Tensor = self.map(canvas.t()[None, :, :, None])
        return made


def test_rows_that_a_mask_chooses_are_of_any_number(
    calibrated: Fixture, run: Fixture, tmp_path: Path
) -> None:
    frames = [(torch.randn(16, 3), torch.randint(-4, 12, (16,)).float()) for _ in range(4)]
    kept = {int(((cells >= 0) & (cells < SIDE)).sum()) for _, cells in frames}
    assert len(kept) > 1
    model = calibrated(Splat(), *frames[0])
    held_to_the_integers(model, frames, run, tmp_path)
    export_qdq_onnx(model, frames[0], tmp_path / "mapper.onnx", "horizon")


def held_to_the_integers(
    model: nn.Module, frames: list[tuple[Tensor, ...]], run: Fixture, folder: Path
) -> None:
    """A file of the first frame makes what the integer model does, of every frame."""
    integer = simulate(model, frames[0])
    file = export_qdq_onnx(model, frames[0], folder / "net.onnx", "onnxruntime")
    for frame in frames:
        (made,), _ = run(file, *frame, optimised=False)
        torch.testing.assert_close(made, integer(*frame), rtol=1e-5, atol=1e-5)


class Pairs(nn.Module):
    """Every point of one kind with every one of another: sizes that are free in pairs."""

    def __init__(self) -> None:
        super().__init__()
        self.features, self.result = nn.Linear(3, 4), nn.Linear(4, 2)

    def forward(self, points: Tensor, places: Tensor) -> Tensor:
        points = self.features(points)
        left, right = points[places >= 2], points[places < 3]
        pairs = (left.unsqueeze(1) - right).relu()
        made: Tensor = self.result(pairs.view(-1, right.shape[0], 2, 2).flatten(2).sum(1))
        return made


def test_sizes_that_are_free_in_pairs(calibrated: Fixture, run: Fixture, tmp_path: Path) -> None:
    frames = [(torch.randn(9, 3), torch.arange(9) % n * 1.0) for n in (5, 7, 4)]
    held_to_the_integers(calibrated(Pairs(), *frames[0]), frames, run, tmp_path)


class Fuses(nn.Module):
    """A map and the points under it, out of a batch_dict that also gets the results."""

    def __init__(self) -> None:
        super().__init__()
        self.map, self.head = nn.Conv2d(3, 8, 3, padding=1), nn.Conv2d(8, 4, 1)

    def forward(self, batch_dict: dict[str, Any]) -> dict[str, Any]:
        batch_dict["features"] = torch.relu(self.map(batch_dict["image"])) + batch_dict["bias"]
        batch_dict["boxes"] = self.head(batch_dict["features"])
        return batch_dict


def frame_of_loader(seed: int) -> dict[str, Any]:
    random = torch.Generator().manual_seed(seed)
    return {
        "frame_id": f"{seed}.bin",
        "image": torch.randn(1, 3, 8, 8, generator=random),
        "gt_boxes": torch.randn(1, seed, 7),
        "calib": [object()],
        "bias": torch.randn(1, 8, 1, 1, generator=random),
    }


@pytest.mark.parametrize("profile", ["tensorrt10", "tensorrt11", "onnxruntime", "horizon"])
def test_members_that_are_not_read_are_no_inputs(
    profile: str, calibrated: Fixture, run: Fixture, tmp_path: Path
) -> None:
    net, used = Fuses(), frame_of_loader(1)
    model = calibrated(net, frame_of_loader(1))
    with torch.no_grad():
        net(used)
    file = export_qdq_onnx(model, (used,), tmp_path / "net.onnx", profile)
    assert [*file.inputs] == ["batch_dict_image", "batch_dict_bias"]
    assert lint_onnx(file.path, profile) == []
    other = frame_of_loader(5)
    for frame in (other, {name: other[name] for name in ("image", "bias")}):
        assert sum(row.unexplained for row in compare_qdq_onnx(file, model, (frame,))) == 0
    if profile == "onnxruntime":
        made, _ = run(file, other["image"], other["bias"])
        wanted = simulate(model, (used,))(other)
        for name, value in zip(file.outputs, made, strict=True):
            torch.testing.assert_close(value, wanted[name], rtol=1e-5, atol=1e-5)
