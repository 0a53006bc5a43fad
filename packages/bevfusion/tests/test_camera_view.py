"""The view transform's geometry: against a double loop, and against the LiDAR's own grid."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from bev_data import InputError
from bev_data.voxelize import Voxelization
from bevfusion.model import CONFIGS, CameraConfig
from bevfusion.model.camera import DepthLSSTransform

SMALL = CameraConfig(
    image_size=(16, 24),
    neck_channels=6,
    xbound=(-6.0, 6.0, 0.5),
    ybound=(-4.0, 8.0, 1.0),
    zbound=(-2.0, 4.0, 6.0),
    dbound=(1.0, 9.0, 0.5),
    out_channels=5,
)
Change = Callable[[Tensor], Tensor]
TWO_HIGH = dataclasses.replace(SMALL, zbound=(-2.0, 4.0, 3.0), downsample=1)


def looking(yaw_deg: float, pitch_deg: float = 0.0, at: tuple[float, float, float] = (0, 0, 0)):
    """LiDAR to camera: the camera's z axis points `yaw_deg` counter-clockwise from +x."""
    yaw, pitch = math.radians(yaw_deg), math.radians(pitch_deg)
    forward = np.array(
        [math.cos(yaw) * math.cos(pitch), math.sin(yaw) * math.cos(pitch), -math.sin(pitch)]
    )
    right = np.array([math.sin(yaw), -math.cos(yaw), 0.0])
    rotation = np.stack([right, np.cross(forward, right), forward])
    matrix = np.eye(4)
    matrix[:3, :3] = rotation
    matrix[:3, 3] = -rotation @ np.array(at)
    return matrix


def calibration(batch: int = 2, cameras: int = 3, seed: int = 0) -> tuple[Tensor, Tensor, Tensor]:
    rng = np.random.default_rng(seed)
    intrinsics = np.zeros((batch, cameras, 3, 3))
    to_camera = np.zeros((batch, cameras, 4, 4))
    image_aug = np.zeros((batch, cameras, 3, 3))
    for b in range(batch):
        for n in range(cameras):
            focal = rng.uniform(30, 60)
            intrinsics[b, n] = [[focal, 0.3, 26 + n], [0, focal * 1.1, 17 - b], [0, 0, 1]]
            at = tuple(rng.uniform(-1, 1, 3))
            to_camera[b, n] = looking(rng.uniform(0, 360), rng.uniform(-10, 30), at)
            turn, scale = rng.uniform(-0.1, 0.1), rng.uniform(0.4, 0.6)
            c, s = scale * math.cos(turn), scale * math.sin(turn)
            image_aug[b, n] = [[c, -s, rng.uniform(-3, 3)], [s, c, rng.uniform(-3, 3)], [0, 0, 1]]
    return torch.from_numpy(intrinsics), torch.from_numpy(to_camera), torch.from_numpy(image_aug)


def slow_cells(config: CameraConfig, given: tuple[Tensor, Tensor, Tensor]) -> list[int]:
    """Point after point, as mit-bevfusion's get_geometry and bev_pool go about it."""
    intrinsics, to_camera, image_aug = (m.numpy() for m in given)
    (rows, columns), (height, width) = config.feature_size, config.image_size
    bounds = (config.xbound, config.ybound, config.zbound)
    counts = [round((high - low) / step) for low, high, step in bounds]
    bins = int((config.dbound[1] - config.dbound[0]) / config.dbound[2])
    cells = []
    for b in range(len(intrinsics)):
        for n in range(intrinsics.shape[1]):
            to_lidar = np.linalg.inv(to_camera[b, n])
            for d in range(bins):
                for i in range(rows):
                    for j in range(columns):
                        depth = config.dbound[0] + d * config.dbound[2]
                        pixel = np.array([j * (width - 1) / (columns - 1),
                                          i * (height - 1) / (rows - 1)])  # fmt: skip
                        pixel = np.linalg.solve(
                            image_aug[b, n, :2, :2], pixel - image_aug[b, n, :2, 2]
                        )
                        seen = np.array([pixel[0] * depth, pixel[1] * depth, depth])
                        point = to_lidar[:3, :3] @ np.linalg.inv(intrinsics[b, n]) @ seen
                        point = point + to_lidar[:3, 3]
                        x, y, z = (
                            math.trunc((p - low) / step)
                            for p, (low, _, step) in zip(point, bounds, strict=True)
                        )
                        inside = 0 <= x < counts[0] and 0 <= y < counts[1] and 0 <= z < counts[2]
                        flat = ((b * counts[2] + z) * counts[0] + x) * counts[1] + y
                        cells.append(flat if inside else -1)
    return cells


