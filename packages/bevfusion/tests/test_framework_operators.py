"""Stand-ins of compiled operators against loops written from their definitions."""

from __future__ import annotations

import importlib
import math
import sys
from types import ModuleType
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from bevfusion.frameworks import _operators as operators
from bevfusion.frameworks import use_operator_standins
from bevfusion.frameworks._extensions import _FINDER, EXTENSIONS, MMCV, allocate_on_cpu
from bevquant_graph import capture, op_spec
from bevquant_int8sim import compare, simulate
from bevquant_qnn import quantize_model
from bevquant_quantizers import calibrate

torch.manual_seed(0)
SIZE, BOUNDS = [1.0, 2.0, 4.0], [-8.0, -8.0, -4.0, 8.0, 8.0, 4.0]


def cloud(count: int, seed: int = 0) -> Tensor:
    made = torch.Generator().manual_seed(seed)
    return (torch.rand(count, 4, generator=made) - 0.5) * torch.tensor([20.0, 20.0, 10.0, 1.0])


def boxes(count: int, seed: int = 1) -> Tensor:
    made = torch.rand(count, 7, generator=torch.Generator().manual_seed(seed))
    low = torch.tensor([-8.0, -8, -1, 2, 1, 1, -3])
    return low + made * torch.tensor([16.0, 16, 2, 4, 2, 2, 6])


def test_hard_voxelize_equals_a_loop() -> None:
    points, most, limit = cloud(600), 3, 40
    voxels: dict[tuple[int, ...], list[Tensor]] = {}
    for point in points:
        cell = tuple(
            math.floor((float(point[axis]) - BOUNDS[axis]) / SIZE[axis]) for axis in range(3)
        )
        grid = [round((BOUNDS[axis + 3] - BOUNDS[axis]) / SIZE[axis]) for axis in range(3)]
        if any(not 0 <= c < n for c, n in zip(cell, grid, strict=True)):
            continue
        if cell not in voxels and len(voxels) == limit:
            continue
        members = voxels.setdefault(cell, [])
        if len(members) < most:
            members.append(point)
    found, cells, counts = operators.hard_voxelize(points, SIZE, BOUNDS, most, limit)
    assert [tuple(row) for row in cells.flip(1).tolist()] == list(voxels)
    assert counts.tolist() == [len(members) for members in voxels.values()]
    for row, members in zip(found, voxels.values(), strict=True):
        assert torch.equal(row[: len(members)], torch.stack(members))
        assert not row[len(members) :].any()


@pytest.mark.parametrize("how", ["max", "sum", "mean"])
def test_scatter_points_equals_a_loop(how: str) -> None:
    features, cells = torch.randn(200, 5), torch.randint(-1, 4, (200, 3))
    got, unique, owner, count = operators.scatter_points(features, cells, how)
    groups: dict[tuple[int, ...], list[int]] = {}
    for row, cell in enumerate(map(tuple, cells.tolist())):
        if min(cell) >= 0:
            groups.setdefault(cell, []).append(row)
    assert [tuple(cell) for cell in unique.tolist()] == sorted(groups)
    for index, cell in enumerate(sorted(groups)):
        rows = features[groups[cell]]
        wanted = {"max": rows.amax(0), "sum": rows.sum(0), "mean": rows.mean(0)}[how]
        assert torch.allclose(got[index], wanted, atol=1e-5)
        assert count[index] == len(rows)
        assert owner[groups[cell]].tolist() == [index] * len(rows)
    assert int((owner == -1).sum()) == int((cells < 0).any(1).sum())


def test_suppression_equals_a_loop() -> None:
    overlap = torch.rand(30, 30)
    overlap = (overlap + overlap.T) / 2
    kept: list[int] = []
    for row in range(30):
        if all(overlap[row, better] <= 0.5 for better in kept):
            kept.append(row)
    assert operators.nms(overlap, 0.5).tolist() == kept


@pytest.mark.parametrize("bottom", [True, False])
def test_points_in_boxes_equal_a_loop(bottom: bool) -> None:
    points, own = cloud(300)[:, :3], boxes(6)
    got = operators.points_in_boxes(points, own, bottom=bottom)
    for b, (x, y, z, dx, dy, dz, yaw) in enumerate(own.tolist()):
        middle = z + dz / 2 if bottom else z
        for p, (px, py, pz) in enumerate(points.tolist()):
            along = (px - x) * math.cos(yaw) + (py - y) * math.sin(yaw)
            across = (py - y) * math.cos(yaw) - (px - x) * math.sin(yaw)
            inside = abs(along) < dx / 2 and abs(across) < dy / 2 and abs(pz - middle) <= dz / 2
            assert bool(got[b, p]) == inside


