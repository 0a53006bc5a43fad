"""Nearest hit of many rays with the ground and with boxes, cylinders and ellipsoids.

Only +, -, ×, ÷, √ and floor are used, in a fixed order and without fused or reassociated
operations, so that the same scene gives the same hits, bit for bit, on every machine. All kernels
stand in one module because numba's cache notices changes to the file of the outermost one alone.
"""

from __future__ import annotations

from typing import Any

import numba
import numpy as np

from bevfusion_quant.scenes._solids import Material, Shape

__all__ = ["GROUND", "NOTHING", "candidates_by_column", "cast_rays", "ground_height"]

NOTHING, GROUND = -1, -2
_BOX, _CYLINDER = int(Shape.BOX), int(Shape.CYLINDER)
_FACADE, _GLASS = int(Material.FACADE), int(Material.GLASS)
_FOLIAGE = int(Material.FOLIAGE)
_ASPHALT, _MARKING = int(Material.ASPHALT), int(Material.MARKING)
_CONCRETE, _GRASS = int(Material.CONCRETE), int(Material.GRASS)
_FAR = 1e9
_RAMP = 0.08  # m over which a curb rises
_BLEND = 6.0  # m over which the even ground beside the sidewalk becomes uneven


@numba.njit(cache=True)  # type: ignore[untyped-decorator]
def _beside_road(x: float, y: float, road: Any) -> Any:
    """Distance [m] to the nearest carriageway, negative inside it."""
    return min(abs(x) - road[3], abs(y - road[6]) - road[7])