@pytest.mark.parametrize("config", [SMALL, TWO_HIGH])
def test_cells_are_those_of_a_double_loop(config: CameraConfig) -> None:
    given = calibration()
    got = DepthLSSTransform(config).cells(*given)
    wanted = slow_cells(config, given)
    assert got.dtype == torch.int64
    assert got.tolist() == wanted
    assert 0.1 < np.mean(np.array(wanted) >= 0) < 0.95


def test_float32_calibration_gives_the_same_cells_but_for_rounding() -> None:
    given = calibration(seed=3)
    transform = DepthLSSTransform(SMALL)
    exact = transform.cells(*given)
    rounded = transform.cells(*(m.float() for m in given))
    assert (exact != rounded).float().mean() < 1e-3


def test_the_first_cell_reaches_one_cell_below_the_map() -> None:
    """Upstream cuts indices towards zero; trained weights have seen it."""
    config = dataclasses.replace(SMALL, zbound=(-1.0, 1.0, 2.0), dbound=(1.0, 9.0, 1.0))
    down = torch.from_numpy(looking(0.0, pitch_deg=90.0))[None, None]
    cells = DepthLSSTransform(config).cells(
        torch.tensor([[[[1e4, 0, 12], [0, 1e4, 8], [0, 0, 1]]]], dtype=torch.float64),
        down,
        torch.eye(3, dtype=torch.float64)[None, None],
    )
    seen = (cells.view(8, -1) >= 0).all(1)
    assert seen.tolist() == [True, True] + [False] * 6  # z = −1 and −2, then −3 and below


class Given(nn.Module):
    """Answers the same tensor whatever it is asked."""

    def __init__(self, answer: Tensor) -> None:
        super().__init__()
        self.register_buffer("answer", answer)

    def forward(self, x: Tensor) -> Tensor:
        answer = self.answer
        assert isinstance(answer, Tensor)
        return answer


