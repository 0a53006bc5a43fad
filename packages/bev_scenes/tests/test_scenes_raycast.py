"""Returns of a scanner against slow marches along its rays that share no code with it."""

from __future__ import annotations

import itertools
import math

import numpy as np
import pytest

from bev_scenes import (
    EgoPath,
    Ground,
    Material,
    SceneObject,
    Shape,
    Solid,
    SpinningLidar,
    Street,
    build_street,
    scan_street,
)

FLAT = Ground(0.0, 0.0, 0.0, 6.0, 3.0, 0.0, 25.0, 4.0, np.zeros((91, 91)))
HIGH_UP = 1000.0  # of the scanner and what it sees: the ground is out of reach
LEAN = (0.7, 0.4)
SIZES = {"azimuth_steps": 144, "beams": 25, "elevation": (-36.0, 36.0)}
ROUNDED = 1e-3  # ranges come in steps of 2 mm


def thing(shape, centre, size, material=Material.RETROREFLECTOR, yaw=0.0):
    """One solid, its centre from the scanner; a retroreflector loses no beam."""
    x, y, z = centre
    solid = Solid(shape, (0.0, 0.0, HIGH_UP + z), tuple(size), material, taper=LEAN)
    return SceneObject("thing", x, y, yaw, (1.0, 1.0, 1.0), (solid,))


def scanned(*things, ground=FLAT, height=HIGH_UP, seed=0, **settings):
    """One turn without noise; x, y, z of a return are the world's, from the scanner."""
    lidar = SpinningLidar(height=height, range_noise=0.0, **settings)
    street = Street(ground, things, EgoPath(0.0, 0.0, math.pi / 2, 0.0, 0.0))
    return scan_street(street, lidar, sweeps=1, seed=seed)


def rays_of(found, azimuth_steps, beams, elevation):
    """Azimuth of every column, elevation of every beam, and the range of each ray; 0 for none."""
    x, y, z = found.points[:, :3].T.astype(float)
    angle, step = np.arctan2(y, x), 2 * math.pi / azimuth_steps
    phase = np.angle(np.exp(1j * angle * azimuth_steps).mean()) / azimuth_steps
    up = np.radians(np.linspace(*elevation, beams))
    column = np.round((angle - phase) / step).astype(int) % azimuth_steps
    beam = np.abs(np.arctan2(z, np.hypot(x, y))[:, None] - up).argmin(1)
    distance = np.zeros((azimuth_steps, beams))
    distance[column, beam] = np.sqrt(x * x + y * y + z * z)
    assert (distance > 0).sum() == len(x)
    return phase + step * np.arange(azimuth_steps), up, distance


def along(around, up):
    """Unit vectors ``[columns, beams, 3]``."""
    around, up = around[:, None], up[None]
    flat = np.broadcast_to(np.sin(up), (len(around), up.shape[1]))
    return np.stack([np.cos(around) * np.cos(up), np.sin(around) * np.cos(up), flat], -1)


def away_from(around, toward):
    """Angle between columns and a direction."""
    return np.abs((around - toward + math.pi) % (2 * math.pi) - math.pi)


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
    found = scanned(thing(shape, centre, size, yaw=yaw), seed=seed, **SIZES)
    assert not found.objects.any()
    assert (found.materials == Material.RETROREFLECTOR).all()

    around, up, distance = rays_of(found, **SIZES)
    reach, radius = np.hypot(*centre[:2]), np.linalg.norm(size) / 2
    near = away_from(around, math.atan2(*centre[1::-1])) < math.asin(radius / reach) + 0.05
    assert not distance[~near].any()
    ray, distance = along(around[near], up).reshape(-1, 3), distance[near].reshape(-1)
    step, length = 4e-3, np.linalg.norm(centre)
    t = np.arange(length - radius - 0.1, length + radius + 0.1, step)
    places = ray[:, None] * t[:, None]
    within = inside(shape, places, centre, yaw, size)
    struck = within.sum(1) * step > 0.02  # a march steps over grazing hits
    assert struck.sum() > 5
    assert np.abs(distance - t[within.argmax(1)])[struck].max() <= 2 * step
    missed = ~within.any(1)
    grazed = inside(shape, places[missed], centre, yaw, size + 0.05).any(1)
    assert not distance[missed][~grazed].any()


@pytest.mark.parametrize("seed", range(3))
def test_ground_against_a_march(seed):
    ground = build_street(seed).ground
    sizes = {"azimuth_steps": 36, "beams": 24, "elevation": (-20.0, 1.0)}
    far_up = thing(Shape.BOX, (0.0, 0.0, 0.0), (1.0, 1.0, 1.0))
    found = scanned(far_up, ground=ground, height=1.84, seed=seed, **sizes)
    assert (found.objects == -1).all()
    assert len(found.points) > 150
    around, up, distance = rays_of(found, **sizes)
    eye = np.array([0.0, 0.0, ground.height(0.0, 0.0) + 1.84])
    lost = []
    for ray, reached in zip(along(around, up).reshape(-1, 3), distance.reshape(-1), strict=True):

        def above(t, ray=ray):
            return [z - ground.height(x, y) for x, y, z in eye + np.reshape(t, (-1, 1)) * ray]

        if reached:
            before, behind = above([reached - 1.1 * ROUNDED, reached + 1.1 * ROUNDED])
            assert before > -1e-4
            assert behind < 1e-4
            assert min(above(np.arange(0.5, reached - 0.05, 0.1)), default=1) > -0.01
        else:
            lost.append(min(above(np.arange(0.5, 15.0, 0.1))) < -0.01)
    assert sum(lost) < 0.1 * len(found.points)  # asphalt swallows one beam in fifty, grass more


