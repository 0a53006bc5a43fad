"""A whole street from a seed: where everything stands and how it moves."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

from bev_scenes import _surroundings as things
from bev_scenes._ground import Ground, make_ground
from bev_scenes._solids import SceneObject, unit
from bev_scenes._vehicles import (
    bus,
    car,
    cyclist,
    excavator,
    motorcycle,
    pedestrian,
    trailer,
    truck,
)

_REACH = 78.0  # half the length of the street [m]
_LANE = 2.0  # middle of a lane, from the middle of the street [m]
_UP, _DOWN = math.pi / 2, -math.pi / 2  # headings along +y and −y


@dataclass(frozen=True)
class EgoPath:
    """How the vehicle with the scanner moves: an arc of constant speed.

    Args:
        x: position at time 0 in the world [m].
        y: position at time 0 in the world [m].
        yaw: heading at time 0, counter-clockwise from the world's +x [rad].
        speed: forward [m/s].
        yaw_rate: [rad/s].
    """

    x: float
    y: float
    yaw: float
    speed: float
    yaw_rate: float

    def at(self, time: float) -> tuple[float, float, float]:
        """Position x, y [m] and heading [rad] at `time` [s]; the chord stands for a short arc."""
        middle = self.yaw + 0.5 * self.yaw_rate * time
        way = self.speed * time
        x = self.x + round(way * math.cos(middle), 9)
        y = self.y + round(way * math.sin(middle), 9)
        return x, y, self.yaw + self.yaw_rate * time


@dataclass(frozen=True, eq=False)
class Street:
    """A scene: ground, objects and the path of the scanner's vehicle.

    The world has x across the street, y along it and z up; traffic keeps to the right, so the
    lane at positive x leads to +y.
    """

    ground: Ground
    objects: tuple[SceneObject, ...]
    ego: EgoPath


def build_street(seed: int = 0, slopes: float = 1.0) -> Street:
    """A street with buildings, a park, a crossing, traffic and people; the same seed, the same one.

    Args:
        seed: not negative.
        slopes: factor of the ground's slopes, up to 8; see `Conditions`.
    """
    rng = np.random.Generator(np.random.PCG64(np.random.SeedSequence([seed, 1])))
    ground = make_ground(rng, slopes)
    ego = EgoPath(
        x=_LANE + float(rng.uniform(-0.2, 0.2)),
        y=0.0,
        yaw=math.pi / 2 + float(rng.uniform(-0.03, 0.03)),
        speed=float(rng.uniform(4.0, 9.0)),
        yaw_rate=float(rng.uniform(-0.06, 0.06)),
    )
    park = 1 if rng.random() < 0.5 else -1
    objects = [
        *_parked(rng, ground),
        *_driving(rng, ground, ego.y),
        *_people(rng, ground),
        *_roadworks(rng, ground),
        *houses(rng, ground, park),
        *sidewalk_things(rng, ground),
        *park_trees(rng, ground, park),
        *backdrop(rng, ground),
    ]
    return Street(ground, tuple(objects), ego)


def houses(rng: np.random.Generator, ground: Ground, park: int) -> list[SceneObject]:
    """Rows of houses on both sides and along the side street; none in the park."""
    found: list[SceneObject] = []
    edge = ground.half_width + ground.sidewalk
    for side, yaw in ((1, _DOWN), (-1, _UP)):  # fronts towards the street
        y = -_REACH
        while y < _REACH:
            length, depth = float(rng.uniform(8, 17)), float(rng.uniform(9, 14))
            setback = float(rng.choice([0.3, 0.6, 3.5]))
            middle = y + length / 2
            if ground.at_crossing(middle, 2.5 + length / 2):
                y += 2.0
                continue
            if not (side == park and -30.0 < middle < 12.0):
                x = side * (edge + setback + depth / 2)
                found.append(things.building(rng, x, middle, yaw, length, depth))
                if setback > 3.0:
                    front = side * (edge + 0.6)
                    found.append(things.hedge(rng, front, middle, _UP, length - 2.0))
            y += length + float(rng.choice([0.0, 0.0, 1.5, 4.0]))
    for side in (1, -1):
        for across in (1, -1):
            x = edge + 20.0
            while x < _REACH:
                length, depth = float(rng.uniform(9, 16)), float(rng.uniform(8, 11))
                y = ground.side_y + across * (ground.side_half_width + 3.6 + depth / 2)
                yaw = 0.0 if across > 0 else math.pi
                found.append(things.building(rng, side * (x + length / 2), y, yaw, length, depth))
                x += length + float(rng.choice([0.0, 2.0]))
    return found


def backdrop(rng: np.random.Generator, ground: Ground) -> list[SceneObject]:
    """Objects beyond the LiDAR's reach, for the cameras: more houses, trees at the horizon."""
    found: list[SceneObject] = []
    edge = ground.half_width + ground.sidewalk
    for end in (1, -1):
        for side, yaw in ((1, _DOWN), (-1, _UP)):
            way = _REACH + 12.0
            while way < 210.0:
                length, depth = float(rng.uniform(9, 18)), float(rng.uniform(9, 14))
                x, y = side * (edge + 1.0 + depth / 2), end * (way + length / 2)
                found.append(things.building(rng, x, y, yaw, length, depth))
                way += length + float(rng.choice([0.0, 2.0, 5.0]))
    for _ in range(70):
        (c, s), away = unit(float(rng.uniform(0.0, 2 * math.pi))), float(rng.uniform(95, 230))
        if abs(c * away) > edge + 18.0 and abs(s * away - ground.side_y) > 16.0:
            found.append(things.tree(rng, c * away, s * away))
    return found