@numba.njit(cache=True)  # type: ignore[untyped-decorator]
def ground_height(x: float, y: float, road: Any, bumps: Any) -> Any:
    """Height [m] of the ground: slopes, crowned carriageways, curbs, uneven ground beyond.

    Args:
        x: across the street [m].
        y: along the street [m].
        road: slope x, slope y, crown, half width, sidewalk width, curb, middle and half width of
            the side street (see `Ground.parameters`).
        bumps: heights [n, n] of the uneven ground every 2 m, the middle one at the origin.
    """
    height = road[0] * x + road[1] * y
    out = _beside_road(x, y, road)
    if out <= 0.0:
        return height - road[2] * min(abs(x), road[3])
    height += -road[2] * road[3] + road[5] * min(1.0, out / _RAMP)
    beyond = out - road[4]
    if beyond <= 0.0:
        return height
    n = bumps.shape[0]
    u = min(max(x * 0.5 + n // 2, 0.0), n - 1.001)
    v = min(max(y * 0.5 + n // 2, 0.0), n - 1.001)
    i, j = int(u), int(v)
    u -= i
    v -= j
    low = bumps[i, j] * (1.0 - u) + bumps[i + 1, j] * u
    high = bumps[i, j + 1] * (1.0 - u) + bumps[i + 1, j + 1] * u
    return height + (low * (1.0 - v) + high * v) * min(1.0, beyond / _BLEND)


@numba.njit(cache=True)  # type: ignore[untyped-decorator]
def _ground_material(x: float, y: float, road: Any) -> Any:
    out = _beside_road(x, y, road)
    if out > road[4]:
        return _GRASS
    if out > 0.0:
        return _CONCRETE
    to_crossing = abs(y - road[6]) - road[7]  # negative on the crossing itself
    if 1.0 < to_crossing < 4.0:  # zebra: stripes along the street
        return _MARKING if (x + 50.0) % 1.0 < 0.5 and abs(x) < road[3] else _ASPHALT
    if to_crossing > 4.0:
        dashed = abs(x) < 0.09 and (y + 900.0) % 6.0 < 3.0
        edge = abs(abs(x) - (road[3] - 2.3)) < 0.07
        if dashed or edge or (4.8 < to_crossing < 5.2 and 0 < x * (road[6] - y) < 1e4):
            return _MARKING
    return _ASPHALT


@numba.njit(cache=True)  # type: ignore[untyped-decorator]
def _hit_ground(
    pose: Any, dx: float, dy: float, dz: float, far: float, road: Any, bumps: Any
) -> Any:
    """Distance along a ray to the ground, or _FAR; `pose` is x, y, z of the ray's origin."""
    t, before = 0.5, 0.5
    fall = 0.2 - dz  # no slope but the curbs is steeper than 0.2
    if fall <= 0.0:
        return _FAR
    while t < far:
        above = pose[2] + dz * t - ground_height(pose[0] + dx * t, pose[1] + dy * t, road, bumps)
        if above <= 0.0:
            for _ in range(20):
                middle = 0.5 * (before + t)
                level = ground_height(pose[0] + dx * middle, pose[1] + dy * middle, road, bumps)
                if pose[2] + dz * middle > level:
                    before = middle
                else:
                    t = middle
            return t
        before = t
        t += max(above / fall, 0.03 + 0.003 * t)
    return _FAR


@numba.njit(cache=True)  # type: ignore[untyped-decorator]
def _hit_box(p: Any, q: Any, half: Any) -> Any:
    """Entry and exit of the ray p + t·q into the box ±half, and the axis of the face it enters."""
    enter, leave, axis = -_FAR, _FAR, -1
    for a in range(3):
        if abs(q[a]) < 1e-12:
            if abs(p[a]) > half[a]:
                return _FAR, -_FAR, -1
            continue
        first = (-half[a] - p[a]) / q[a]
        second = (half[a] - p[a]) / q[a]
        if first > second:
            first, second = second, first
        if first > enter:
            enter, axis = first, a
        leave = min(leave, second)
    return enter, leave, axis


@numba.njit(cache=True)  # type: ignore[untyped-decorator]
def _hit_round(p: Any, q: Any, half: Any, flat: bool) -> Any:
    """Entry and exit of a ray into an elliptic cylinder (`flat` ends) or an ellipsoid."""
    a, b, c = 0.0, 0.0, -1.0
    for k in range(2 if flat else 3):
        pk, qk = p[k] / half[k], q[k] / half[k]
        a += qk * qk
        b += pk * qk
        c += pk * pk
    under = b * b - a * c
    if under <= 0.0 or a <= 0.0:
        return _FAR, -_FAR, -1
    root = np.sqrt(under)
    enter, leave, axis = (-b - root) / a, (-b + root) / a, 3
    if flat:
        if abs(q[2]) < 1e-12:
            if abs(p[2]) > half[2]:
                return _FAR, -_FAR, -1
        else:
            first, second = (-half[2] - p[2]) / q[2], (half[2] - p[2]) / q[2]
            if first > second:
                first, second = second, first
            if first > enter:
                enter, axis = first, 2
            leave = min(leave, second)
    return enter, leave, axis


@numba.njit(cache=True)  # type: ignore[untyped-decorator]
def _cosine(p: Any, q: Any, half: Any, t: float, axis: int, flat: bool) -> Any:
    """Cosine of the angle of incidence on the face `axis` (3: the round one)."""
    if axis < 3:
        return abs(q[axis])
    dot, norm = 0.0, 0.0
    for k in range(2 if flat else 3):
        n = (p[k] + q[k] * t) / (half[k] * half[k])
        dot += n * q[k]
        norm += n * n
    return abs(dot) / np.sqrt(max(norm, 1e-30))


@numba.njit(cache=True)  # type: ignore[untyped-decorator]
def candidates_by_column(first: Any, last: Any, columns: int) -> Any:
    """Solids that a column of rays may hit, in the order given, as (starts, members).

    Args:
        first: first column of each solid; may be negative, columns wrap around.
        last: last column of each solid, not below `first`.
        columns: number of columns.
    """
    starts = np.zeros(columns + 1, np.int64)
    for s in range(first.shape[0]):
        for k in range(first[s], min(last[s], first[s] + columns - 1) + 1):
            starts[k % columns + 1] += 1
    for k in range(columns):
        starts[k + 1] += starts[k]
    fill = starts[:-1].copy()
    members = np.empty(starts[-1], np.int32)
    for s in range(first.shape[0]):
        for k in range(first[s], min(last[s], first[s] + columns - 1) + 1):
            members[fill[k % columns]] = s
            fill[k % columns] += 1
    return starts, members


@numba.njit(cache=True)  # type: ignore[untyped-decorator]
def cast_rays(
    azimuth: Any,
    elevation: Any,
    candidates: Any,
    solids: Any,
    pose: Any,
    road: Any,
    bumps: Any,
    chance: Any,
    far: float,
) -> Any:
    """Nearest hit of every ray of a spinning scanner.

    Args:
        azimuth: [columns, 2] cosine and sine of each column, in the world.
        elevation: [beams, 2] cosine and sine of each beam.
        candidates: (starts, members) of `candidates_by_column`, nearest solids first.
        solids: (shape [S], centre [S, 3] from the scanner, heading [S, 2] cosine and sine, half
            sizes [S, 3], material [S], near [S] horizontal distance to the first possible hit).
        pose: x, y, z of the scanner in the world [m].
        road: see `ground_height`.
        bumps: see `ground_height`.
        chance: [columns, beams] uniform in [0, 1): how deep a beam gets into foliage.
        far: longest range [m].

    Returns:
        range [columns, beams] (0 where nothing is hit), index of the solid (`GROUND`, `NOTHING`),
        material, cosine of the angle of incidence.
    """
    columns, beams = azimuth.shape[0], elevation.shape[0]
    starts, members = candidates
    shape, centre, heading, half_size, material_of, near = solids
    distance = np.zeros((columns, beams))
    hit = np.full((columns, beams), NOTHING, np.int32)
    material = np.zeros((columns, beams), np.uint8)
    cosine = np.ones((columns, beams))
    p, q = np.empty(3), np.empty(3)
    for k in range(columns):
        for b in range(beams):
            level, dz = elevation[b]
            dx, dy = azimuth[k, 0] * level, azimuth[k, 1] * level
            best = _hit_ground(pose, dx, dy, dz, far, road, bumps)
            if best < far:
                hit[k, b] = GROUND
                material[k, b] = _ground_material(pose[0] + dx * best, pose[1] + dy * best, road)
                cosine[k, b] = abs(dz)
            else:
                best = far
            for m in range(starts[k], starts[k + 1]):
                s = members[m]
                if near[s] >= best * level:
                    break  # all that follow are farther still
                c, sn = heading[s]
                half = half_size[s]
                p[0] = -(centre[s, 0] * c + centre[s, 1] * sn)
                p[1] = centre[s, 0] * sn - centre[s, 1] * c
                p[2] = -centre[s, 2]
                q[0] = dx * c + dy * sn
                q[1] = dy * c - dx * sn
                q[2] = dz
                flat = shape[s] == _CYLINDER
                if shape[s] == _BOX:
                    enter, leave, axis = _hit_box(p, q, half)
                else:
                    enter, leave, axis = _hit_round(p, q, half, flat)
                if leave <= max(enter, 0.0) or enter >= best:
                    continue
                made_of = material_of[s]
                if made_of == _FOLIAGE:
                    luck = (chance[k, b] + 0.6180339887498949 * s) % 1.0
                    enter = max(enter, 0.0) + 0.55 * luck / (1.0 - 0.98 * luck)
                    if enter >= min(leave, best):
                        continue
                elif enter <= 0.0:
                    continue  # the scanner stands inside
                if made_of == _FACADE and axis < 2:
                    along = p[1 - axis] + q[1 - axis] * enter + half[1 - axis]
                    up = p[2] + q[2] * enter + half[2]
                    if 0.7 < along % 2.6 < 2.0 and 0.9 < up % 3.0 < 2.4:
                        made_of = _GLASS
                        enter += min(0.15 / max(abs(q[axis]), 0.1), leave - enter)
                        if enter >= best:
                            continue
                best = enter
                hit[k, b] = s
                material[k, b] = made_of
                if made_of == _FOLIAGE:
                    cosine[k, b] = 0.4 + 0.6 * luck
                else:
                    cosine[k, b] = _cosine(p, q, half, enter, axis, flat)
            if hit[k, b] != NOTHING:
                distance[k, b] = best
    return distance, hit, material, cosine