@pytest.mark.parametrize("order", list(itertools.permutations((4.0, 9.0, 14.0))))
def test_nearest_of_several_wins_in_any_order(order):
    boxes = [thing(Shape.BOX, (x, 0.0, 0.0), (1.0, 1.0, 1.0)) for x in order]
    found = scanned(*boxes, **SIZES)
    assert set(found.objects.tolist()) == {order.index(4.0)}
    np.testing.assert_allclose(found.points[:, 0], 3.5, atol=2 * ROUNDED)


def test_a_small_box_before_a_wall_that_comes_nearer_at_its_ends():
    wall = thing(Shape.BOX, (10.0, 0.0, 0.0), (1.0, 14.0, 3.0))
    box = thing(Shape.BOX, (9.0, 0.0, 0.0), (0.5, 0.5, 0.5))
    found = scanned(wall, box, azimuth_steps=720, beams=21, elevation=(-5.0, 5.0))
    across = np.abs(found.points[:, 1:3] / found.points[:, :1]).max(1)
    edge = 0.25 / 8.75
    assert (across < edge).sum() > 1
    assert found.objects[across < edge - 1e-3].all()
    assert not found.objects[across > edge + 1e-3].any()


@pytest.mark.parametrize("turn", [0.0, 0.5, 1.0])
def test_a_surface_sends_back_by_the_angle_that_it_is_met_at(turn):
    centre = np.array([6.0, 8.0, 0.0])
    turn += math.atan2(8.0, 6.0)
    wall = thing(Shape.BOX, centre, (0.2, 6.0, 6.0), Material.WALL, yaw=turn)
    found = scanned(wall, azimuth_steps=720, beams=33, elevation=(-10.0, 10.0))
    points = found.points[:, :3].astype(float)
    normal = np.array([math.cos(turn), math.sin(turn), 0.0])
    front = np.abs((points - centre) @ normal + 0.1) < 5 * ROUNDED
    cosine = np.abs(points @ normal) / np.linalg.norm(points, axis=1)
    expected = 255 * 0.26 * (0.35 + 0.65 * cosine)
    assert front.sum() > 500
    assert abs((found.points[:, 3] / expected)[front].mean() - 1) < 0.04  # one in five flickers


def test_foliage_lets_a_beam_in_and_some_through():
    leaves = thing(Shape.ELLIPSOID, (10.0, 0.0, 0.0), (2.0, 2.0, 2.0), Material.FOLIAGE)
    sizes = {"azimuth_steps": 720, "beams": 9, "elevation": (-2.0, 2.0)}
    around, _, distance = rays_of(scanned(leaves, **sizes), **sizes)
    middle = distance[away_from(around, 0.0) < 0.05]
    assert 0.2 < (middle > 0).mean() < 0.95
    reached = distance[distance > 0]
    assert reached.min() >= 9.0 - ROUNDED
    assert reached.max() <= 11.0
    assert len(np.unique(reached.round(3))) > 10


def test_windows_return_from_behind_the_wall():
    house = thing(Shape.BOX, (15.0, 0.0, 1.5), (10.0, 30.0, 6.0), Material.FACADE)
    found = scanned(house, azimuth_steps=2000, beams=1, elevation=(0.0, 0.0))
    front = np.abs(np.arctan2(found.points[:, 1], found.points[:, 0])) < 0.4
    x, glass = found.points[front, 0], found.materials[front] == Material.GLASS
    assert 0.1 < glass.mean() < 0.7  # half of the beams into glass are lost
    np.testing.assert_allclose(x[~glass], 10.0, atol=2 * ROUNDED)
    np.testing.assert_allclose(x[glass], 10.15, atol=2 * ROUNDED)


@pytest.mark.parametrize(
    ("centre", "size", "toward", "wide"),
    [
        ((8.0, 0.0, 0.0), (1.0, 4.0, 1.0), 0.0, math.atan(2 / 7.5)),  # across the first column
        ((-8.0, 0.0, 0.0), (1.0, 4.0, 1.0), math.pi, math.atan(2 / 7.5)),
        ((0.0, 3.0, 0.0), (20.0, 0.5, 1.0), math.pi / 2, math.atan(10 / 2.75)),  # a long wall
    ],
)
def test_every_column_of_an_object_has_its_return(centre, size, toward, wide):
    sizes = {"azimuth_steps": 180, "beams": 1, "elevation": (0.0, 0.0)}
    for seed in range(3):
        found = scanned(thing(Shape.BOX, centre, size), seed=seed, **sizes)
        around, _, distance = rays_of(found, **sizes)
        apart = away_from(around, toward)
        assert distance[apart < wide - 1e-3].all()
        assert not distance[apart > wide + 1e-3].any()
