"""Surroundings of a street: buildings, trees, hedges, lamps, signs, fences, cones and barriers."""

from __future__ import annotations

from bev_scenes._solids import Material, Rng, SceneObject, Shape, Solid

_BOX, _TUBE, _BALL = Shape.BOX, Shape.CYLINDER, Shape.ELLIPSOID


def building(rng: Rng, x: float, y: float, yaw: float, length: float, depth: float) -> SceneObject:
    """A house with its front towards −y of its own frame, with bays, balconies and steps."""
    storeys = int(rng.integers(2, 6))
    height = 3.0 * storeys + 0.6
    front = -depth / 2
    gain = float(rng.uniform(0.6, 1.7))
    door = float(rng.uniform(-0.35, 0.35)) * length
    whole, edge = (length, depth, height + 2), (length + 0.3, 0.7, 0.35)
    solids = [
        Solid(_BOX, (0, 0, height / 2 - 1), whole, Material.FACADE, gain=gain),
        Solid(_BOX, (0, front, height), edge, Material.WALL, gain=gain),
        Solid(_BOX, (door, front - 0.4, 0.15), (1.8, 0.9, 0.5), Material.CONCRETE),
    ]
    for place in (-0.3 * length, 0.3 * length):
        style = rng.random()
        if style < 0.3:
            centre, bay = (place, front - 0.35, 1.5 * storeys), (2.2, 0.8, 3.0 * storeys - 0.5)
            solids.append(Solid(_BOX, centre, bay, Material.WALL, gain=gain))
        elif style < 0.65:
            balcony = (2.8, 1.1, 1.0)
            levels = [(place, front - 0.55, 3.0 * k + 0.45) for k in range(1, storeys)]
            solids += [Solid(_BOX, at, balcony, Material.METAL, gain=0.7) for at in levels]
    solids.append(Solid(_BOX, (door, front - 0.01, 1.25), (1.1, 0.06, 2.3), Material.WOOD))
    if rng.random() < 0.65:
        rise = float(rng.uniform(1.8, 3.6))
        hip = float(rng.choice([0.0, 0.35]))
        size = (length + 0.2, depth + 0.5, rise)
        solids.append(
            Solid(Shape.TAPER, (0, 0, height + rise / 2), size, Material.ROOF, taper=(hip, 1.0))
        )
    return SceneObject("building", x, y, yaw, (length, depth, height), tuple(solids))


def tree(rng: Rng, x: float, y: float) -> SceneObject:
    """A street tree: trunk, a few boughs of foliage."""
    trunk = float(rng.uniform(2.0, 3.2))
    thick = float(rng.uniform(0.22, 0.5))
    reach = float(rng.uniform(1.3, 2.3))
    solids = [Solid(_TUBE, (0, 0, trunk / 2), (thick, thick, trunk + 0.6), Material.BARK)]
    for bough in range(4):
        spread = 0.0 if bough == 0 else 0.5 * reach
        centre = (
            float(rng.uniform(-1, 1)) * spread,
            float(rng.uniform(-1, 1)) * spread,
            trunk + reach * float(rng.uniform(0.5, 0.7 if bough == 0 else 1.4)),
        )
        wide = 2 * reach * float(rng.uniform(0.55, 0.95))
        gain = float(rng.uniform(0.7, 1.4))
        solids.append(Solid(_BALL, centre, (wide, wide, wide * 0.85), Material.FOLIAGE, gain=gain))
    return SceneObject("tree", x, y, 0.0, (2 * reach, 2 * reach, trunk + 2 * reach), tuple(solids))


def hedge(rng: Rng, x: float, y: float, yaw: float, length: float) -> SceneObject:
    """A hedge that a beam enters a little."""
    height = float(rng.uniform(0.8, 1.5))
    solid = Solid(_BOX, (0, 0, height / 2), (length, 0.8, height), Material.FOLIAGE)
    return SceneObject("hedge", x, y, yaw, (length, 0.8, height), (solid,))


def fence(x: float, y: float, yaw: float, length: float) -> SceneObject:
    """Posts every two metres with two rails."""
    posts = int(length // 2) + 1
    first = -(posts - 1)
    solids = [
        Solid(_BOX, (first + 2.0 * k, 0, 0.55), (0.1, 0.1, 1.3), Material.METAL)
        for k in range(posts)
    ]
    for level in (0.45, 0.95):
        solids.append(Solid(_BOX, (0, 0, level), (2.0 * (posts - 1), 0.05, 0.12), Material.METAL))
    return SceneObject("fence", x, y, yaw, (length, 0.1, 1.2), tuple(solids))


def lamp(x: float, y: float, yaw: float) -> SceneObject:
    """A street lamp, its arm along +x of its own frame."""
    solids = (
        Solid(_TUBE, (0, 0, 3.6), (0.16, 0.16, 7.6), Material.METAL),
        Solid(_TUBE, (0, 0, 0.4), (0.3, 0.3, 1.2), Material.METAL),
        Solid(_BOX, (0.9, 0, 7.3), (1.8, 0.1, 0.1), Material.METAL),
        Solid(_BOX, (1.9, 0, 7.25), (0.7, 0.25, 0.15), Material.METAL),
    )
    return SceneObject("lamp", x, y, yaw, (2.3, 0.3, 7.4), solids)


def sign(x: float, y: float, yaw: float) -> SceneObject:
    """A traffic sign facing +x of its own frame."""
    solids = (
        Solid(_TUBE, (0, 0, 1.2), (0.07, 0.07, 2.9), Material.METAL),
        Solid(_BOX, (0.05, 0, 2.35), (0.03, 0.65, 0.65), Material.RETROREFLECTOR),
    )
    return SceneObject("sign", x, y, yaw, (0.1, 0.65, 2.7), solids)


def traffic_light(x: float, y: float, yaw: float) -> SceneObject:
    """A signal on a pole, facing +x of its own frame."""
    lamps = tuple(
        Solid(_BALL, (0.2, 0, level), (0.08, 0.2, 0.2), Material.GLASS) for level in (3.2, 2.9, 2.6)
    )
    solids = (
        Solid(_TUBE, (0, 0, 1.6), (0.14, 0.14, 3.6), Material.METAL),
        Solid(_BOX, (0.1, 0, 2.9), (0.2, 0.3, 0.95), Material.PLASTIC, gain=0.6),
        *lamps,
    )
    return SceneObject("traffic_light", x, y, yaw, (0.3, 0.3, 3.4), solids)


def traffic_cone(x: float, y: float) -> SceneObject:
    """A cone, as a foot and three rings that narrow."""
    rings = tuple(
        Solid(_TUBE, (0, 0, low + 0.11), (wide, wide, 0.22), material)
        for low, wide, material in (
            (0.05, 0.3, Material.PLASTIC),
            (0.27, 0.21, Material.RETROREFLECTOR),
            (0.49, 0.12, Material.PLASTIC),
        )
    )
    foot = Solid(_BOX, (0, 0, 0.03), (0.4, 0.4, 0.06), Material.RUBBER)
    return SceneObject("traffic_cone", x, y, 0.0, (0.4, 0.4, 0.71), (foot, *rings), labelled=True)


def barrier(x: float, y: float, yaw: float) -> SceneObject:
    """A water-filled barrier element, length across its own y."""
    solids = (
        Solid(_BOX, (0, 0, 0.2), (0.6, 2.0, 0.4), Material.PLASTIC),
        Solid(_BOX, (0, 0, 0.65), (0.3, 1.9, 0.5), Material.PLASTIC, gain=1.5),
    )
    return SceneObject("barrier", x, y, yaw, (0.6, 2.0, 0.9), solids, labelled=True)
