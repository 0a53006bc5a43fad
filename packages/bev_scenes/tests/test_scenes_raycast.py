"""The ray caster against slow marches along the rays that share no code with it."""

from __future__ import annotations

import math

import numpy as np
import pytest

from bev_scenes import Material, Shape, build_street
from bev_scenes._candidates import candidates_by_column
from bev_scenes._raycast import GROUND, NOTHING, cast_rays, ground_height

FLAT = np.array([0.0, 0.0, 0.0, 6.0, 3.0, 0.0, 25.0, 4.0, 0.0])
NO_BUMPS = np.zeros((9, 9))
HIGH_UP = np.array([0.0, 0.0, 1000.0])  # the ground is out of reach
FAR = 70.0


def directions(seed, columns=16, beams=12):
    rng = np.random.default_rng(seed)
    around, up = rng.uniform(-math.pi, math.pi, columns), rng.uniform(-0.6, 0.6, beams)
    return (
        np.stack([np.cos(around), np.sin(around)], 1),
        np.stack([np.cos(up), np.sin(up)], 1),
    )


LEAN = (0.7, 0.4)


def solid(shape, centre, yaw, size, material=Material.WALL):
    away = max(math.hypot(centre[0], centre[1]) - math.hypot(size[0], size[1]) / 2, 0.0)
    return (
        np.array([shape], np.int8),
        np.array([centre], float),
        np.array([[math.cos(yaw), math.sin(yaw)]]),
        np.array([size], float) / 2,
        np.array([LEAN]),
        np.array([material], np.uint8),
        np.array([away]),
    )


def everywhere(count, columns):
    return candidates_by_column(np.zeros(count, np.int64), np.full(count, columns - 1), columns)


def inside(shape, points, centre, yaw, size):
    offset = points - centre
    c, s = math.cos(yaw), math.sin(yaw)
    x, y, z = np.moveaxis(offset, -1, 0)
    local = np.stack([x * c + y * s, y * c - x * s, z], -1) / (np.array(size) / 2)
    if shape == Shape.BOX:
        return (np.abs(local) <= 1).all(-1)
    if shape == Shape.CYLINDER:
        return ((local[..., :2] ** 2).sum(-1) <= 1) & (np.abs(local[..., 2]) <= 1)
    if shape == Shape.WHEEL:
        return ((local[..., ::2] ** 2).sum(-1) <= 1) & (np.abs(local[..., 1]) <= 1)
    if shape == Shape.TAPER:
        shrunk = 1 - np.array(LEAN) * (local[..., 2:] + 1) / 2
        return (np.abs(local[..., :2]) <= shrunk).all(-1) & (np.abs(local[..., 2]) <= 1)
    return (local**2).sum(-1) <= 1


@pytest.mark.parametrize("shape", list(Shape))
@pytest.mark.parametrize("seed", range(4))
def test_one_solid_against_a_march(shape, seed):
    rng = np.random.default_rng(100 + seed)
    centre, size = rng.uniform([-6, -6, -2], [6, 6, 2]), rng.uniform(1.0, 4.0, 3)
    centre[:2] *= 1 + 4 / np.hypot(*centre[:2])  # not around the scanner
    yaw = float(rng.uniform(-3, 3))
    azimuth, elevation = directions(seed)
    toward = math.atan2(centre[1], centre[0]) + rng.uniform(-0.4, 0.4, 8)
    azimuth[:8] = np.stack([np.cos(toward), np.sin(toward)], 1)
    distance, hit, material, _ = cast_rays(
        azimuth, elevation, everywhere(1, 16), solid(shape, centre, yaw, size), HIGH_UP, FLAT,
        NO_BUMPS, np.zeros((16, 12)), FAR,
    )  # fmt: skip
    step = 2e-3
    t = np.arange(0.0, 16.0, step)
    ray = np.stack(
        [
            azimuth[:, None, 0] * elevation[None, :, 0],
            azimuth[:, None, 1] * elevation[None, :, 0],
            np.broadcast_to(elevation[None, :, 1], (16, 12)),
        ],
        -1,
    )
    hits = 0
    for k in range(16):
        for b in range(12):
            within = inside(shape, ray[k, b] * t[:, None], centre, yaw, size)
            if within.sum() * step > 0.02:  # a march steps over grazing hits
                hits += 1
                assert hit[k, b] == 0
                assert abs(distance[k, b] - t[within.argmax()]) <= 2 * step
                assert material[k, b] == Material.WALL
            elif not within.any():
                grazing = inside(shape, ray[k, b] * t[:, None], centre, yaw, size + 0.05).any()
                assert grazing or (hit[k, b] == NOTHING and distance[k, b] == 0)
    assert hits > 5


