from __future__ import annotations

import numpy as np
import pytest
import torch
from PIL import Image

from bev_data import InputError
from bev_data.boxes import box_corners
from bev_data.cameras import (
    CAMERA_NAMES,
    Camera,
    depth_images,
    order_cameras,
    prepare_cameras,
    project,
    wire_frame,
)

AHEAD = np.array([[1.0, 0, 0, 0], [0, 0, -1, -0.3], [0, 1, 0, -0.7], [0, 0, 0, 1]])


def matrix(fx: float = 120.0, fy: float = 118.0, cx: float = 83.0, cy: float = 41.0) -> np.ndarray:
    return np.array([[fx, 0, cx], [0, fy, cy], [0, 0, 1]])


def camera(name="CAM_FRONT", size=(160, 90), intrinsics=None, extrinsic=AHEAD, image=None):
    if image is None:
        image = np.zeros((size[1], size[0], 3), np.uint8)
    return Camera(name, image, matrix() if intrinsics is None else intrinsics, extrinsic)


def turned(degrees: float) -> np.ndarray:
    c, s = np.cos(np.radians(degrees)), np.sin(np.radians(degrees))
    turn = np.eye(4)
    turn[:2, :2] = [[c, s], [-s, c]]
    return AHEAD @ turn


def test_a_box_around_the_camera_is_cut_not_mirrored():
    (box,) = box_corners(np.array([[0.0, 0, 0, 40, 40, 3, 0]]))
    lines = wire_frame(box, camera())
    assert len(lines) == 8  # of its twelve edges four lie behind
    pixels, depth = project(camera(), box)
    in_front = pixels[depth > 0]
    assert len(in_front) == 4
    ends = lines.reshape(-1, 2)
    assert all(np.isclose(ends, corner).all(1).any() for corner in in_front)
    sides = np.sign(ends[:, 1] - 41).reshape(-1, 2)  # below the lens or above, at both ends
    assert np.count_nonzero(sides[:, 0] != sides[:, 1]) == 2  # the two upright ones before it


def test_projection_of_known_points():
    # 10 m before the lens, 1 m to the right and 2 m below it.
    point = np.array([[1.0, 10.7, -2.3, 99.0]], np.float32)
    pixels, depth = project(camera(), point)
    np.testing.assert_allclose(pixels, [[83 + 12, 41 + 23.6]], rtol=1e-6)
    np.testing.assert_allclose(depth, [10], rtol=1e-6)


def test_projection_inverts_the_ray():
    rng = np.random.default_rng(0)
    pixels = rng.uniform(0, 90, (500, 2))
    depth = rng.uniform(0.5, 60, 500)
    rays = np.c_[pixels, np.ones(500)] @ np.linalg.inv(matrix()).T * depth[:, None]
    seen_from = np.linalg.inv(turned(70))
    points = rays @ seen_from[:3, :3].T + seen_from[:3, 3]
    got, got_depth = project(camera(extrinsic=turned(70)), points)
    np.testing.assert_allclose(got, pixels, atol=1e-9)
    np.testing.assert_allclose(got_depth, depth, atol=1e-12)


def test_what_is_behind_has_no_pixel():
    pixels, depth = project(camera(), np.array([[0, 0.7, 0], [0, -5, 0], [0, 5, 0.0]]))
    assert np.isnan(pixels[:2]).all()
    assert np.isfinite(pixels[2]).all()
    np.testing.assert_allclose(depth, [0, -5.7, 4.3])
    with pytest.raises(InputError, match=r"points must be \[N, 3 or more\], not \[3\]"):
        project(camera(), np.zeros(3))


def test_cameras_in_the_wanted_order():
    cameras = [camera(name) for name in reversed(CAMERA_NAMES)]
    assert tuple(found.name for found in order_cameras(cameras)) == CAMERA_NAMES
    with pytest.raises(
        InputError, match=r"no camera CAM_BACK, CAM_BACK_LEFT; .* CAM_BACK_RIGHT: add"
    ):
        order_cameras([*cameras[:1], *cameras[3:]][::-1], CAMERA_NAMES)
    with pytest.raises(InputError, match="the frame has no cameras"):
        order_cameras([])


