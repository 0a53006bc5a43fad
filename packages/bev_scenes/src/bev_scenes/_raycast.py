"""Nearest hit of many rays with the ground and with upright solids.

Only +, -, ×, ÷, √ and floor are used, in a fixed order and without fused or reassociated
operations, so that the same scene gives the same hits, bit for bit, on every machine and with any
number of threads. All kernels that trace a ray stand in one module because numba's cache notices
changes to the file of the outermost one alone. They let go of the GIL.
"""

from __future__ import annotations

from typing import Any

import numba
import numpy as np

from bev_scenes._solids import Material, Shape

NOTHING, GROUND = -1, -2
CELL = 1.0  # of the grid of shadow candidates [m]
_BOX, _CYLINDER = int(Shape.BOX), int(Shape.CYLINDER)
_WHEEL, _TAPER = int(Shape.WHEEL), int(Shape.TAPER)
_FACADE, _GLASS = int(Material.FACADE), int(Material.GLASS)
_FOLIAGE = int(Material.FOLIAGE)
_ASPHALT, _MARKING = int(Material.ASPHALT), int(Material.MARKING)
_CONCRETE, _GRASS = int(Material.CONCRETE), int(Material.GRASS)
_FAR = 1e9
_RAMP = 0.08  # m over which a curb rises
_STEEP = 0.18  # no slope is steeper against the sloped plane, save curbs
_BLEND = 6.0  # m over which the even ground beside the sidewalk becomes uneven
_ROUND, _LEAN_X, _LEAN_Y = 3, 4, 5  # faces beside 0, 1, 2, those across x, y and z
_START, _TURN, _HALF, _TAPERED, _SHAPE, _MADE_OF, _CLOSEST, _COLUMNS = 0, 3, 5, 8, 10, 11, 12, 13
_kernel = numba.njit(cache=True, nogil=True, error_model="numpy")
# Inlined is what takes arrays and is called the most: numba counts references to each array that a
# function is handed, which costs more than these functions do. Inlining all would double the time
# to compile for a tenth of the time to run.
_inlined = numba.njit(cache=True, nogil=True, error_model="numpy", inline="always")


@_kernel
def _beside_road(x: float, y: float, road: Any) -> Any:
    """Distance [m] to the nearest carriageway, negative inside it."""
    return min(abs(x) - road[3], abs(y - road[6]) - road[7])


@_inlined
def ground_height(x: float, y: float, road: Any, bumps: Any) -> Any:
    """Height [m] of the ground: slopes, crowned carriageways, curbs, uneven ground beyond.

    Args:
        x: across the street [m].
        y: along the street [m].
        road: slope x, slope y, crown, half width, sidewalk width, curb, middle and half width of
            the side street, top of all above the sloped plane (see `Ground.parameters`).
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


@_kernel
def ground_heights(places: Any, road: Any, bumps: Any) -> Any:
    """`ground_height` at each of places [n, 2]."""
    out = np.empty(places.shape[0])
    for k in range(places.shape[0]):
        out[k] = ground_height(places[k, 0], places[k, 1], road, bumps)
    return out


@_kernel
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


@_inlined
def _above(pose: Any, dx: float, dy: float, dz: float, t: float, road: Any, bumps: Any) -> Any:
    """Height [m] of a ray over the ground at distance t."""
    return pose[2] + dz * t - ground_height(pose[0] + dx * t, pose[1] + dy * t, road, bumps)


@_kernel
def _hit_ground(
    pose: Any, dx: float, dy: float, dz: float, far: float, road: Any, bumps: Any
) -> Any:
    """Distance along a ray to the ground, or _FAR; `pose` is x, y, z of the ray's origin."""
    clear = pose[2] - road[0] * pose[0] - road[1] * pose[1]  # above the sloped plane
    sink = dz - road[0] * dx - road[1] * dy
    if sink >= 0.0:
        return _FAR
    t = max(0.5, (road[8] - clear) / sink)  # all before is above the highest ground
    before, over = t, 0.0
    fall = _STEEP - sink
    while t < far:
        x = pose[0] + dx * t
        if abs(x) < road[3]:
            # Half a crowned carriageway is a plane: the ray hits it, or leaves it sideways.
            side = 1.0 if x > 0.0 or (x == 0.0 and dx > 0.0) else -1.0
            over = clear + sink * t + road[2] * abs(x)
            if over <= 0.0:
                return t
            leave = far
            if dx != 0.0:
                edge = 0.0 if side * dx < 0.0 else side * road[3]
                leave = (edge - x) / dx + 1e-6
            rate = sink + road[2] * side * dx
            if rate < 0.0 and -over / rate <= leave:
                t -= over / rate
                return t if t < far else _FAR
            before = t
            t += leave
            continue
        above = _above(pose, dx, dy, dz, t, road, bumps)
        if above <= 0.0:
            over = _above(pose, dx, dy, dz, before, road, bumps)
            stayed = 0
            for _ in range(24):  # false position, halving the weight of an end that stays twice
                if above > -1e-5 or over <= 0.0:
                    break
                middle = before + (t - before) * over / (over - above)
                level = _above(pose, dx, dy, dz, middle, road, bumps)
                if abs(level) < 1e-5:
                    return middle
                if level > 0.0:
                    before, over = middle, level
                    above *= 0.5 if stayed == 1 else 1.0
                    stayed = 1
                else:
                    t, above = middle, level
                    over *= 0.5 if stayed == 2 else 1.0
                    stayed = 2
            return t
        before = t
        t += max(above / fall, 0.03 + 0.006 * t)
        if sink < -1e-3:
            # Past where it would meet even ground, if that is near or no slope is as steep.
            level = 0.002 - 1.01 * above / sink
            if level < 1.0 or sink < -_STEEP:
                t = max(t, before + level)
    return _FAR