@pytest.mark.parametrize("name", ["tiny", "nuscenes"])
@pytest.mark.parametrize(("yaw", "pixel"), [(90.0, (5, 20)), (35.0, (7, 3)), (-110.0, (9, 28))])
def test_a_point_lands_in_the_cell_that_the_lidar_branch_gives_it(
    name: str, yaw: float, pixel: tuple[int, int]
) -> None:
    config = CONFIGS[name]
    camera, (rows, columns) = config.camera, config.camera.feature_size
    transform = DepthLSSTransform(camera)
    to_camera = looking(yaw, at=(0.3, 0.5, -0.2))
    focal = camera.image_size[1] * 0.8
    intrinsics = np.array([[focal, 0, camera.image_size[1] / 2], [0, focal, 60.0], [0, 0, 1]])
    seen_bin = 25
    depth = camera.dbound[0] + seen_bin * camera.dbound[2]
    u = pixel[1] * (camera.image_size[1] - 1) / (columns - 1)
    v = pixel[0] * (camera.image_size[0] - 1) / (rows - 1)
    in_camera = np.linalg.inv(intrinsics) @ np.array([u, v, 1.0]) * depth
    point = (np.linalg.inv(to_camera) @ np.append(in_camera, 1.0))[:3]
    # Depthnet says: all of this pixel's weight in one bin, one channel on, nothing elsewhere.
    answer = torch.zeros(1, transform.bins + camera.out_channels, rows, columns)
    answer[0, seen_bin, pixel[0], pixel[1]] = 1e4
    answer[0, transform.bins + 3, pixel[0], pixel[1]] = 2.5
    transform.depthnet = nn.Sequential(Given(answer))
    transform.downsample = nn.Identity()
    cells = transform.cells(
        torch.from_numpy(intrinsics)[None, None],
        torch.from_numpy(to_camera)[None, None],
        torch.eye(3, dtype=torch.float64)[None, None],
    )
    with torch.no_grad():
        bev = transform.eval()(
            torch.zeros(1, 1, camera.neck_channels, rows, columns),
            torch.zeros(1, 1, 1, *camera.image_size),
            cells,
        )
    assert bev.is_contiguous(memory_format=torch.channels_last)
    ((_, channel, x, y),) = bev.nonzero().tolist()
    assert (channel, bev[0, channel, x, y]) == (3, 2.5)
    lidar = config.lidar
    voxelize = Voxelization(
        voxel_size=list(lidar.voxel_size),
        point_cloud_range=list(lidar.point_cloud_range),
        max_num_points=1,
        max_voxels=(10, 10),
    ).eval()
    at_ground = [point[0], point[1], 0.0, 0.0, 0.0]
    coords = voxelize(torch.tensor([at_ground], dtype=torch.float32)).coords[0].tolist()
    per_cell = round(camera.xbound[2] / lidar.voxel_size[0])
    assert per_cell * camera.downsample == 8  # the LiDAR branch's stride
    assert [x, y] == [coords[1] // per_cell, coords[2] // per_cell]


def test_channels_of_a_map_with_heights_come_height_first() -> None:
    transform = DepthLSSTransform(TWO_HIGH)
    rows, columns = SMALL.feature_size
    answer = torch.zeros(1, transform.bins + 5, rows, columns)
    answer[0, transform.bins + 4] = 1.0
    transform.depthnet = nn.Sequential(Given(answer))
    points = transform.bins * rows * columns
    x, y, z = 7, 9, 1
    cells = torch.full((points,), (z * 24 + x) * 12 + y)
    bev = transform.eval()(torch.zeros(1, 1, 6, rows, columns), torch.zeros(1, 1, 1, 16, 24), cells)
    assert bev.shape == (1, 10, 24, 12)
    assert bev.nonzero().tolist() == [[0, 1 * 5 + 4, 7, 9]]


def test_frames_of_a_batch_do_not_mix() -> None:
    torch.manual_seed(0)
    transform = DepthLSSTransform(SMALL).eval()
    given = calibration(batch=2)
    features, depth = torch.randn(2, 3, 6, 2, 3), torch.rand(2, 3, 1, 16, 24)
    with torch.no_grad():
        both = transform(features, depth, transform.cells(*given))
        for b in range(2):
            alone = transform.cells(*(m[b : b + 1] for m in given))
            one = transform(features[b : b + 1], depth[b : b + 1], alone)
            torch.testing.assert_close(both[b : b + 1], one)
    assert both.shape == (2, 5, 12, 6)


def test_gradients_reach_every_weight() -> None:
    torch.manual_seed(0)
    transform = DepthLSSTransform(SMALL)
    features = torch.randn(1, 3, 6, 2, 3, requires_grad=True)
    cells = transform.cells(*calibration(batch=1))
    transform(features, torch.rand(1, 3, 1, 16, 24), cells).square().sum().backward()
    assert features.grad is not None
    for name, parameter in transform.named_parameters():
        if name in ("dx", "bx", "nx", "frustum"):
            assert not parameter.requires_grad
        else:
            assert parameter.grad is not None, name
            assert parameter.grad.abs().sum() > 0 or "bias" in name, name


def broken(which: int, change: Change) -> list[Tensor]:
    given = [m.clone() for m in calibration()]
    given[which] = change(given[which])
    return given


def put(value: float, *at: int) -> Change:
    def change(m: Tensor) -> Tensor:
        m[1, 2][at] = value
        return m

    return change


@pytest.mark.parametrize(
    ("which", "change", "message"),
    [
        (0, put(math.nan, 0, 0), "intrinsics holds NaN"),
        (0, put(0.0, 0, 0), "intrinsics of camera 2 in frame 1 is singular"),
        (1, put(1.0, 3, 0), r"lidar_to_camera of camera 2 in frame 1 must end with the row"),
        (1, put(math.inf, 0, 3), "lidar_to_camera holds NaN or Inf"),
        (1, put(9000.0, 0, 3), "camera 2 in frame 1 sees no cell"),
        (2, lambda m: m[:, :2], r"image_aug is torch.float64 \[2, 2, 3, 3\]"),
        (1, lambda m: m[..., :3, :], r"expected floating point \[batch, cameras, 4, 4\]"),
        (0, lambda m: m.long(), "expected floating point"),
        (0, lambda m: m[:, :0], r"\[2, 0, 3, 3\]: expected"),
    ],
)
def test_calibration_that_cannot_be_used_is_named(which: int, change: Change, message: str) -> None:
    with pytest.raises(InputError, match=message):
        DepthLSSTransform(SMALL).cells(*broken(which, change))


def test_parameters_of_another_map_are_refused() -> None:
    transform = DepthLSSTransform(SMALL)
    other = dataclasses.replace(SMALL, xbound=(-12.0, 12.0, 1.0))
    transform.load_state_dict(DepthLSSTransform(other).state_dict())
    with pytest.raises(InputError, match=r"dx is \[1.0, 1.0, 6.0\] where its configuration says"):
        transform.cells(*calibration())


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"image_size": (100, 256)}, "multiples of it"),
        ({"feature_stride": 16}, "feature stride 16"),
        ({"downsample": 4}, "downsample is 4"),
        ({"zbound": (-2.0, 4.0, 3.0)}, "with 2 cells along z"),
        ({"xbound": (-6.0, 6.0, 0.7)}, "xbound"),
        ({"zbound": (-6.0, 6.0, 0.0)}, "zbound"),
    ],
)
def test_sizes_that_do_not_fit_are_named(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(InputError, match=message):
        DepthLSSTransform(dataclasses.replace(SMALL, **changes))
