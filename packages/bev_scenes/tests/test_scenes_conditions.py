"""Weather, light and faults of a street's sensors."""

from __future__ import annotations

import math

import numpy as np
import pytest

from bev_scenes import (
    CONDITIONS,
    Conditions,
    SpinningLidar,
    build_street,
    scan_street,
    street_frame,
)

SMALL = {"beams": 32, "sweeps": 1, "azimuth_steps": 360}
DROP = 255


def scan(conditions: Conditions, seed: int = 3, **lidar: float):
    scanner = SpinningLidar(azimuth_steps=360, **lidar)
    return scan_street(build_street(seed), scanner, sweeps=1, seed=seed, conditions=conditions)


def ranges(points: np.ndarray) -> np.ndarray:
    return np.linalg.norm(points[:, :3], axis=1)


@pytest.mark.bits
@pytest.mark.parametrize("name", CONDITIONS)
def test_same_arguments_same_bits_and_only_a_clear_street_is_a_clear_one(name):
    first, again = (street_frame(3, conditions=name, cameras="tiny", **SMALL) for _ in range(2))
    clear = street_frame(3, cameras="tiny", **SMALL)
    assert first.points.tobytes() == again.points.tobytes()
    assert (first.cameras[0].image == again.cameras[0].image).all()
    points = first.points.tobytes() != clear.points.tobytes()
    pictures = (first.cameras[0].image != clear.cameras[0].image).any()
    assert points == (name in {"rain", "fog", "blocked", "hills"})  # the others need other settings
    assert pictures == (name in {"rain", "fog", "night", "hills"})
    assert first.name == ("street_3" if name == "clear" else f"street_3_{name}")


@pytest.mark.parametrize("weather", [{"rain": 60.0}, {"fog": 150.0}, {"rain": 60.0, "fog": 150.0}])
def test_light_is_lost_by_beer_and_lamberts_law(weather):
    conditions = Conditions(**weather)
    rain = 1.076 * conditions.rain**0.67 / 4342.944819  # ITU-R P.1814, from dB/km
    alpha = rain + 2.995732 / conditions.fog
    assert conditions.extinction == pytest.approx(alpha, rel=1e-6)
    clear, wet = scan(Conditions(), range_noise=0.0), scan(conditions, range_noise=0.0)
    places = {tuple(p[:3]): p[3] for p in clear.points}
    both = [(places[tuple(p[:3])], p) for p in wet.points if tuple(p[:3]) in places]
    bright = [(was, p) for was, p in both if 100 <= was < 255]
    assert len(bright) > 20
    expected = [was * math.exp(-2.0 * alpha * math.dist((0, 0, 0), p[:3])) for was, p in bright]
    np.testing.assert_allclose([p[3] for _, p in bright], expected, atol=1.01)


def test_drops_return_a_share_of_the_beams_near_the_scanner():
    conditions = Conditions(fog=60.0)
    seen = scan(conditions)
    drops = seen.materials == DROP
    assert (seen.objects[drops] == -2).all()
    distance = ranges(seen.points[drops])
    assert distance.min() > 0.9
    assert distance.max() < 15.1
    # Exponential: of the drops between 1 and 5 m, the share in the first half is that of the law,
    # for the range at which each is seen thins out the second half.
    alpha = conditions.extinction
    law = (math.exp(-alpha) - math.exp(-3 * alpha)) / (math.exp(-alpha) - math.exp(-5 * alpha))
    near = distance[distance < 5.0]
    assert len(near) > 300
    assert law < (near < 3.0).mean() < law + 0.2
    rain = scan(Conditions(rain=25.0))
    assert 0 < (rain.materials == DROP).sum() < drops.sum() / 5
    assert not (scan(Conditions()).materials == DROP).any()


def test_far_surfaces_are_lost_and_near_ones_stay():
    clear, foggy = scan(Conditions()), scan(Conditions(fog=100.0))
    surfaces = foggy.points[foggy.materials != DROP]
    was, left = (np.histogram(ranges(p), [2, 6, 30, 70])[0] for p in (clear.points, surfaces))
    share = left / was
    assert share[0] > 0.8
    assert share[0] > share[1] > share[2]
    assert share[2] < 0.5


def test_blocked_beams_return_nothing_in_any_turn():
    lidar = SpinningLidar(beams=20, azimuth_steps=180, range_noise=0.0)
    street = build_street(1)
    seen = scan_street(street, lidar, sweeps=1, seed=1, conditions=Conditions(blocked=0.25))
    elevation = np.degrees(np.arcsin(seen.points[:, 2] / ranges(seen.points)))
    beams = np.linspace(*lidar.elevation, lidar.beams)
    own = np.abs(elevation[:, None] - beams).argmin(1)
    clear = scan_street(street, lidar, sweeps=1, seed=1)
    every = np.abs(
        np.degrees(np.arcsin(clear.points[:, 2] / ranges(clear.points)))[:, None] - beams
    ).argmin(1)
    assert set(own) < set(every)
    assert len(set(every) - set(own)) in range(1, 6)  # of 5 blocked ones, those that hit anything


def test_pose_error_moves_earlier_turns_rigidly():
    street, lidar = build_street(2), SpinningLidar(beams=16, azimuth_steps=120)
    wrong = Conditions(pose_error=0.2)
    ours, clear = (
        scan_street(street, lidar, sweeps=2, seed=2, conditions=c) for c in (wrong, Conditions())
    )
    newest = clear.points[:, 4] == 0
    assert (ours.points[newest] == clear.points[newest]).all()
    a, b = clear.points[~newest, :3], ours.points[~newest, :3]
    assert 0.01 < np.abs(a - b).max() < 3.0
    assert (a[:, 2] == b[:, 2]).all()
    np.testing.assert_allclose(
        np.linalg.norm(a[1:] - a[:-1], axis=1), np.linalg.norm(b[1:] - b[:-1], axis=1), atol=1e-4
    )


def test_pictures_in_fog_lose_contrast_with_distance_and_nights_are_dark():
    clear, fog, night = (
        street_frame(3, cameras="tiny", conditions=c, **SMALL).cameras[0].image.astype(float)
        for c in ("clear", "fog", "night")
    )
    assert night.mean() < 0.3 * clear.mean()
    far, near = slice(60, 100), slice(150, 180)  # rows at the horizon and of the road nearby
    assert fog[far].std() < 0.5 * clear[far].std()
    assert fog[near].std() > 0.5 * fog[far].std()


def test_beams_and_slopes():
    assert len(street_frame(3, size="tiny", conditions="beams16").points) < 0.6 * len(
        street_frame(3, size="tiny").points
    )
    steep, even = build_street(4, slopes=5.0).ground, build_street(4).ground
    assert steep.slope_y == 5.0 * even.slope_y
    assert abs(steep.slope_y) <= 0.075


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"rain": -1.0}, "rain=-1.0"),
        ({"fog": 1.0}, "range of 5 m"),
        ({"blocked": 1.0}, "blocked=1.0"),
        ({"pose_error": math.nan}, "pose_error=nan"),
        ({"slopes": 9.0}, "slopes=9.0"),
        ({"rain": math.nan}, "rain=nan"),
    ],
)
def test_conditions_that_cannot_be_are_refused(settings, message):
    with pytest.raises(ValueError, match=message):
        Conditions(**settings)


def test_an_unknown_name_lists_the_known_ones():
    with pytest.raises(ValueError, match="conditions='snow': unknown; expected one of clear, rain"):
        street_frame(conditions="snow")