@_kernel
def _hit_slab(p: float, q: float, half: float) -> Any:
    """Where the ray p + t·q enters and leaves ±half."""
    if abs(q) < 1e-12:
        return (_FAR, -_FAR) if abs(p) > half else (-_FAR, _FAR)
    first, second = (-half - p) / q, (half - p) / q
    return (second, first) if first > second else (first, second)


@_kernel
def _hit_box(
    px: float, py: float, pz: float, qx: float, qy: float, qz: float,
    hx: float, hy: float, hz: float,
) -> Any:  # fmt: skip
    """Entry and exit of the ray p + t·q into the box ±h, and the face it enters."""
    enter, leave = _hit_slab(px, qx, hx)
    axis = 0
    first, second = _hit_slab(py, qy, hy)
    if first > enter:
        enter, axis = first, 1
    leave = min(leave, second)
    first, second = _hit_slab(pz, qz, hz)
    if first > enter:
        enter, axis = first, 2
    return enter, min(leave, second), axis


@_kernel
def _hit_tube(
    px: float, py: float, pz: float, qx: float, qy: float, qz: float,
    hx: float, hy: float, hz: float,
) -> Any:  # fmt: skip
    """Entry and exit of a ray into an elliptic cylinder with its axis along z."""
    ux, uy, vx, vy = px / hx, py / hy, qx / hx, qy / hy
    a, b, c = vx * vx + vy * vy, ux * vx + uy * vy, ux * ux + uy * uy - 1.0
    enter, leave = _hit_slab(pz, qz, hz)
    if a <= 1e-24:
        return (enter, leave, 2) if c < 0.0 else (_FAR, -_FAR, 2)
    under = b * b - a * c
    if under <= 0.0:
        return _FAR, -_FAR, 2
    root = np.sqrt(under)
    axis = 2
    if (-b - root) / a > enter:
        enter, axis = (-b - root) / a, _ROUND
    return enter, min(leave, (-b + root) / a), axis


@_kernel
def _hit_ball(
    px: float, py: float, pz: float, qx: float, qy: float, qz: float,
    hx: float, hy: float, hz: float,
) -> Any:  # fmt: skip
    """Entry and exit of a ray into an ellipsoid."""
    ux, uy, uz, vx, vy, vz = px / hx, py / hy, pz / hz, qx / hx, qy / hy, qz / hz
    a = vx * vx + vy * vy + vz * vz
    b = ux * vx + uy * vy + uz * vz
    under = b * b - a * (ux * ux + uy * uy + uz * uz - 1.0)
    if under <= 0.0:
        return _FAR, -_FAR, _ROUND
    root = np.sqrt(under)
    return (-b - root) / a, (-b + root) / a, _ROUND


@_kernel
def _hit_lean(
    p: float, q: float, pz: float, qz: float, half: float, hz: float, taper: float
) -> Any:
    """Entry and exit between two sides at ±half of the foot that lean inwards by `taper`·half."""
    lean = half * taper / (2.0 * hz)
    enter, leave = -_FAR, _FAR
    for side in (-1.0, 1.0):
        ahead = half - lean * hz - (side * p + lean * pz)
        speed = side * q + lean * qz
        if abs(speed) < 1e-12:
            if ahead < 0.0:
                return _FAR, -_FAR
        elif speed < 0.0:
            enter = max(enter, ahead / speed)
        else:
            leave = min(leave, ahead / speed)
    return enter, leave


