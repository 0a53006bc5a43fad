"""Vehicles, cyclists and people of a street."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

from bev_scenes._solids import STILL, Material, Pair, Rng, SceneObject, Shape, Solid

# Pedestrians and riders: legs, torso, arms and a head.

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


_BOX, _TAPER = Shape.BOX, Shape.TAPER


def _painted(paint: float) -> Callable[..., Solid]:
    """Solids of so light a paint: of a shape, a centre, a size and, by name, a taper."""
    return partial(Solid, material=Material.CAR_PAINT, gain=paint)


def _wheels(
    length: float, width: float, radius: float, axles: tuple[float, ...]
) -> tuple[Solid, ...]:
    size, side = (2 * radius, 0.22, 2 * radius), width / 2 - 0.11
    places = [(axle * length, way * side, radius) for axle in axles for way in (-1, 1)]
    return tuple(Solid(Shape.WHEEL, place, size, Material.RUBBER) for place in places)


def _plates(length: float, width: float, inset: float = 0.0) -> tuple[Solid, ...]:
    """Number plates and lamps; the lamps reach `inset` metres inwards of the ends."""
    plate = (0.02, 0.5, 0.11)
    lamp = (0.03 + inset, 0.28, 0.12)
    side = width / 2 - 0.25
    retro = Material.RETROREFLECTOR  # both send back far more than paint does
    # Where the ends lean back, lamps lie deeper.
    back = length / 2 - inset / 2 - (0.02 if inset else 0.0)
    return tuple(
        solid
        for way in (-1, 1)
        for solid in (
            Solid(_BOX, (way * length / 2, 0.0, 0.45), plate, retro, gain=0.5),
            Solid(_BOX, (way * back, -side, 0.7), lamp, retro, gain=0.2),
            Solid(_BOX, (way * back, side, 0.7), lamp, retro, gain=0.2),
        )
    )


def car(rng: Rng, x: float, y: float, yaw: float, velocity: Pair = STILL) -> SceneObject:
    """A passenger car: body, bonnet, cabin with glass, roof, wheels, plates."""
    length, width = float(rng.uniform(3.9, 4.9)), float(rng.uniform(1.72, 1.95))
    height = float(rng.uniform(1.42, 1.72))
    paint = float(rng.uniform(0.25, 2.0))
    estate = rng.random() < 0.45
    belt, skirt = 0.56 * height, 0.36 * height
    cabin = (0.62 if estate else 0.5) * length
    middle = (-0.15 if estate else -0.05) * length
    lean = (0.3 if estate else 0.42, 0.2)
    glass = (cabin * 1.18, width - 0.16, height - belt - 0.03)
    roof = (glass[0] * (1 - lean[0]) + 0.1, glass[1] * (1 - lean[1]) + 0.04, 0.06)
    pillar, level = (0.09, glass[1] + 0.02, glass[2]), belt + glass[2] / 2
    bonnet = (length - 0.06, width - 0.05, belt - skirt)
    painted = _painted(paint)
    solids = (
        painted(_BOX, (0, 0, (0.2 + skirt) / 2), (length - 0.04, width - 0.05, skirt - 0.2)),
        painted(_TAPER, (0, 0, (skirt + belt) / 2), bonnet, taper=(0.05, 0.06)),
        Solid(_TAPER, (middle, 0, level), glass, Material.GLASS, taper=lean),
        painted(_TAPER, (middle, 0, height - 0.03), roof, taper=(0.1, 0.1)),
        painted(_TAPER, (middle - 0.05, 0, level), pillar, taper=(0.0, lean[1])),
        *_wheels(length, width, 0.32, (-0.3, 0.31)),
        *_plates(length, width, inset=0.12),
    )
    return SceneObject("car", x, y, yaw, (length, width, height), solids, velocity, True)


def truck(rng: Rng, x: float, y: float, yaw: float, velocity: Pair = STILL) -> SceneObject:
    """A delivery truck: cab, gap, cargo box, wheels."""
    length, width = float(rng.uniform(6.5, 9.0)), float(rng.uniform(2.3, 2.5))
    height = float(rng.uniform(2.9, 3.5))
    paint = float(rng.uniform(0.6, 2.0))
    cab, front = 1.9, length / 2
    cargo = length - cab - 0.35
    load, place = (cargo, width, height - 0.95), (-front + cargo / 2, 0, (0.95 + height) / 2)
    glass, lean = (cab, width - 0.16, 0.7), (0.16, 0.08)
    painted = _painted(paint)
    solids = (
        painted(_BOX, (front - cab / 2, 0, 0.9), (cab, width - 0.15, 0.9)),
        Solid(_TAPER, (front - cab / 2, 0, 1.7), glass, Material.GLASS, taper=lean),
        painted(_BOX, (front - cab / 2 - 0.05, 0, 2.15), (0.82 * cab, width - 0.34, 0.2)),
        painted(_BOX, (front - 0.8 * cab, 0, 1.7), (0.4 * cab, width - 0.14, 0.7)),
        Solid(_BOX, place, load, Material.METAL, gain=float(rng.uniform(0.7, 1.6))),
        Solid(_BOX, (0, 0, 0.8), (length - 0.6, 0.9, 0.25), Material.METAL, gain=0.4),
        Solid(_BOX, (0.11 - front, 0, 0.6), (0.2, width - 0.1, 0.4), Material.METAL, gain=0.4),
        *_wheels(length, width, 0.46, (-0.33, 0.34)),
        *_plates(length, width),
    )
    return SceneObject("truck", x, y, yaw, (length, width, height), solids, velocity, True)


def bus(rng: Rng, x: float, y: float, yaw: float, velocity: Pair = STILL) -> SceneObject:
    """A city bus: skirt, band of windows, roof."""
    length, width, height = float(rng.uniform(11.0, 12.2)), 2.55, float(rng.uniform(3.0, 3.3))
    paint = float(rng.uniform(0.8, 1.8))
    painted = _painted(paint)
    pillars = tuple(
        painted(_BOX, (place * length, 0, 1.9), (0.16, width, 1.1))
        for place in (-0.49, -0.29, -0.1, 0.1, 0.29, 0.49)
    )
    solids = (
        painted(_BOX, (0, 0, 0.85), (length, width, 1.1)),
        Solid(_BOX, (0, 0, 1.9), (length - 0.1, width - 0.06, 1.05), Material.GLASS),
        painted(_BOX, (0, 0, (2.4 + height) / 2), (length, width, height - 2.4)),
        *pillars,
        *_wheels(length, width, 0.48, (-0.27, 0.3)),
        *_plates(length, width),
    )
    return SceneObject("bus", x, y, yaw, (length, width, height), solids, velocity, True)


def trailer(rng: Rng, x: float, y: float, yaw: float) -> SceneObject:
    """A parked box trailer on one axle."""
    length, width, height = float(rng.uniform(3.6, 5.2)), 2.1, float(rng.uniform(2.1, 2.6))
    load, place = (length - 0.8, width, height - 0.6), (0.1, 0, (0.6 + height) / 2)
    solids = (
        Solid(_BOX, place, load, Material.METAL, gain=1.3),
        Solid(_BOX, (length / 2 - 0.4, 0, 0.6), (0.9, 0.12, 0.1), Material.METAL, gain=0.5),
        *_wheels(length, width, 0.34, (-0.05,)),
    )
    return SceneObject("trailer", x, y, yaw, (length, width, height), solids, labelled=True)


def excavator(rng: Rng, x: float, y: float, yaw: float) -> SceneObject:
    """A small excavator: tracks, house with a cab, boom, arm and bucket before it."""
    high = float(rng.uniform(2.5, 2.8))
    steel, painted = Material.METAL, _painted(1.3)
    solids = (
        Solid(_BOX, (-0.4, -0.75, 0.3), (2.4, 0.4, 0.6), Material.RUBBER, gain=2.0),
        Solid(_BOX, (-0.4, 0.75, 0.3), (2.4, 0.4, 0.6), Material.RUBBER, gain=2.0),
        painted(_BOX, (-0.5, 0, 0.95), (2.2, 1.8, 0.7)),
        painted(_BOX, (-1.1, 0, 1.5), (1.0, 1.7, 0.5)),
        Solid(_TAPER, (0.1, 0.45, (1.3 + high) / 2), (1.1, 0.85, high - 1.3), Material.GLASS,
              taper=(0.15, 0.08)),
        painted(_BOX, (0.1, 0.45, high), (1.0, 0.85, 0.08)),
        painted(_TAPER, (0.95, -0.3, 1.75), (0.9, 0.28, 1.5), taper=(0.4, 0.1)),
        painted(_BOX, (1.45, -0.3, 2.35), (1.1, 0.25, 0.35)),
        Solid(_TAPER, (1.85, -0.3, 1.45), (0.35, 0.22, 1.7), steel, gain=0.6),
        Solid(_TAPER, (1.85, -0.3, 0.4), (0.7, 0.8, 0.6), steel, gain=0.5, taper=(0.4, 0.1)),
    )  # fmt: skip
    size = (4.0, 1.9, high)
    return SceneObject("construction_vehicle", x, y, yaw, size, solids, labelled=True)


def _two_wheels(length: float, radius: float, frame: float) -> tuple[Solid, ...]:
    wheel = (2 * radius, 0.05, 2 * radius)
    reach = length / 2 - radius
    return (
        Solid(Shape.WHEEL, (reach, 0, radius), wheel, Material.RUBBER, gain=1.5),
        Solid(Shape.WHEEL, (-reach, 0, radius), wheel, Material.RUBBER, gain=1.5),
        Solid(_BOX, (0, 0, radius + frame / 2), (0.9, 0.07, frame), Material.METAL),
        Solid(_BOX, (reach - 0.12, 0, radius + frame + 0.2), (0.08, 0.5, 0.06), Material.METAL),
    )


def cyclist(rng: Rng, x: float, y: float, yaw: float, velocity: Pair = STILL) -> SceneObject:
    """A bicycle, with its rider where it moves."""
    length = float(rng.uniform(1.65, 1.85))
    solids = _two_wheels(length, 0.34, 0.3)
    height = 1.1
    if velocity != STILL:
        solids += rider_solids(rng, saddle=0.9)
        height = 1.75
    return SceneObject("bicycle", x, y, yaw, (length, 0.62, height), solids, velocity, True)


def motorcycle(rng: Rng, x: float, y: float, yaw: float, velocity: Pair = STILL) -> SceneObject:
    """A motorcycle, with its rider where it moves."""
    length = float(rng.uniform(2.0, 2.25))
    solids = (
        *_two_wheels(length, 0.31, 0.35),
        Solid(_BOX, (0, 0, 0.62), (1.2, 0.34, 0.42), Material.CAR_PAINT, gain=1.2),
    )
    height = 1.15
    if velocity != STILL:
        solids += rider_solids(rng, saddle=0.8)
        height = 1.65
    return SceneObject("motorcycle", x, y, yaw, (length, 0.75, height), solids, velocity, True)