@pytest.mark.parametrize("how", [operators.MAX, operators.MEAN])
def test_roiaware_pool_equals_a_loop(how: int) -> None:
    points, own, features = cloud(800)[:, :3], boxes(4), torch.randn(800, 3)
    cells, most = (2, 3, 2), 5
    pooled, largest, members = operators.roiaware_pool(
        own, points, features, cells, most, how, bottom=True
    )
    inside = operators.points_in_boxes(points, own, bottom=True)
    local = operators.local_points(points, own, bottom=True)
    for b in range(4):
        groups: dict[tuple[int, ...], list[int]] = {}
        for p in torch.nonzero(inside[b])[:, 0].tolist():
            place = tuple(
                min(n - 1, max(0, int((float(local[b, p, a] / own[b, 3 + a]) + 0.5) * n)))
                for a, n in enumerate(cells)
            )
            if len(groups.setdefault(place, [])) < most - 1:
                groups[place].append(p)
        for place in np.ndindex(*cells):
            rows = groups.get(place, [])
            assert int(members[b][place][0]) == len(rows)
            if not rows:
                assert not pooled[b][place].any()
                continue
            values = features[rows]
            wanted = values.amax(0) if how == operators.MAX else values.mean(0)
            assert torch.allclose(pooled[b][place], wanted)
            if how == operators.MAX:
                assert largest[b][place].tolist() == [rows[i] for i in values.argmax(0)]


def test_mmcvs_roipoint_pool_equals_a_loop() -> None:
    points, own, features = cloud(800)[None, :, :3], boxes(4)[None], torch.randn(1, 800, 2)
    own[0, 3, :2] = 50  # without points
    pooled, empty = torch.zeros(1, 4, 5, 5), torch.full((1, 4), -1)
    MMCV["roipoint_pool3d_forward"](points, own, features, pooled, empty)
    inside = operators.points_in_boxes(points[0], own[0], bottom=True)
    assert empty.tolist() == [[0, 0, 0, 1]]
    for box, members in enumerate(inside.tolist()):
        rows = [row for row, member in enumerate(members) if member][:5]
        for slot in range(5 if rows else 0):
            row = rows[slot % len(rows)]
            assert torch.equal(pooled[0, box, slot], torch.cat([points[0, row], features[0, row]]))
    assert not pooled[0, 3].any()