@_inlined
def _hit_solid(
    table: Any, s: int, px: float, py: float, pz: float, qx: float, qy: float, qz: float
) -> Any:
    """Entry and exit of a ray, given in solid s's frame, into it, and the face it enters."""
    shape, hx, hy, hz = table[s, _SHAPE], table[s, _HALF], table[s, _HALF + 1], table[s, _HALF + 2]
    if shape == _BOX:
        return _hit_box(px, py, pz, qx, qy, qz, hx, hy, hz)
    if shape == _CYLINDER:
        return _hit_tube(px, py, pz, qx, qy, qz, hx, hy, hz)
    if shape == _WHEEL:
        enter, leave, axis = _hit_tube(px, pz, py, qx, qz, qy, hx, hz, hy)
        return enter, leave, 1 if axis == 2 else axis
    if shape != _TAPER:
        return _hit_ball(px, py, pz, qx, qy, qz, hx, hy, hz)
    enter, leave = _hit_slab(pz, qz, hz)
    axis = 2
    first, second = _hit_lean(px, qx, pz, qz, hx, hz, table[s, _TAPERED])
    if first > enter:
        enter, axis = first, _LEAN_X
    leave = min(leave, second)
    first, second = _hit_lean(py, qy, pz, qz, hy, hz, table[s, _TAPERED + 1])
    if first > enter:
        enter, axis = first, _LEAN_Y
    return enter, min(leave, second), axis


@_kernel
def _normal(table: Any, s: int, x: float, y: float, z: float, axis: int) -> Any:
    """Outward unit normal at a point of a face of solid s, in the solid's frame."""
    if axis == 0:
        return (1.0 if x > 0.0 else -1.0), 0.0, 0.0
    if axis == 1:
        return 0.0, (1.0 if y > 0.0 else -1.0), 0.0
    if axis == 2:
        return 0.0, 0.0, (1.0 if z > 0.0 else -1.0)
    if axis == _LEAN_X or axis == _LEAN_Y:
        k = axis - _LEAN_X
        lean = table[s, _HALF + k] * table[s, _TAPERED + k] / (2.0 * table[s, _HALF + 2])
        n = 1.0 / np.sqrt(1.0 + lean * lean)
        if axis == _LEAN_X:
            return (n if x > 0.0 else -n), 0.0, lean * n
        return 0.0, (n if y > 0.0 else -n), lean * n
    hx, hy, hz = table[s, _HALF], table[s, _HALF + 1], table[s, _HALF + 2]
    nx, ny, nz = x / (hx * hx), y / (hy * hy), z / (hz * hz)
    if table[s, _SHAPE] == _CYLINDER:
        nz = 0.0
    elif table[s, _SHAPE] == _WHEEL:
        ny = 0.0
    n = 1.0 / np.sqrt(max(nx * nx + ny * ny + nz * nz, 1e-30))
    return nx * n, ny * n, nz * n


@_kernel
def _hash(i: int, j: int, k: int) -> Any:
    """A number in [0, 1) that looks random, from three integers."""
    h = (i * 73856093 ^ j * 19349663 ^ k * 83492791) & 0xFFFFFFFF
    h = ((h ^ (h >> 13)) * 0x2C1B3C6D) & 0xFFFFFFFF
    h = ((h ^ (h >> 15)) * 0x297A2D39) & 0xFFFFFFFF
    return (h ^ (h >> 16)) / 4294967296.0


@_kernel
def _leaf(x: float, y: float, z: float) -> Any:
    """How deep a ray gets into foliage from where it enters, in [0, 1): twigs with leaves on."""
    leaf = _hash(int(np.floor(15.0 * x)), int(np.floor(15.0 * y)), int(np.floor(15.0 * z)))
    twig = _hash(int(np.floor(3.1 * x)), int(np.floor(3.1 * y)), int(np.floor(3.1 * z)))
    return 0.6 * leaf + 0.4 * twig


