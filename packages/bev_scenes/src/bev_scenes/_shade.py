"""What colour a camera sees at each place that its rays hit: surfaces, sunlight, sky and haze.

The compiled functions use nothing beside +, -, ×, ÷, √ and floor, as the ray caster, so that
pictures are the same on every machine. Colours are linear until the end; the picture is their
square root, which is close to what cameras do.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Any

import numba
import numpy as np
import numpy.typing as npt

from bev_scenes._conditions import Conditions
from bev_scenes._solids import Material, Shape, unit

_Array = npt.NDArray[np.float64]


@dataclass(frozen=True, eq=False)
class Daylight:
    """Sun and sky; colours are linear red, green, blue, where 1 is a white sheet in the sun.

    Args:
        towards: unit vector to the sun, in the world.
        sun: light of the sun on a surface that faces it.
        ambient: light of the sky on a surface that faces up.
        horizon: colour of the sky at the horizon, and of the haze.
        zenith: colour of the sky overhead.
        clouds: share of the sky that they cover, 0 to 1; -1 for a sky without any.
        haze: distance at which half of what is seen is haze [m].
        glow: share of a clear day's glow around the sun.
    """

    towards: _Array
    sun: _Array
    ambient: _Array
    horizon: _Array
    zenith: _Array
    clouds: float
    haze: float = 700.0
    glow: float = 1.0

    @property
    def numbers(self) -> _Array:
        """[6, 3], the rows that the shader takes: the fields in order, the numbers in the last."""
        last = np.array([self.clouds, self.haze, self.glow])
        return np.stack([self.towards, self.sun, self.ambient, self.horizon, self.zenith, last])


def make_daylight(rng: np.random.Generator, conditions: Conditions) -> Daylight:
    """A day between clear and hazy, the sun 28 to 62 degrees up; low ones are warmer.

    Rain and fog have a grey sky without a sun. A night has 5 % of the light.
    """
    around, up = float(rng.uniform(0.0, 2 * math.pi)), float(rng.uniform(28.0, 62.0))
    (c, s), (flat, high) = unit(around), unit(math.radians(up))
    clouds = float(rng.uniform(0.1, 0.6))
    warm = (62.0 - up) / 34.0
    strength = 1.4 - 0.4 * clouds
    day = Daylight(
        towards=np.array([c * flat, s * flat, high]),
        sun=strength * np.array([1.0, 0.96 - 0.08 * warm, 0.88 - 0.2 * warm]),
        ambient=(0.36 + 0.16 * clouds) * np.array([0.88, 0.97, 1.12]),
        horizon=np.array([0.68, 0.75, 0.82]) - 0.06 * warm * np.array([0.0, 0.5, 1.0]),
        zenith=np.array([0.10, 0.24, 0.55]) + 0.15 * clouds,
        clouds=clouds,
    )
    if conditions.extinction > 0.0:
        haze = min(day.haze, math.log(2.0) / conditions.extinction)
        grey = np.full(3, 0.7)
        day = replace(day, sun=0.0 * grey, ambient=1.3 * grey, horizon=grey, zenith=grey, haze=haze)
    if conditions.night:
        dim = {name: 0.05 * getattr(day, name) for name in ("sun", "ambient", "horizon", "zenith")}
        day = replace(day, **dim)
    if conditions.extinction > 0.0 or conditions.night:
        day = replace(day, clouds=-1.0, glow=0.0)
    return day


_NOTHING, _GROUND = -1, -2
_ASPHALT, _MARKING = int(Material.ASPHALT), int(Material.MARKING)
_CONCRETE, _GRASS = int(Material.CONCRETE), int(Material.GRASS)
_FACADE, _GLASS = int(Material.FACADE), int(Material.GLASS)
_PAINT, _RUBBER = int(Material.CAR_PAINT), int(Material.RUBBER)
_METAL, _FOLIAGE = int(Material.METAL), int(Material.FOLIAGE)
_ROOF, _RETRO = int(Material.ROOF), int(Material.RETROREFLECTOR)
_PLASTIC = int(Material.PLASTIC)
_WHEEL, _TAPER = int(Shape.WHEEL), int(Shape.TAPER)
_OPTIONS: dict[str, Any] = {"cache": True, "nogil": True, "error_model": "numpy"}
_kernel = numba.njit(**_OPTIONS)
# Said, because numba compiles what a kernel calls once for each constant that it is given.
_for_any_key = numba.njit("float64(float64, float64, int64)", **_OPTIONS)


# The ray caster's, once more: numba's cache would not notice a change in that file.
@numba.njit("float64(int64, int64, int64)", **_OPTIONS)
def _hash(i: int, j: int, k: int) -> Any:
    """A number in [0, 1) that looks random, from three integers."""
    h = (i * 73856093 ^ j * 19349663 ^ k * 83492791) & 0xFFFFFFFF
    h = ((h ^ (h >> 13)) * 0x2C1B3C6D) & 0xFFFFFFFF
    h = ((h ^ (h >> 15)) * 0x297A2D39) & 0xFFFFFFFF
    return (h ^ (h >> 16)) / 4294967296.0


@_for_any_key
def _speck(x: float, y: float, key: int) -> Any:
    """A random number in [0, 1) for each unit square."""
    return _hash(int(np.floor(x)), int(np.floor(y)), key)


@_for_any_key
def _noise(x: float, y: float, key: int) -> Any:
    """Smooth noise in [0, 1) with one bump per unit square."""
    i, j = int(np.floor(x)), int(np.floor(y))
    u, v = x - i, y - j
    u, v = u * u * (3.0 - 2.0 * u), v * v * (3.0 - 2.0 * v)
    low = _hash(i, j, key) * (1.0 - u) + _hash(i + 1, j, key) * u
    high = _hash(i, j + 1, key) * (1.0 - u) + _hash(i + 1, j + 1, key) * u
    return low * (1.0 - v) + high * v


@_kernel
def _sky(dx: float, dy: float, dz: float, daylight: Any, clouds: bool) -> Any:
    """Colour of the sky in a direction; clouds drift on a plane far above."""
    up = max(dz, 0.0)
    t = np.sqrt(up)
    red = daylight[3, 0] + (daylight[4, 0] - daylight[3, 0]) * t
    green = daylight[3, 1] + (daylight[4, 1] - daylight[3, 1]) * t
    blue = daylight[3, 2] + (daylight[4, 2] - daylight[3, 2]) * t
    if clouds and up > 0.02:
        x, y = 1.3 * dx / (up + 0.12), 1.3 * dy / (up + 0.12)
        thick = 0.55 * _noise(x, y, 11) + 0.3 * _noise(2.1 * x, 2.1 * y, 12)
        thick += 0.15 * _noise(4.3 * x, 4.3 * y, 13)
        cover = min(max((thick - 0.85 + 0.75 * daylight[5, 0]) * 4.0, 0.0), 1.0)
        cover *= min(1.0, 6.0 * (up - 0.02))
        bright = 0.95 - 0.25 * thick
        red, green = red + (bright - red) * cover, green + (bright - green) * cover
        blue += (bright - blue) * cover
    glow = max(dx * daylight[0, 0] + dy * daylight[0, 1] + dz * daylight[0, 2], 0.0)
    glow = glow * glow
    glow = glow * glow
    glow = glow * glow
    glow = 0.35 * daylight[5, 2] * glow * glow
    return red + glow, green + 0.9 * glow, blue + 0.7 * glow


@_kernel
def _ground_tint(x: float, y: float, material: int, away: float) -> Any:
    """Colour of the ground before light falls on it."""
    fine = min(1.0, 8.0 / away)  # what is smaller than a pixel would only flicker
    if material == _GRASS:
        patch = _noise(0.23 * x, 0.23 * y, 1)
        blade = 0.65 + 0.5 * _noise(2.7 * x, 2.7 * y, 2)
        blade += 0.5 * fine * (_speck(16.0 * x, 16.0 * y, 3) - 0.5)
        return (0.09 + 0.09 * patch) * blade, (0.17 + 0.03 * patch) * blade, 0.045 * blade
    if material == _CONCRETE:
        slab = 0.92 + 0.16 * _speck(x / 0.6, y / 0.6, 4)
        slab *= 0.94 + 0.12 * _noise(0.9 * x, 0.9 * y, 5)
        if away < 30.0 and (x % 0.6 < 0.025 or y % 0.6 < 0.025):
            slab *= 0.72
        return 0.36 * slab, 0.345 * slab, 0.32 * slab
    worn = 0.8 + 0.4 * _noise(0.4 * x, 0.15 * y, 6)
    grain = 1.0 + 0.45 * fine * (_speck(24.0 * x, 24.0 * y, 7) - 0.5)
    if material == _MARKING:
        rubbed = 1.0 - 0.35 * _noise(3.0 * x, 3.0 * y, 8)
        return 0.74 * rubbed, 0.74 * rubbed, 0.70 * rubbed
    seam = 0.8 if _noise(0.11 * x, 0.07 * y, 9) > 0.72 else 1.0  # mended patches are darker
    tone = worn * grain * seam
    return 0.105 * tone, 0.105 * tone, 0.11 * tone


@_kernel
def _front_tint(along: float, up: float, red: float, green: float, blue: float, away: float) -> Any:
    """A house front outside its panes: bricks, frames around the windows, sills."""
    a, b = along % 2.6, up % 3.0
    if 0.58 < a < 2.12 and 0.8 < b < 2.5:
        return 0.66, 0.65, 0.62
    if 0.5 < a < 2.2 and 0.66 < b <= 0.8:
        return 0.5, 0.49, 0.46
    tone = 0.9 + 0.2 * _noise(0.5 * along, 0.5 * up, 21)
    if away < 45.0:
        course = up / 0.24
        shift = 0.5 * (np.floor(course) % 2.0)
        tone *= 0.9 + 0.2 * _speck(along / 0.5 + shift, course, 22)
        if course % 1.0 < 0.09:
            tone *= 0.85
    if b < 0.12:
        tone *= 0.8  # a ledge under every storey
    return red * tone, green * tone, blue * tone


@_kernel
def shade(
    where: Any, hit: Any, material: Any, normal: Any, light: Any,
    origin: Any, daylight: Any, colour: Any, solids: Any, image: Any,
) -> None:  # fmt: skip
    """Give every pixel its colour.

    Args:
        where: float32 [rows, width, 3] of `cast_pixels`; a direction where nothing is hit.
        hit: int32 [rows, width], likewise.
        material: uint8 [rows, width], likewise.
        normal: float32 [rows, width, 3], likewise.
        light: float32 [rows, width] of `cast_shadows`.
        origin: x, y, z of the camera in the world [m].
        daylight: see `Daylight.numbers`.
        colour: [S, 3] of `colours_of`.
        solids: see `cast_rays`; centres in the world.
        image: filled, uint8 [rows, width, 3].
    """
    shape, centre, heading, half, taper, base, _ = solids
    for j in range(hit.shape[0]):
        for i in range(hit.shape[1]):
            s, made_of = hit[j, i], material[j, i]
            x, y, z = float(where[j, i, 0]), float(where[j, i, 1]), float(where[j, i, 2])
            if s == _NOTHING:
                red, green, blue = _sky(x, y, z, daylight, True)
            else:
                dx, dy, dz = x - origin[0], y - origin[1], z - origin[2]
                away = np.sqrt(dx * dx + dy * dy + dz * dz)
                dx, dy, dz = dx / away, dy / away, dz / away
                nx, ny, nz = normal[j, i, 0], normal[j, i, 1], normal[j, i, 2]
                mirror = 0.0
                if s == _GROUND:
                    red, green, blue = _ground_tint(x, y, made_of, away)
                else:
                    red, green, blue = colour[s, 0], colour[s, 1], colour[s, 2]
                    c, sn = heading[s, 0], heading[s, 1]
                    ox, oy = x - centre[s, 0], y - centre[s, 1]
                    lx, ly, lz = ox * c + oy * sn, oy * c - ox * sn, z - centre[s, 2]
                    if base[s] == _FACADE:
                        across = abs(nx * c + ny * sn) > 0.5  # a gable end, not the front
                        along = ly + half[s, 1] if across else lx + half[s, 0]
                        up = lz + half[s, 2]
                        if made_of == _FACADE:
                            red, green, blue = _front_tint(along, up, red, green, blue, away)
                        else:
                            a, b = along % 2.6, up % 3.0
                            room = _hash(int(along / 2.6), int(up / 3.0), s)
                            mirror = 0.12
                            if abs(a - 1.35) < 0.05 or abs(b - 1.9) < 0.04:
                                red, green, blue, mirror = 0.6, 0.59, 0.56, 0.0
                            elif room < 0.35 and (a < 1.0 or a > 1.7):
                                red, green, blue = 0.42, 0.40, 0.36  # curtains
                            elif room > 0.85:
                                red, green, blue = 0.30, 0.22, 0.11  # a lamp is lit
                            else:
                                red, green, blue = 0.035, 0.04, 0.05
                    elif made_of == _RUBBER and shape[s] == _WHEEL:
                        r = np.sqrt(lx * lx + lz * lz) / half[s, 0]
                        if 0.1 < r < 0.62:
                            spoke = 0.10 + 0.28 * _hash(int(6.0 * (lx / half[s, 0] + 2.0)), 0, 3)
                            red, green, blue = spoke, spoke, spoke
                    elif made_of == _FOLIAGE:
                        leaf = 0.55 + 0.9 * _hash(
                            int(np.floor(13.0 * x)),
                            int(np.floor(13.0 * y)),
                            int(np.floor(13.0 * z)),
                        )
                        red, green, blue = red * leaf, green * leaf, blue * leaf
                    elif made_of == _ROOF:
                        row = 0.75 + 0.35 * _speck(
                            (ly if abs(nx * c + ny * sn) > 0.1 else lx) / 0.3, lz / 0.2, 23
                        )
                        red, green, blue = red * row, green * row, blue * row
                        if nz < 0.1:  # the wall under a gable
                            red, green, blue = 0.46, 0.42, 0.36
                    elif made_of == _PAINT:
                        mirror = 0.05
                    elif made_of == _GLASS:
                        mirror = 0.12
                        if shape[s] == _TAPER and nz < 0.95:  # pillars
                            part = (lz + half[s, 2]) / (2.0 * half[s, 2])
                            edge_x = half[s, 0] * (1.0 - taper[s, 0] * part) - abs(lx)
                            edge_y = half[s, 1] * (1.0 - taper[s, 1] * part) - abs(ly)
                            if max(edge_x, edge_y) < 0.05 or part < 0.06:
                                mirror = 0.0
                    elif made_of == _METAL and half[s, 2] > 0.7 and half[s, 0] > 0.8:
                        if lx % 0.55 < 0.035:  # ribs of a cargo box
                            red, green, blue = 0.7 * red, 0.7 * green, 0.7 * blue
                    elif made_of == _PLASTIC and half[s, 1] > 0.8:
                        if (ly + 5.0) % 0.7 < 0.35:
                            red, green, blue = 0.78, 0.76, 0.72
                facing = max(
                    nx * daylight[0, 0] + ny * daylight[0, 1] + nz * daylight[0, 2], 0.0
                ) * light[j, i]  # fmt: skip
                full = np.sqrt(nx * nx + ny * ny + nz * nz)
                around = (0.62 + 0.38 * nz) * (0.35 + 0.65 * full)
                bounce = 0.10 * (1.0 - nz)
                red *= daylight[1, 0] * (facing + bounce) + daylight[2, 0] * around
                green *= daylight[1, 1] * (facing + bounce) + daylight[2, 1] * around
                blue *= daylight[1, 2] * (facing + bounce) + daylight[2, 2] * around
                if mirror > 0.0:
                    flat = dx * nx + dy * ny + dz * nz
                    rest = 1.0 + min(flat, 0.0)
                    share = mirror + (1.0 - mirror) * 0.6 * rest * rest * rest * rest
                    rx, ry, rz = dx - 2 * flat * nx, dy - 2 * flat * ny, dz - 2 * flat * nz
                    sky_r, sky_g, sky_b = _sky(rx, ry, rz, daylight, False)
                    if rz < 0.12:  # the street opposite
                        dark = min(1.0, 0.3 + 6.0 * max(rz, 0.0))
                        sky_r, sky_g, sky_b = sky_r * dark, sky_g * dark, sky_b * dark
                    red += (sky_r - red) * share
                    green += (sky_g - green) * share
                    blue += (sky_b - blue) * share
                elif made_of == _RETRO:
                    red, green = red + 0.1 * colour[s, 0], green + 0.1 * colour[s, 1]
                    blue += 0.1 * colour[s, 2]
                haze = away / (away + daylight[5, 1])
                red += (daylight[3, 0] - red) * haze
                green += (daylight[3, 1] - green) * haze
                blue += (daylight[3, 2] - blue) * haze
            image[j, i, 0] = int(255.0 * np.sqrt(min(max(red, 0.0), 1.0)) + 0.5)
            image[j, i, 1] = int(255.0 * np.sqrt(min(max(green, 0.0), 1.0)) + 0.5)
            image[j, i, 2] = int(255.0 * np.sqrt(min(max(blue, 0.0), 1.0)) + 0.5)
