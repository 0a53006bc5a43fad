"""Stand-ins of OpenPCDet's compiled modules against loops written from their definitions."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from bevfusion.frameworks import _operators as operators
from bevfusion.frameworks._extensions import EXTENSIONS
from bevfusion.frameworks._openpcdet_operators import CPU_MARGIN, MARGIN

IOU, BATCH, STACK = (
    EXTENSIONS[f"{name}_cuda"] for name in ("iou3d_nms", "pointnet2_batch", "pointnet2_stack")
)


def cloud(count: int, seed: int = 0) -> Tensor:
    return torch.rand(count, 3, generator=torch.Generator().manual_seed(seed)) * 4 - 2


def boxes(count: int, seed: int = 1) -> Tensor:
    made = torch.rand(count, 7, generator=torch.Generator().manual_seed(seed))
    return torch.tensor([-2.0, -2, -1, 1, 1, 1, -3]) + made * torch.tensor([4.0, 4, 2, 2, 2, 2, 6])


def inside(point: Tensor, box: Tensor, margin: float) -> bool:
    dx, dy, dz = (point - box[:3]).tolist()
    cos, sin = math.cos(box[6]), math.sin(box[6])
    return (
        abs(dx * cos + dy * sin) < float(box[3]) / 2 + margin
        and abs(dy * cos - dx * sin) < float(box[4]) / 2 + margin
        and abs(dz) <= float(box[5]) / 2
    )


def test_overlaps_of_pairs() -> None:
    a, b = boxes(6), boxes(6, seed=2)
    whole, pairs = torch.zeros(6, 6), torch.zeros(6, 1)
    IOU["boxes_iou_bev_gpu"](a, b, whole)
    IOU["boxes_aligned_iou_bev_cpu"](a, b, pairs)
    assert torch.equal(pairs[:, 0], whole.diagonal())
    assert 0 < float(whole.max()) < 1
    IOU["boxes_overlap_bev_gpu"](a, b, whole)
    for name in ("boxes_aligned_overlap_bev_gpu", "paired_boxes_overlap_bev_gpu"):
        IOU[name](a, b, pairs)
        assert torch.equal(pairs[:, 0], whole.diagonal())


def test_suppression_returns_the_number_kept() -> None:
    own = boxes(20)
    overlap = operators.boxes_iou_bev(own, own)
    kept: list[int] = []
    for row in range(20):
        if all(overlap[row, better] <= 0.1 for better in kept):
            kept.append(row)
    keep = torch.full((20,), -1)
    assert IOU["nms_gpu"](own, keep, 0.1) == len(kept) < 20
    assert keep.tolist() == [*kept, *[-1] * (20 - len(kept))]
    own[:, 6] = 0
    turned = own.clone()
    turned[:, 6] = 1.0
    assert IOU["nms_normal_gpu"](turned, keep, 0.1) == IOU["nms_gpu"](own, keep, 0.1)


def test_points_in_boxes_have_margins() -> None:
    points, own = cloud(500), boxes(5)
    points[:100, :2] = own[0, :2] + torch.linspace(-1.5, 1.5, 100)[:, None]  # across the faces
    found = torch.zeros(5, 500, dtype=torch.int32)
    EXTENSIONS["roiaware_pool3d_cuda"]["points_in_boxes_cpu"](own, points, found)
    first = torch.zeros(1, 500, dtype=torch.int32)
    EXTENSIONS["roiaware_pool3d_cuda"]["points_in_boxes_gpu"](own[None], points[None], first)
    for p, point in enumerate(points):
        assert found[:, p].tolist() == [inside(point, box, CPU_MARGIN) for box in own]
        holders = [b for b, box in enumerate(own) if inside(point, box, MARGIN)]
        assert int(first[0, p]) == (holders[0] if holders else -1)


def test_a_point_on_the_margin() -> None:
    box = torch.tensor([[0.0, 0, 0, 2, 2, 2, 0]])
    point = torch.tensor([[1.005, 0.0, 0.0]])
    found = torch.zeros(1, 1, dtype=torch.int32)
    EXTENSIONS["roiaware_pool3d_cuda"]["points_in_boxes_cpu"](box, point, found)
    assert found.item() == 1
    EXTENSIONS["roiaware_pool3d_cuda"]["points_in_boxes_gpu"](box[None], point[None], found)
    assert found.item() == -1


def test_roiaware_pooling_has_boxes_at_their_centre() -> None:
    box, point = torch.tensor([[0.0, 0, 0, 2, 2, 2, 0]]), torch.tensor([[0.5, -0.5, -0.5]])
    pooled, largest = torch.zeros(1, 2, 2, 2, 1), torch.zeros(1, 2, 2, 2, 1, dtype=torch.int32)
    members = torch.zeros(1, 2, 2, 2, 4, dtype=torch.int32)
    pool = EXTENSIONS["roiaware_pool3d_cuda"]["forward"]
    pool(box, point, torch.tensor([[3.0]]), largest, members, pooled, operators.MAX)
    assert pooled.nonzero().tolist() == [[0, 1, 0, 0, 0]]
    assert pooled.max() == 3
    assert members[0, 1, 0, 0].tolist() == [1, 0, 0, 0]


def test_roipoint_pooling_equals_a_loop() -> None:
    points, own, features = cloud(200)[None], boxes(4)[None], torch.randn(1, 200, 2)
    own[0, 3, :3] = 50  # empty
    pooled, empty = torch.zeros(1, 4, 16, 5), torch.zeros(1, 4, dtype=torch.int32)
    EXTENSIONS["roipoint_pool3d_cuda"]["forward"](points, own, features, pooled, empty)
    assert empty[0].tolist() == [0, 0, 0, 1]
    for b in range(3):
        members = [p for p in range(200) if inside(points[0, p], own[0, b], MARGIN)][:16]
        assert members
        for slot in range(16):
            row = members[slot % len(members)]
            assert torch.equal(pooled[0, b, slot], torch.cat([points[0, row], features[0, row]]))
    assert not pooled[0, 3].any()


def test_ranks_within_groups() -> None:
    groups = torch.tensor([5, 2, 5, 5, 2, 9])
    out = torch.full_like(groups, -1)
    EXTENSIONS["ingroup_inds_cuda"]["forward"](groups, out)
    assert out.tolist() == [0, 0, 1, 2, 1, 0]


def test_batched_forms_fill_their_outputs() -> None:
    centers, points, features = cloud(9)[None], cloud(30, seed=3)[None], torch.randn(1, 4, 30)
    rows = torch.zeros(1, 9, 5, dtype=torch.int32)
    BATCH["ball_query_wrapper"](1, 30, 9, 1.5, 5, centers, points, rows)
    assert torch.equal(rows[0], operators.ball_query(centers[0], points[0], 0.0, 1.5, 5)[0])
    grouped = torch.zeros(1, 4, 9, 5)
    BATCH["group_points_wrapper"](1, 4, 30, 9, 5, features, rows, grouped)
    assert torch.equal(grouped, features[:, :, rows[0].long()])
    squared, nearest = torch.zeros(1, 9, 3), torch.zeros(1, 9, 3, dtype=torch.int32)
    BATCH["three_nn_wrapper"](1, 9, 30, centers, points, squared, nearest)
    weights, out = torch.rand(1, 9, 3), torch.zeros(1, 4, 9)
    BATCH["three_interpolate_wrapper"](1, 4, 30, 9, features, nearest, weights, out)
    wanted = (features[:, :, nearest[0].long()] * weights[:, None]).sum(3)
    assert torch.allclose(out, wanted)
    chosen = torch.zeros(1, 6, dtype=torch.int32)
    BATCH["farthest_point_sampling_wrapper"](1, 30, 6, points, torch.zeros(1, 30), chosen)
    gathered = torch.zeros(1, 4, 6)
    BATCH["gather_points_wrapper"](1, 4, 30, 6, features, chosen, gathered)
    assert torch.equal(gathered, features[:, :, chosen[0].long()])
    assert chosen.unique().numel() == 6


def test_stacked_forms_keep_frames_apart() -> None:
    centers, points, features = cloud(9), cloud(30, seed=3), torch.randn(30, 4)
    counts, center_counts = torch.tensor([12, 18]), torch.tensor([4, 5])
    rows = torch.zeros(9, 5, dtype=torch.int32)
    STACK["ball_query_wrapper"](2, 9, 0.8, 5, centers, center_counts, points, counts, rows)
    nearest, squared = torch.zeros(9, 3, dtype=torch.int32), torch.zeros(9, 3)
    STACK["three_nn_wrapper"](centers, center_counts, points, counts, squared, nearest)
    for center in range(9):
        low, high = (0, 12) if center < 4 else (12, 30)
        distances = (points[low:high] - centers[center]).square().sum(1)
        ball = [row for row in range(high - low) if distances[row] < 0.64][:5]
        assert rows[center, 0] == (ball[0] if ball else -1)
        if ball:
            assert rows[center].tolist() == ball + ball[:1] * (5 - len(ball))
        order = distances.argsort(stable=True)[:3]
        assert nearest[center].tolist() == (low + order).tolist()
        assert torch.allclose(squared[center], distances[order])
    assert (rows[:, 0] == -1).any()
    weights, out = torch.rand(9, 3), torch.zeros(9, 4)
    STACK["three_interpolate_wrapper"](features, nearest, weights, out)
    assert torch.allclose(out, (features[nearest.long()] * weights[..., None]).sum(1))
    grouped, own = torch.zeros(9, 4, 5), rows.clamp(min=0)
    STACK["group_points_wrapper"](2, 9, 4, 5, features, counts, own, center_counts, grouped)
    start = torch.tensor([0] * 4 + [12] * 5)
    assert torch.equal(grouped, features[own.long() + start[:, None]].transpose(1, 2))
    chosen = torch.zeros(7, dtype=torch.int32)
    STACK["stack_farthest_point_sampling_wrapper"](
        points, torch.zeros(30), counts, chosen, torch.tensor([3, 4])
    )
    assert (chosen[0], chosen[3]) == (0, 12)
    assert (chosen[:3] < 12).all()
    assert (chosen[3:] >= 12).all()


def test_voxel_query_equals_a_loop() -> None:
    depth, height, width = 3, 6, 5
    made = torch.Generator().manual_seed(5)
    full = torch.rand(2, depth, height, width, generator=made) < 0.4
    places = full.nonzero()
    points = places[:, [3, 2, 1]] + torch.rand(len(places), 3, generator=made)
    owners = torch.full(full.shape, -1, dtype=torch.int32)
    owners[full] = torch.arange(len(places), dtype=torch.int32)
    coords = torch.tensor([[0, 0, 0, 0], [0, 2, 5, 4], [1, 1, 3, 2], [1, 0, 0, 4]]).int()
    centers = coords[:, [3, 2, 1]] + 0.5
    centers[3] += 100  # no point is near
    rows = torch.zeros(4, 4, dtype=torch.int32)
    STACK["voxel_query_wrapper"](
        4, depth, height, width, 4, 1.6, 1, 2, 2, centers, points, coords, owners, rows
    )
    for q, (batch, z, y, x) in enumerate(coords.tolist()):
        found = [
            int(owners[batch, k, j, i])
            for k in range(max(0, z - 1), min(depth, z + 2))
            for j in range(max(0, y - 2), min(height, y + 3))
            for i in range(max(0, x - 2), min(width, x + 3))
            if owners[batch, k, j, i] >= 0
            and (points[owners[batch, k, j, i]] - centers[q]).square().sum() <= 1.6**2
        ][:4]
        if found:
            assert rows[q].tolist() == found + found[:1] * (4 - len(found))
        else:
            assert rows[q, 0] == -1
    assert rows[3, 0] == -1