@pytest.mark.parametrize("pairs", [1 << 22, 70])
def test_neighbours_equal_loops(pairs: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(operators, "_PAIRS", pairs)  # a few rows at a time
    target, source = torch.randn(2, 20, 3), torch.randn(2, 30, 3)
    squared, rows = operators.three_nn(target, source)
    centers, points = target[0], source[0]
    ball, empty = operators.ball_query(centers, points, 0.3, 1.0, 4)
    for n in range(20):
        distances = ((target[0, n] - source[0]) ** 2).sum(1)
        nearest = sorted(range(30), key=lambda i, d=distances: (float(d[i]), i))[:3]
        assert rows[0, n].tolist() == nearest
        assert torch.allclose(squared[0, n], distances[nearest])
        inside = [i for i in range(30) if 0.09 <= float(distances[i]) < 1.0][:4]
        assert bool(empty[n]) == (not inside)
        if inside:
            assert ball[n].tolist() == inside + inside[:1] * (4 - len(inside))
    chosen = operators.furthest_points(points, 6, pairwise=False).tolist()
    for step in range(1, 6):
        away = [min(float(((points[i] - points[j]) ** 2).sum()) for j in chosen[:step])
                for i in range(30)]  # fmt: skip
        assert chosen[step] == int(np.argmax(away))
    pairs = (points[:, None] - points[None]).square().sum(2)
    assert operators.furthest_points(pairs, 6, pairwise=True).tolist() == chosen


def bilinear(image: Tensor, y: float, x: float) -> Tensor:
    total = torch.zeros(len(image), dtype=image.dtype)
    for cy in (math.floor(y), math.floor(y) + 1):
        for cx in (math.floor(x), math.floor(x) + 1):
            if 0 <= cy < image.shape[1] and 0 <= cx < image.shape[2]:
                total += image[:, cy, cx] * (1 - abs(y - cy)) * (1 - abs(x - cx))
    return total


def test_deformable_attention_equals_a_loop() -> None:
    shapes = torch.tensor([[3, 4], [2, 2]])
    value = torch.randn(1, 16, 2, 3, dtype=torch.float64)
    places = torch.rand(1, 5, 2, 2, 2, 2, dtype=torch.float64) * 1.4 - 0.2
    weights = torch.rand(1, 5, 2, 2, 2, dtype=torch.float64)
    starts = torch.tensor([0, 12])
    got = MMCV["ms_deform_attn_forward"](value, shapes, starts, places, weights, im2col_step=64)
    levels = [value[0, :12], value[0, 12:]]
    for q in range(5):
        for head in range(2):
            total = torch.zeros(3, dtype=torch.float64)
            for level, (height, width) in enumerate(shapes.tolist()):
                image = levels[level][:, head].T.reshape(3, height, width)
                for point in range(2):
                    x, y = places[0, q, head, level, point].tolist()
                    sample = bilinear(image, y * height - 0.5, x * width - 0.5)
                    total += weights[0, q, head, level, point] * sample
            assert torch.allclose(got[0, q, 3 * head : 3 * head + 3], total)


def test_mmcvs_form_for_cpus_becomes_one_operator(monkeypatch: pytest.MonkeyPatch) -> None:
    mmcv: Any = ModuleType("mmcv.ops.multi_scale_deform_attn")
    mmcv.multi_scale_deformable_attn_pytorch = None
    monkeypatch.setitem(sys.modules, mmcv.__name__, mmcv)
    allocate_on_cpu()

    class Attention(nn.Module):
        def forward(self, value: Tensor, places: Tensor, weights: Tensor) -> Tensor:
            shapes = torch.as_tensor([(3, 4), (2, 2)])
            made: Tensor = mmcv.multi_scale_deformable_attn_pytorch(value, shapes, places, weights)
            return made

    given = torch.randn(1, 16, 2, 3), torch.rand(1, 5, 2, 2, 2, 2), torch.rand(1, 5, 2, 2, 2)
    graph = capture(Attention(), given)
    kinds = [op_spec(node.target).kind for node in graph.operations]
    assert kinds.count("sample") == 1
    want = MMCV["ms_deform_attn_forward"](
        given[0], torch.tensor([[3, 4], [2, 2]]), torch.tensor([0, 12]), *given[1:]
    )
    assert torch.equal(Attention()(*given), want)


@pytest.mark.parametrize("with_mask", [True, False])
def test_deformable_convolution_equals_a_loop(with_mask: bool) -> None:
    x = torch.randn(1, 4, 5, 6, dtype=torch.float64)
    weight = torch.randn(6, 2, 3, 2, dtype=torch.float64)
    oh, ow = 3, 3
    offset = torch.randn(1, 2 * 6 * 2, oh, ow, dtype=torch.float64)
    mask = torch.rand(1, 2 * 6, oh, ow, dtype=torch.float64) if with_mask else None
    got = operators.deformable_conv2d(
        x, weight, offset, mask, stride=(2, 2), padding=(1, 1), dilation=(1, 2), groups=2,
        offset_groups=2,
    )  # fmt: skip
    assert got.shape == (1, 6, oh, ow)
    shift = offset.view(2, 6, 2, oh, ow)
    for out, row, column in np.ndindex(6, oh, ow):
        total = 0.0
        for channel in range(2):
            c = out // 3 * 2 + channel
            for tap in range(6):
                dy, dx = shift[c // 2, tap, :, row, column].tolist()
                y = row * 2 - 1 + tap // 2 + dy
                x_ = column * 2 - 1 + tap % 2 * 2 + dx
                value = float(bilinear(x[0, c : c + 1], y, x_))
                if mask is not None:
                    value *= float(mask.view(2, 6, oh, ow)[c // 2, tap, row, column])
                total += float(weight[out, channel, tap // 2, tap % 2]) * value
        assert float(got[0, out, row, column]) == pytest.approx(total)


class DeformableBlock(nn.Module):
    """A deformable convolution as mmcv calls its compiled operator, between convolutions."""

    def __init__(self) -> None:
        super().__init__()
        self.stem, self.offset = nn.Conv2d(3, 4, 1), nn.Conv2d(4, 27, 3, padding=1)
        self.weight, self.bias = (
            nn.Parameter(torch.randn(4, 4, 3, 3) / 4),
            nn.Parameter(torch.ones(4)),
        )
        self.head = nn.Conv2d(4, 2, 1)

    def forward(self, x: Tensor) -> Tensor:
        y = self.stem(x).relu()
        first, second, mask = self.offset(y).chunk(3, 1)
        offset, mask = torch.cat([first, second], 1), mask.sigmoid()
        y, made = y.type_as(offset), y.new_empty(y.shape)
        MMCV["modulated_deform_conv_forward"](
            y, self.weight, self.bias, y.new_empty(0), offset, mask, made, y.new_empty(0),
            kernel_h=3, kernel_w=3, stride_h=1, stride_w=1, pad_h=1, pad_w=1, dilation_h=1,
            dilation_w=1, group=1, deformable_group=1, with_bias=True,
        )  # fmt: skip
        return self.head(made.relu())


def test_deformable_convolutions_run_in_integers_and_their_offsets_do_not() -> None:
    net, frames = DeformableBlock().eval(), [torch.randn(2, 3, 8, 10) for _ in range(3)]
    result = quantize_model(net, example_inputs=frames[0])
    added = {item.path for item in result.quantized} - {"stem", "offset", "head"}
    assert added == {"quant_conv", "sample_quantizer"}  # neither the offsets' concat nor the bias
    model = result.model
    calibrate(model, frames[:2])
    steps = [step.op for step in simulate(model, frames[0]).program.steps]
    assert (steps.count("conv"), steps.count("grid_sample")) == (4, 1)
    assert not compare(net, model, frames, verify=True).wrong


def test_bev_pool_equals_a_loop() -> None:
    cells = torch.tensor([[0, 0, 0, 0], [0, 0, 0, 0], [1, 2, 0, 0], [1, 2, 1, 1]])
    features = torch.randn(4, 3)
    got = operators.bev_pool(
        features, cells, torch.tensor([2, 1, 1]), torch.tensor([0, 2, 3]), (2, 2, 2, 3)
    )
    wanted = torch.zeros(2, 2, 2, 3, 3)
    for row, (x, y, z, batch) in zip(features, cells.tolist(), strict=True):
        wanted[batch, z, x, y] += row
    assert torch.allclose(got, wanted)


def test_standins_are_found_where_nothing_is_installed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "meta_path", [one for one in sys.meta_path if one is not _FINDER])
    with pytest.raises(ModuleNotFoundError):
        importlib.import_module("iou3d_nms_cuda")
    use_operator_standins()
    use_operator_standins()
    try:
        assert sys.meta_path.count(_FINDER) == 1
        module = importlib.import_module("iou3d_nms_cuda")
        own, out = boxes(3), torch.zeros(3, 3)
        module.boxes_iou_bev_cpu(own, own, out)
        assert torch.allclose(out.diagonal(), torch.ones(3))
        with pytest.raises(NotImplementedError, match="other has no stand-in: install"):
            module.other(own)
        with pytest.raises(AttributeError):
            _ = module.__wrapped__
    finally:
        sys.modules.pop("iou3d_nms_cuda", None)


def test_mmcv_forms_fill_what_they_are_given() -> None:
    own = boxes(5)
    keep, number = torch.zeros(5, dtype=torch.int64), torch.zeros((), dtype=torch.int64)
    MMCV["iou3d_nms3d_forward"](torch.cat([own[:1], own]), keep, number, nms_overlap_thresh=0.9)
    assert keep[0] == 0
    assert 1 not in keep[: int(number)].tolist()
    rows = torch.tensor([[0.0, 0, 4, 2, 0, 0], [0, 0, 4, 2, 0, 1], [0.1, 0, 4, 2, 0, 0]])
    scores = torch.tensor([0.5, 0.9, 0.8])
    order = scores.argsort(descending=True)
    both = [
        MMCV["nms_rotated"](rows, scores, order, rows[order], torch.zeros(0), 0.5, labelled)
        for labelled in (False, True)
    ]
    assert [found.tolist() for found in both] == [[1], [1, 2]]
    assert EXTENSIONS["mmcv._ext"] is MMCV


def test_furthest_points_are_one_operator_of_a_graph() -> None:
    class Sampler(nn.Module):
        def forward(self, points: Tensor) -> Tensor:
            return points[operators.furthest_points(points, 64, pairwise=False).long()]

    points = cloud(300)[:, :3]
    graph = torch.export.export(Sampler(), (points,))
    assert len([node for node in graph.graph.nodes if node.op == "call_function"]) < 6
    other = cloud(300, seed=5)[:, :3]
    assert torch.equal(graph.module()(other), Sampler()(other))