@_kernel
def _tabulate(solids: Any) -> Any:
    """One row of numbers for each solid, see the columns' names.

    `_START` is the centres' common origin, in the solid's frame.
    """
    # numba counts references to each array, so one array is faster than seven. The numbers of a
    # solid are adjacent in memory, too.
    shape, centre, heading, half, taper, material, near = solids
    table = np.empty((shape.shape[0], _COLUMNS))
    for s in range(shape.shape[0]):
        c, sn = heading[s, 0], heading[s, 1]
        table[s, _START] = -(centre[s, 0] * c + centre[s, 1] * sn)
        table[s, _START + 1] = centre[s, 0] * sn - centre[s, 1] * c
        table[s, _START + 2] = -centre[s, 2]
        table[s, _TURN], table[s, _TURN + 1] = c, sn
        for k in range(3):
            table[s, _HALF + k] = half[s, k]
        table[s, _TAPERED], table[s, _TAPERED + 1] = taper[s, 0], taper[s, 1]
        table[s, _SHAPE], table[s, _MADE_OF], table[s, _CLOSEST] = shape[s], material[s], near[s]
    return table


@_inlined
def _nearest(
    dx: float, dy: float, dz: float, level: float, chance: float, first: int, last: int,
    members: Any, table: Any, pose: Any, road: Any, bumps: Any, far: float,
) -> Any:  # fmt: skip
    """Nearest hit of one ray with the ground and with members[first:last], near ones first.

    `level` is the horizontal length of the unit direction. `chance` decides how deep a ray gets
    into foliage; where negative, the place where it enters decides.

    Returns:
        distance (`far` where nothing is hit), solid, material, face, luck in the foliage.
    """
    best = _hit_ground(pose, dx, dy, dz, far, road, bumps)
    hit, material, face, luck = NOTHING, 0, 2, 0.0
    if best < far:
        hit = GROUND
        material = _ground_material(pose[0] + dx * best, pose[1] + dy * best, road)
    else:
        best = far
    for m in range(first, last):
        s = members[m]
        if table[s, _CLOSEST] >= best * level:
            break  # all that follow are farther still
        c, sn = table[s, _TURN], table[s, _TURN + 1]
        qx, qy = dx * c + dy * sn, dy * c - dx * sn
        px, py, pz = table[s, _START], table[s, _START + 1], table[s, _START + 2]
        enter, leave, axis = _hit_solid(table, s, px, py, pz, qx, qy, dz)
        if leave <= max(enter, 0.0) or enter >= best:
            continue
        made_of = int(table[s, _MADE_OF])
        depth = 0.0
        if made_of == _FOLIAGE:
            enter = max(enter, 0.0)
            if chance >= 0.0:
                depth = (chance + 0.6180339887498949 * s) % 1.0
            else:
                depth = _leaf(px + qx * enter, py + qy * enter, pz + dz * enter)
            enter += 0.55 * depth / (1.0 - 0.98 * depth)
            if enter >= min(leave, best):
                continue
        elif enter <= 0.0:
            continue  # the rays start inside
        if made_of == _FACADE and axis < 2:
            along = py + qy * enter + table[s, _HALF + 1]
            if axis == 1:
                along = px + qx * enter + table[s, _HALF]
            up = pz + dz * enter + table[s, _HALF + 2]
            if 0.7 < along % 2.6 < 2.0 and 0.9 < up % 3.0 < 2.4:
                made_of = _GLASS
                slant = abs(qx) if axis == 0 else abs(qy)
                enter += min(0.15 / max(slant, 0.1), leave - enter)
                if enter >= best:
                    continue
        best, hit, material, face, luck = enter, s, made_of, axis, depth
    return best, hit, material, face, luck


@_kernel
def _normal_of_hit(table: Any, s: int, face: int, t: float, dx: float, dy: float, dz: float) -> Any:
    """Outward normal of solid `s` where a ray hits it, in the world."""
    c, sn = table[s, _TURN], table[s, _TURN + 1]
    x = table[s, _START] + (dx * c + dy * sn) * t
    y = table[s, _START + 1] + (dy * c - dx * sn) * t
    nx, ny, nz = _normal(table, s, x, y, table[s, _START + 2] + dz * t, face)
    return nx * c - ny * sn, nx * sn + ny * c, nz


