"""Who uses the street: parked and driving vehicles, people on foot, roadworks."""

from __future__ import annotations

import math

import numpy as np

from bev_scenes._ground import Ground
from bev_scenes._people import pedestrian
from bev_scenes._solids import SceneObject
from bev_scenes._surroundings import barrier, traffic_cone
from bev_scenes._vehicles import (
    bus,
    car,
    cyclist,
    excavator,
    motorcycle,
    trailer,
    truck,
)

__all__ = ["LANE", "driving", "parked", "people", "roadworks"]

LANE = 2.0  # middle of a lane, from the middle of the street [m]
_UP, _DOWN = math.pi / 2, -math.pi / 2  # headings along +y and −y
_REACH = 78.0  # half the length of the street [m]


def parked(rng: np.random.Generator, ground: Ground) -> list[SceneObject]:
    """Cars, vans and a trailer in the parking lanes, with gaps; bicycles where nobody parks."""
    found: list[SceneObject] = []
    for side, heading in ((1, _UP), (-1, _DOWN)):
        y = -_REACH + float(rng.uniform(0, 6))
        while y < _REACH:
            kind, step = rng.random(), float(rng.uniform(5.6, 6.6))
            x = side * (ground.half_width - 1.12 + float(rng.uniform(-0.1, 0.1)))
            yaw = heading + float(rng.uniform(-0.03, 0.03))
            works = side < 0 and 0.0 < y - ground.side_y < ground.side_half_width + 22.0
            if ground.at_crossing(y, 8.0) or works or kind < 0.3:
                pass
            elif kind < 0.88:
                found.append(car(rng, x, y, yaw))
            elif kind < 0.93:
                found.append(truck(rng, x - 0.1 * side, y + 2.0, yaw))
                step += 5.0
            elif kind < 0.96:
                found.append(trailer(rng, x, y, yaw))
            else:
                found.append(motorcycle(rng, x, y - 1.5, yaw + 0.5))
                found.append(cyclist(rng, x + 0.3, y + 1.0, yaw + 0.7))
            y += step
    return found


def driving(rng: np.random.Generator, ground: Ground, ego_y: float) -> list[SceneObject]:
    """Vehicles on both lanes, clear of the scanner's own, and some in the side street."""
    found: list[SceneObject] = []
    for lane, heading, sign in ((LANE, _UP, 1), (-LANE, _DOWN, -1)):
        y = -_REACH + float(rng.uniform(0, 14))
        big_one = float(rng.uniform(-50, 50))
        while y < _REACH:
            speed = sign * float(rng.uniform(4.0, 10.0))
            clear = lane < 0 or abs(y - ego_y) > 14.0
            clear = clear and abs(y - ground.zebra_y) > 10.0  # people are crossing
            if clear and rng.random() < 0.55:
                x = lane + float(rng.uniform(-0.2, 0.2))
                kind = rng.random()
                if abs(y - big_one) < 10.0:
                    maker = bus if lane < 0 else truck
                    found.append(maker(rng, x, y, heading, (0.0, speed)))
                    y += 8.0
                elif kind < 0.74:
                    found.append(car(rng, x, y, heading, (0.0, speed)))
                elif kind < 0.84:
                    found.append(motorcycle(rng, x, y, heading, (0.0, speed)))
                else:
                    found.append(cyclist(rng, x + 0.9 * sign, y, heading, (0.0, sign * 4.5)))
            y += float(rng.uniform(11.0, 20.0))
    for x in (-38.0, -22.0, 18.0, 33.0):
        right = -1 if x < 0 else 1  # traffic towards the crossing keeps right
        if rng.random() < 0.7:
            lane = ground.side_y + right * 1.8
            found.append(
                car(rng, x + float(rng.uniform(-4, 4)), lane, math.pi if right > 0 else 0.0)
            )
    return found


def people(rng: np.random.Generator, ground: Ground) -> list[SceneObject]:
    """Walkers on the sidewalks, a group that stands, some on the zebra crossing."""
    found: list[SceneObject] = []
    for side in (1, -1):
        y = -60.0 + float(rng.uniform(0, 8))
        while y < 62.0:
            walk = float(rng.uniform(0.45, 0.8)) * ground.sidewalk
            x = side * (ground.half_width + walk)
            heading = _UP if rng.random() < 0.5 else _DOWN
            speed = float(rng.uniform(0.9, 1.6)) * (1 if heading > 0 else -1)
            if not ground.at_crossing(y, 6.0):
                found.append(pedestrian(rng, x, y, heading, (0.0, speed)))
                if rng.random() < 0.3:
                    found.append(pedestrian(rng, x - 0.75 * side, y + 0.3, heading, (0.0, speed)))
            y += float(rng.uniform(5.0, 16.0))
    for x in (-4.2, -1.0, 3.4):
        if rng.random() < 0.8:
            way = 1 if rng.random() < 0.5 else -1
            heading = 0.0 if way > 0 else math.pi
            y = ground.zebra_y + float(rng.uniform(-1, 1))
            found.append(pedestrian(rng, x, y, heading, (1.2 * way, 0.0)))
    return found


def roadworks(rng: np.random.Generator, ground: Ground) -> list[SceneObject]:
    """Cones and barriers beside the lane beyond the side street, often an excavator behind them."""
    x = -(ground.half_width - 2.4)
    start = ground.side_y + ground.side_half_width + 6.0
    cones = [traffic_cone(x + 0.15 * k, start + 2.2 * k) for k in range(5)]
    walls = [
        barrier(x - 0.6, start + 1.5 + 2.2 * k, float(rng.uniform(-0.05, 0.05))) for k in range(3)
    ]
    if rng.random() < 0.35:
        return [*cones, *walls]
    place = -(ground.half_width - 1.3)
    return [
        *cones,
        *walls,
        excavator(rng, place, start + 11.3, _UP + float(rng.uniform(-0.1, 0.1))),
    ]