@pytest.mark.parametrize("seed", range(3))
def test_ground_against_a_march(seed):
    ground = build_street(seed).ground
    pose = np.array([2.0, 0.0, ground.height(2.0, 0.0) + 1.84])
    azimuth, elevation = directions(seed)
    road = ground.parameters
    distance, hit, _, _ = cast_rays(
        azimuth, elevation, everywhere(1, 16), solid(Shape.BOX, (0, 0, 500), 0, (1, 1, 1)), pose,
        ground.parameters, ground.bumps, np.zeros((16, 12)), FAR,
    )  # fmt: skip
    found = 0
    for k in range(16):
        for b in range(12):
            ray = np.array([*(azimuth[k] * elevation[b, 0]), elevation[b, 1]])
            t = np.arange(0.5, FAR, 0.05)
            where = pose + t[:, None] * ray
            above = where[:, 2] - [ground_height(x, y, road, ground.bumps) for x, y, _ in where]
            if hit[k, b] == GROUND:
                found += 1
                x, y, z = pose + distance[k, b] * ray
                assert abs(z - ground.height(x, y)) < 1e-4
                assert above[t < distance[k, b] - 0.05].min(initial=1.0) > -0.01
            else:
                assert above.min() > -0.01
    assert found > 60


def test_nearest_of_several_wins_in_any_order():
    azimuth, elevation = np.array([[1.0, 0.0]]), np.array([[1.0, 0.0]])
    one = [solid(Shape.BOX, (x, 0.0, 0.0), 0.0, (1, 1, 1)) for x in (4.0, 9.0, 14.0)]
    together = tuple(np.concatenate(part) for part in zip(*one, strict=True))
    distance, hit, _, cosine = cast_rays(
        azimuth,
        elevation,
        everywhere(3, 1),
        together,
        HIGH_UP,
        FLAT,
        NO_BUMPS,
        np.zeros((1, 1)),
        FAR,
    )
    assert (distance[0, 0], hit[0, 0], cosine[0, 0]) == (3.5, 0, 1.0)


def test_foliage_lets_a_beam_in_and_some_through():
    azimuth, elevation = np.tile([[1.0, 0.0]], (64, 1)), np.array([[1.0, 0.0]])
    chance = np.linspace(0.0, 0.999, 64)[:, None]
    leaves = solid(Shape.ELLIPSOID, (10.0, 0.0, 0.0), 0.0, (2, 2, 2), Material.FOLIAGE)
    distance, hit, _, _ = cast_rays(
        azimuth, elevation, everywhere(1, 64), leaves, HIGH_UP, FLAT, NO_BUMPS, chance, FAR
    )
    assert 0.2 < (hit == 0).mean() < 0.95
    assert distance[hit == 0].min() >= 9.0
    assert distance[hit == 0].max() <= 11.0
    assert len(np.unique(distance[hit == 0])) > 10


def test_windows_return_from_behind_the_wall():
    sweep = np.linspace(-0.4, 0.4, 200)
    azimuth, elevation = np.stack([np.cos(sweep), np.sin(sweep)], 1), np.array([[1.0, 0.0]])
    house = solid(Shape.BOX, (15.0, 0.0, 1.5), 0.0, (10, 30, 6), Material.FACADE)
    distance, _, material, _ = cast_rays(
        azimuth,
        elevation,
        everywhere(1, 200),
        house,
        HIGH_UP,
        FLAT,
        NO_BUMPS,
        np.zeros((200, 1)),
        FAR,
    )
    x = distance[:, 0] * azimuth[:, 0]
    glass = material[:, 0] == Material.GLASS
    assert 0.2 < glass.mean() < 0.8
    np.testing.assert_allclose(x[~glass], 10.0)
    np.testing.assert_allclose(x[glass], 10.15)


def test_columns_wrap_around_and_stay_in_order():
    starts, members = candidates_by_column(np.array([-2, 1, 0]), np.array([1, 1, 90]), 4)
    columns = [members[starts[k] : starts[k + 1]].tolist() for k in range(4)]
    assert columns == [[0, 2], [0, 1, 2], [0, 2], [0, 2]]