@_kernel
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
        solids: (shape [S], centre [S, 3] from the rays' origin, heading [S, 2] cosine and sine,
            half sizes [S, 3], taper [S, 2], material [S], near [S] horizontal distance to the
            first possible hit).
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
    begins, members = candidates
    table = _tabulate(solids)
    distance = np.zeros((columns, beams))
    hit = np.full((columns, beams), NOTHING, np.int32)
    material = np.zeros((columns, beams), np.uint8)
    cosine = np.ones((columns, beams))
    for k in range(columns):
        for b in range(beams):
            level, dz = elevation[b]
            dx, dy = azimuth[k, 0] * level, azimuth[k, 1] * level
            t, s, made_of, face, luck = _nearest(
                dx, dy, dz, level, chance[k, b], begins[k], begins[k + 1], members,
                table, pose, road, bumps, far,
            )  # fmt: skip
            if s == NOTHING:
                continue
            distance[k, b], hit[k, b], material[k, b] = t, s, made_of
            if s == GROUND:
                cosine[k, b] = abs(dz)
            elif made_of == _FOLIAGE:
                cosine[k, b] = 0.4 + 0.6 * luck
            else:
                nx, ny, nz = _normal_of_hit(table, s, face, t, dx, dy, dz)
                cosine[k, b] = abs(nx * dx + ny * dy + nz * dz)
    return distance, hit, material, cosine


@_kernel
def cast_pixels(
    lens: Any,
    axes: Any,
    rows: Any,
    width: int,
    tile: int,
    candidates: Any,
    solids: Any,
    pose: Any,
    road: Any,
    bumps: Any,
    far: float,
    where: Any,
    hit: Any,
    material: Any,
    normal: Any,
) -> None:
    """Nearest hit of the rays through the pixels of some rows of a picture.

    Args:
        lens: fx, fy, cx, cy [pixels]; the first pixel covers 0 to 1.
        axes: [3, 3], the camera's right, down and forward in the world.
        rows: first row and the one after the last.
        width: of the picture [pixels].
        tile: side of the square tiles of `candidates` [pixels].
        candidates: (starts, members) of `candidates_by_tile` for the whole picture.
        solids: see `cast_rays`; centres from the camera.
        pose: x, y, z of the camera in the world [m].
        road: see `ground_height`.
        bumps: see `ground_height`.
        far: longest range [m].
        where: filled, [rows, width, 3], the place hit in the world [m], or the direction where
            nothing is.
        hit: filled, [rows, width], as `cast_rays` returns it.
        material: filled, [rows, width], likewise.
        normal: filled, [rows, width, 3], in the world.
    """
    begins, members = candidates
    tiles = (width + tile - 1) // tile
    table = _tabulate(solids)
    for j in range(rows[1] - rows[0]):
        v = (rows[0] + j + 0.5 - lens[3]) / lens[1]
        row = (rows[0] + j) // tile * tiles
        for i in range(width):
            u = (i + 0.5 - lens[2]) / lens[0]
            dx = axes[0, 0] * u + axes[1, 0] * v + axes[2, 0]
            dy = axes[0, 1] * u + axes[1, 1] * v + axes[2, 1]
            dz = axes[0, 2] * u + axes[1, 2] * v + axes[2, 2]
            length = np.sqrt(dx * dx + dy * dy + dz * dz)
            dx, dy, dz = dx / length, dy / length, dz / length
            c = row + i // tile
            t, s, made_of, face, luck = _nearest(
                dx, dy, dz, np.sqrt(dx * dx + dy * dy), -1.0, begins[c], begins[c + 1], members,
                table, pose, road, bumps, far,
            )  # fmt: skip
            hit[j, i], material[j, i] = s, made_of
            if s == NOTHING:
                where[j, i, 0], where[j, i, 1], where[j, i, 2] = dx, dy, dz
                continue
            x, y = pose[0] + dx * t, pose[1] + dy * t
            where[j, i, 0], where[j, i, 1], where[j, i, 2] = x, y, pose[2] + dz * t
            if s == GROUND:
                z = ground_height(x, y, road, bumps)
                nx = (z - ground_height(x + 0.02, y, road, bumps)) / 0.02
                ny = (z - ground_height(x, y + 0.02, road, bumps)) / 0.02
                n = 1.0 / np.sqrt(1.0 + nx * nx + ny * ny)
                nx, ny, nz = nx * n, ny * n, n
            else:
                nx, ny, nz = _normal_of_hit(table, s, face, t, dx, dy, dz)
                if made_of == _FOLIAGE:  # deep in the leaves less light arrives
                    nx, ny, nz = nx * (1.0 - luck), ny * (1.0 - luck), nz * (1.0 - luck)
            normal[j, i, 0], normal[j, i, 1], normal[j, i, 2] = nx, ny, nz