def sidewalk_things(rng: np.random.Generator, ground: Ground) -> list[SceneObject]:
    """Street trees, lamps and signs along the curbs, signals at the crossing."""
    found: list[SceneObject] = []
    for side in (1, -1):
        x = side * (ground.half_width + 0.55)
        inward = math.pi if side > 0 else 0.0
        y = -_REACH + float(rng.uniform(0, 6))
        turn = 0
        while y < _REACH:
            if not ground.at_crossing(y, 3.0):
                kind = rng.random()
                if turn % 3 == 2:
                    found.append(things.lamp(x, y, inward))
                elif kind < 0.65:
                    found.append(things.tree(rng, x, y))
                elif kind < 0.8:
                    found.append(things.sign(x, y, _DOWN if side > 0 else _UP))
            turn += 1
            y += float(rng.uniform(5.5, 8.5))
        corner = ground.side_half_width + 1.0
        found.append(things.traffic_light(x, ground.side_y - corner, _DOWN))
        found.append(things.traffic_light(x, ground.side_y + corner, _UP))
    return found


def park_trees(rng: np.random.Generator, ground: Ground, side: int) -> list[SceneObject]:
    """Trees and bushes behind a fence where the row of houses leaves off."""
    edge = ground.half_width + ground.sidewalk
    found: list[SceneObject] = [things.fence(side * (edge + 0.3), -9.0, _UP, 38.0)]
    for _ in range(16):
        x = side * (edge + float(rng.uniform(4.0, 38.0)))
        found.append(things.tree(rng, x, float(rng.uniform(-30.0, 10.0))))
    for _ in range(6):
        x = side * (edge + float(rng.uniform(3.0, 30.0)))
        found.append(
            things.hedge(rng, x, float(rng.uniform(-28.0, 9.0)), float(rng.uniform(0, 3)), 4.0)
        )
    return found


def _parked(rng: np.random.Generator, ground: Ground) -> list[SceneObject]:
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


def _driving(rng: np.random.Generator, ground: Ground, ego_y: float) -> list[SceneObject]:
    """Vehicles on both lanes, clear of the scanner's own, and some in the side street."""
    found: list[SceneObject] = []
    for lane, heading, sign in ((_LANE, _UP, 1), (-_LANE, _DOWN, -1)):
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


def _people(rng: np.random.Generator, ground: Ground) -> list[SceneObject]:
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


def _roadworks(rng: np.random.Generator, ground: Ground) -> list[SceneObject]:
    """Cones and barriers beside the lane beyond the side street, often an excavator behind them."""
    x = -(ground.half_width - 2.4)
    start = ground.side_y + ground.side_half_width + 6.0
    cones = [things.traffic_cone(x + 0.15 * k, start + 2.2 * k) for k in range(5)]
    walls = [
        things.barrier(x - 0.6, start + 1.5 + 2.2 * k, float(rng.uniform(-0.05, 0.05)))
        for k in range(3)
    ]
    if rng.random() < 0.35:
        return [*cones, *walls]
    place = -(ground.half_width - 1.3)
    return [
        *cones,
        *walls,
        excavator(rng, place, start + 11.3, _UP + float(rng.uniform(-0.1, 0.1))),
    ]