@pytest.mark.parametrize(
    ("size", "network", "expected"),
    [
        ((1600, 900), (256, 704), [[0.48, 0, -32], [0, 0.48, -176]]),
        ((1920, 1080), (256, 704), [[0.4, 0, -32], [0, 0.4, -176]]),
        ((800, 450), (96, 256), [[279 / 800, 0, -11], [0, 157 / 450, -61]]),
        ((1242, 375), (256, 704), [[768 / 1242, 0, -32], [0, 232 / 375, 24]]),  # rows are added
    ],
)
def test_mapping_of_pixels(size, network, expected):
    inputs = prepare_cameras([camera(size=size, intrinsics=matrix(size[0], size[0]))], network)
    assert inputs.images.shape == (1, 3, *network)
    np.testing.assert_allclose(inputs.image_aug[0].numpy(), [*expected, [0, 0, 1]], atol=1e-12)


def test_the_picture_follows_the_mapping():
    image = np.zeros((450, 800, 3), np.uint8)
    spots = [(301.0, 250.0), (644.0, 301.0), (121.0, 411.0)]
    for u, v in spots:
        image[int(v) - 6 : int(v) + 6, int(u) - 6 : int(u) + 6] = 255  # its middle is (u, v)
    inputs = prepare_cameras([camera(image=image)], (96, 256))
    light = inputs.images[0, 0] - inputs.images[0, 0].min()
    rows, columns = torch.meshgrid(torch.arange(96) + 0.5, torch.arange(256) + 0.5, indexing="ij")
    for u, v in spots:
        x, y, _ = (inputs.image_aug[0] @ torch.tensor([u, v, 1], dtype=torch.float64)).tolist()
        near = light * ((columns - x).abs() < 8) * ((rows - y).abs() < 8)
        assert near.sum() > 1
        assert float((near * columns).sum() / near.sum()) == pytest.approx(x, abs=0.05)
        assert float((near * rows).sum() / near.sum()) == pytest.approx(y, abs=0.05)


def test_the_pixels_of_mit_bevfusions_test_pipeline():
    """Factor 0.48, then the window (32, 176, 736, 432): written out as for 1600x900."""
    image = np.random.default_rng(4).integers(0, 256, (900, 1600, 3), np.uint8)
    picture = Image.fromarray(image).resize((768, 432)).crop((32, 176, 736, 432))
    expected = np.asarray(picture).transpose(2, 0, 1) / 255
    expected = (expected - np.c_[[0.485, 0.456, 0.406]][..., None]) / np.c_[[0.229, 0.224, 0.225]][
        ..., None
    ]
    inputs = prepare_cameras([camera(image=image, intrinsics=matrix(1266.0, 1266, 816, 491))])
    np.testing.assert_allclose(inputs.images[0].numpy(), expected, atol=1e-5)


def test_normalisation_and_channel_order():
    image = np.zeros((90, 160, 3), np.uint8)
    image[:] = [255, 0, 51]
    inputs = prepare_cameras([camera(image=image)], (32, 88))
    expected = [(1 - 0.485) / 0.229, -0.456 / 0.224, (0.2 - 0.406) / 0.225]
    np.testing.assert_allclose(inputs.images[0].mean((1, 2)), expected, rtol=1e-5)
    assert inputs.images.dtype == torch.float32
    assert inputs.image_aug.dtype == torch.float64
    assert inputs.images.is_contiguous()


def test_cameras_of_several_sizes_keep_their_own_mapping():
    cameras = [camera(size=(160, 90)), camera("CAM_BACK", (320, 180), matrix(cx=150))]
    inputs = prepare_cameras(cameras, (32, 88))
    assert inputs.images.shape == (2, 3, 32, 88)
    assert inputs.image_aug[0, 0, 0] == 2 * inputs.image_aug[1, 0, 0]
    np.testing.assert_array_equal(inputs.intrinsics[1].numpy(), cameras[1].intrinsics)
    np.testing.assert_array_equal(inputs.lidar_to_camera[0].numpy(), AHEAD)
    with pytest.raises(InputError, match="no cameras"):
        prepare_cameras([])
    with pytest.raises(InputError, match=r"image_size \(0, 88\)"):
        prepare_cameras(cameras, (0, 88))


