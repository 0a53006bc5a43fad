"""A whole street from a seed: where everything stands and how it moves."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

from bev_scenes._frontage import backdrop, houses, park_trees, sidewalk_things
from bev_scenes._ground import Ground, make_ground
from bev_scenes._solids import SceneObject
from bev_scenes._traffic import LANE, driving, parked, people, roadworks

__all__ = ["EgoPath", "Street", "build_street"]


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


def build_street(seed: int = 0) -> Street:
    """A street with buildings, a park, a crossing, traffic and people; the same seed, the same one.

    Args:
        seed: not negative.
    """
    rng = np.random.Generator(np.random.PCG64(np.random.SeedSequence([seed, 1])))
    ground = make_ground(rng)
    ego = EgoPath(
        x=LANE + float(rng.uniform(-0.2, 0.2)),
        y=0.0,
        yaw=math.pi / 2 + float(rng.uniform(-0.03, 0.03)),
        speed=float(rng.uniform(4.0, 9.0)),
        yaw_rate=float(rng.uniform(-0.06, 0.06)),
    )
    park = 1 if rng.random() < 0.5 else -1
    objects = [
        *parked(rng, ground),
        *driving(rng, ground, ego.y),
        *people(rng, ground),
        *roadworks(rng, ground),
        *houses(rng, ground, park),
        *sidewalk_things(rng, ground),
        *park_trees(rng, ground, park),
        *backdrop(rng, ground),
    ]
    return Street(ground, tuple(objects), ego)
