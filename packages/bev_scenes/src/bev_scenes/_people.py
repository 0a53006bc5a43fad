"""Pedestrians and riders: legs, torso, arms and a head."""

from __future__ import annotations

from bev_scenes._solids import STILL, Material, Pair, Rng, SceneObject, Shape, Solid

_TUBE, _BALL = Shape.CYLINDER, Shape.ELLIPSOID


def pedestrian(rng: Rng, x: float, y: float, yaw: float, velocity: Pair = STILL) -> SceneObject:
    """A person on foot, in mid-stride where moving."""
    height = float(rng.uniform(1.55, 1.9))
    stride = float(rng.uniform(0.08, 0.24)) if velocity != STILL else 0.02
    trousers, shirt = float(rng.uniform(0.4, 1.3)), float(rng.uniform(0.5, 2.2))
    leg, hip = 0.47 * height, 0.09
    torso = height - leg - 0.25
    cloth = Material.CLOTH
    knee, shoulder = 0.52 * leg, leg + 0.97 * torso
    limbs = tuple(
        Solid(
            _TUBE, (swing * stride, side, (low + high) / 2), (wide, wide, high - low), cloth, gain=g
        )
        for way in (-1, 1)
        for side, swing, low, high, wide, g in (
            (-way * hip, 0.95 * way, 0.0, knee, 0.13, trousers),
            (-way * hip, 0.35 * way, knee, leg, 0.16, trousers),
            (way * 0.235, 0.25 * way, shoulder - 0.33, shoulder, 0.11, shirt),
            (way * 0.235, 0.7 * way, shoulder - 0.6, shoulder - 0.3, 0.09, shirt),
        )
    )
    solids = (
        *limbs,
        Solid(_TUBE, (0, 0, leg + torso / 2), (0.24, 0.40, torso), cloth, gain=shirt),
        Solid(_TUBE, (0, 0, leg + torso + 0.03), (0.1, 0.1, 0.12), Material.SKIN),
        Solid(_BALL, (0, 0, height - 0.14), (0.22, 0.18, 0.26), Material.SKIN),
        Solid(_BALL, (-0.03, 0, height - 0.09), (0.22, 0.2, 0.18), Material.PLASTIC, gain=0.4),
    )
    return SceneObject("pedestrian", x, y, yaw, (0.7, 0.65, height), solids, velocity, True)


def rider_solids(rng: Rng, saddle: float) -> tuple[Solid, ...]:
    """The rider of a two-wheeler, seated `saddle` metres above the ground."""
    shirt = float(rng.uniform(0.6, 2.2))
    return (
        Solid(_TUBE, (0.1, -0.13, saddle - 0.3), (0.2, 0.15, 0.6), Material.CLOTH, gain=0.7),
        Solid(_TUBE, (-0.05, 0.13, saddle - 0.25), (0.2, 0.15, 0.6), Material.CLOTH, gain=0.7),
        Solid(_TUBE, (0.0, 0.0, saddle + 0.3), (0.34, 0.42, 0.6), Material.CLOTH, gain=shirt),
        Solid(_BALL, (0.12, 0.0, saddle + 0.72), (0.25, 0.2, 0.27), Material.PLASTIC),
    )