@pytest.mark.parametrize("as_tensor", [False, True])
def test_depth_images_equal_a_loop_over_points(as_tensor):
    rng = np.random.default_rng(1)
    points = rng.uniform(-15, 15, (4000, 5)).astype(np.float32)
    points[:, 2] /= 4
    cameras = [
        camera(),
        camera("CAM_BACK", extrinsic=turned(180)),
        camera("X", extrinsic=turned(80)),
    ]
    inputs = prepare_cameras(cameras, (32, 88))
    expected = np.zeros((3, 1, 32, 88), np.float32)
    for k, each in enumerate(cameras):
        pixels, depth = project(each, points)
        for (u, v), z in zip(pixels, depth, strict=True):
            if z <= 0:
                continue
            x, y, _ = inputs.image_aug[k].numpy() @ [u, v, 1]
            column, row = int(np.floor(x)), int(np.floor(y))
            if 0 <= column < 88 and 0 <= row < 32:
                before = expected[k, 0, row, column]
                expected[k, 0, row, column] = z if before == 0 else min(before, z)
    got = depth_images(torch.from_numpy(points) if as_tensor else points, inputs, (32, 88))
    assert got.dtype == torch.float32
    assert (expected > 0).sum() > 600
    np.testing.assert_allclose(got.numpy(), expected, rtol=1e-6)


def test_depth_does_not_depend_on_the_order_of_points():
    points = np.random.default_rng(2).uniform(-9, 9, (20000, 3))
    inputs = prepare_cameras([camera()], (32, 88))
    torch.testing.assert_close(
        depth_images(points, inputs), depth_images(points[::-1].copy(), inputs), rtol=0, atol=0
    )
    assert not depth_images(points[:0], inputs).any()
    with pytest.raises(InputError, match=r"points must be \[N, 3 or more\]"):
        depth_images(points[:, :2], inputs)


SCALED = AHEAD.copy()
SCALED[:3, :3] *= 1.01
MIRRORED = AHEAD.copy()
MIRRORED[0, 0] = -1


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"image": np.zeros((90, 160), np.uint8)}, r"CAM_FRONT: image must be uint8 .*\[90, 160\]"),
        ({"image": np.zeros((90, 160, 4), np.uint8)}, r"\[90, 160, 4\]"),
        ({"image": np.zeros((90, 160, 3), np.float32)}, "not float32"),
        ({"image": np.zeros((0, 160, 3), np.uint8)}, r"\[0, 160, 3\]"),
        ({"intrinsics": np.eye(4)}, r"intrinsics must be float64 \[3, 3\], not float64 \[4, 4\]"),
        ({"intrinsics": matrix().astype(np.float32)}, "not float32"),
        ({"intrinsics": np.full((3, 3), np.nan)}, "intrinsics holds NaN or Inf; the calibration"),
        ({"intrinsics": np.zeros((3, 3))}, "singular.*never filled in"),
        ({"intrinsics": matrix(fx=0)}, "singular.*never filled in"),
        ({"intrinsics": matrix().T.copy()}, "intrinsics must be .*fx, skew, cx"),
        ({"intrinsics": matrix(0.75, 1.3, 0.5, 0.5)}, "do not fit an image of 160x90.*normalised"),
        ({"intrinsics": matrix(0.004, 0.004, 0.003, 0.002)}, "divide metres or millimetres"),
        ({"intrinsics": matrix(120e3, 118e3)}, "do not fit"),
        ({"intrinsics": matrix(-120)}, "fx -120"),
        ({"intrinsics": matrix(cx=816, cy=491)}, r"\(816, 491\) lies outside .*another image size"),
        ({"extrinsic": np.eye(3)}, r"lidar_to_camera must be float64 \[4, 4\]"),
        ({"extrinsic": np.full((4, 4), np.inf)}, "lidar_to_camera holds NaN or Inf"),
        ({"extrinsic": np.zeros((4, 4))}, "last row of lidar_to_camera"),
        ({"extrinsic": AHEAD.T.copy()}, "may be transposed"),
        ({"extrinsic": SCALED}, "not rigid.*determinant 1.03"),
        ({"extrinsic": MIRRORED}, "mirrors"),
        ({"extrinsic": np.diag([0.0, 0, 0, 1])}, "not rigid.*determinant 0"),
    ],
)
def test_impossible_cameras(change, message):
    with pytest.raises(InputError, match=message):
        camera(**change)