@_kernel
def cast_shadows(
    where: Any, hit: Any, normal: Any, sun: Any, corner: Any, shape_of_grid: Any,
    candidates: Any, solids: Any, light: Any,
) -> None:  # fmt: skip
    """Share of the sun's light that reaches each place, 0 or 1, or between under leaves.

    Args:
        where: float32 [rows, width, 3] of `cast_pixels`.
        hit: int32 [rows, width], likewise.
        normal: float32 [rows, width, 3], likewise.
        sun: unit vector towards the sun, in the world; its z is positive.
        corner: x and y where the grid of candidates begins on the plane z = 0 [m].
        shape_of_grid: cells along x and along y, each `CELL` wide.
        candidates: (starts, members) of the solids whose shadows may fall on each cell.
        solids: see `cast_rays`; centres in the world.
        light: filled, float32 [rows, width].
    """
    begins, members = candidates
    table = _tabulate(solids)
    light[:] = 1.0
    for j in range(hit.shape[0]):
        for i in range(hit.shape[1]):
            if hit[j, i] == NOTHING:
                continue
            facing = normal[j, i, 0] * sun[0] + normal[j, i, 1] * sun[1] + normal[j, i, 2] * sun[2]
            if facing <= 0.0:
                light[j, i] = 0.0
                continue
            # Off the surface, or it would lie in its own shadow.
            x = where[j, i, 0] + 0.01 * normal[j, i, 0]
            y = where[j, i, 1] + 0.01 * normal[j, i, 1]
            z = where[j, i, 2] + 0.01 * normal[j, i, 2]
            a = int(np.floor((x - z * sun[0] / sun[2] - corner[0]) / CELL))
            b = int(np.floor((y - z * sun[1] / sun[2] - corner[1]) / CELL))
            if a < 0 or b < 0 or a >= shape_of_grid[0] or b >= shape_of_grid[1]:
                continue
            cell = b * shape_of_grid[0] + a
            for m in range(begins[cell], begins[cell + 1]):
                s = members[m]
                leaves = table[s, _MADE_OF] == _FOLIAGE
                if leaves and s == hit[j, i]:
                    continue
                c, sn = table[s, _TURN], table[s, _TURN + 1]
                px = table[s, _START] + x * c + y * sn
                py = table[s, _START + 1] + y * c - x * sn
                pz = table[s, _START + 2] + z
                qx, qy = sun[0] * c + sun[1] * sn, sun[1] * c - sun[0] * sn
                enter, leave, _ = _hit_solid(table, s, px, py, pz, qx, qy, sun[2])
                if leave <= max(enter, 0.0):
                    continue
                if not leaves:
                    light[j, i] = 0.0
                    break
                # The sun comes through here and there, less so through thick foliage.
                spot = _hash(int(np.floor(x * 6.0)), int(np.floor(y * 6.0)), s)
                if spot * (1.0 + leave - max(enter, 0.0)) > 0.45:
                    light[j, i] *= 0.25


@_kernel
def silhouettes(
    directions: Any, column: Any, wanted: Any, candidates: Any, own: Any, owner: Any,
    solids: Any, pose: Any, road: Any, bumps: Any, far: float,
) -> Any:  # fmt: skip
    """Which sample rays hit an object where it stands alone, and which hit it in the scene.

    Args:
        directions: [samples, 3], unit vectors.
        column: [samples], the column of `candidates` that holds each.
        wanted: [samples], the object that each is for.
        candidates: (starts, members) of `candidates_by_column`, nearest solids first.
        own: (starts, members), the solids of each object, nearest first.
        owner: [S], the object of each solid.
        solids: see `cast_rays`.
        pose: see `cast_rays`.
        road: see `ground_height`.
        bumps: see `ground_height`.
        far: longest range [m].

    Returns:
        two bool arrays [samples].
    """
    table = _tabulate(solids)
    alone = np.zeros(wanted.shape[0], np.bool_)
    seen = np.zeros(wanted.shape[0], np.bool_)
    for k in range(wanted.shape[0]):
        dx, dy, dz = directions[k, 0], directions[k, 1], directions[k, 2]
        level = np.sqrt(dx * dx + dy * dy)
        for scene in range(2):  # the object alone, then all there is
            begins, members = candidates if scene else own
            c = column[k] if scene else wanted[k]
            _, s, _, _, _ = _nearest(
                dx, dy, dz, level, 0.5, begins[c], begins[c + 1], members,
                table, pose, road, bumps, far,
            )  # fmt: skip
            if s < 0 or owner[s] != wanted[k]:
                break
            if scene:
                seen[k] = True
            else:
                alone[k] = True
    return alone, seen
