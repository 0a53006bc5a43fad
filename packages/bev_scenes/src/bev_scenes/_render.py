"""Pictures of a street from the cameras of a car, at one instant."""

from __future__ import annotations

import os
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from bev_data.cameras import Camera
from bev_scenes._candidates import candidates_by_cell, screen_rectangles
from bev_scenes._conditions import CLEAR, Conditions
from bev_scenes._labels import Pose
from bev_scenes._raycast import CELL, GROUND, cast_pixels, cast_shadows
from bev_scenes._rig import CameraMount, CameraRig
from bev_scenes._shade import make_daylight, shade
from bev_scenes._solid_arrays import SolidArrays, gather, in_order, place
from bev_scenes._solids import Material, SceneObject, Solid
from bev_scenes._street import Street

GROUND_PIXEL, SKY_PIXEL = -1, -2
_Array = npt.NDArray[np.float64]
_TILE = 16  # pixels
_BAND = 64  # rows that one task renders; what it needs stays in the caches
_FAR = 400.0  # m
_GRAIN = 6.0  # standard deviation of a camera's noise at night, of 255
_SHADOWS = 110.0  # shadows fall up to here from the middle of the street [m]


@dataclass(frozen=True, eq=False)
class Picture:
    """Picture of one camera.

    Args:
        camera: the image and its calibration.
        objects: int32 [height, width], index into `Street.objects` of each pixel's object; -1 for
            the ground, -2 for the sky.
    """

    camera: Camera
    objects: npt.NDArray[np.int32]


def render_street(
    street: Street,
    rig: CameraRig,
    pose: Pose,
    *,
    seed: int = 0,
    threads: int | None = None,
    conditions: Conditions = CLEAR,
) -> tuple[Picture, ...]:
    """Render every camera of `rig` at time 0, one ray through the middle of each pixel.

    Light and paint come from `seed` too. Rays meet the same solids and the same ground as those
    of the LiDAR; window panes lie 0.15 m behind their walls, and foliage lets some rays through.

    Args:
        street: the scene.
        rig: the cameras.
        pose: of the LiDAR at time 0, which the cameras' places count from.
        seed: of sun, sky and colours.
        threads: at most; as many as there are processors where None. Pictures do not depend on
            it.
        conditions: weather and light.
    """
    solids = gather(street)
    scene = _Scene(street, solids, place(street, solids, 0.0), seed, conditions)
    views = [_View(scene, mount, pose) for mount in rig.cameras]
    tasks = [
        (view, row, min(row + _BAND, view.mount.height))
        for view in views
        for row in range(0, view.mount.height, _BAND)
    ]
    workers = min(threads or _processors(), len(tasks))
    if workers == 1:
        for task in tasks:
            _render_rows(scene, *task)
    else:
        with ThreadPoolExecutor(workers) as pool:
            list(pool.map(lambda task: _render_rows(scene, *task), tasks))
    if conditions.night:
        for k, view in enumerate(views):
            rng = np.random.Generator(np.random.PCG64(np.random.SeedSequence([seed, 7, k])))
            grain = _GRAIN * rng.standard_normal(view.image.shape, np.float32)
            view.image[:] = np.clip(np.round(view.image + grain), 0.0, 255.0).astype(np.uint8)
    return tuple(
        Picture(
            Camera(view.mount.name, view.image, view.mount.intrinsics, view.mount.lidar_to_camera),
            view.objects,
        )
        for view in views
    )


def _processors() -> int:
    # Not every system tells which processors this process may use.
    tell = getattr(os, "sched_getaffinity", None)
    return len(tell(0)) if tell else os.cpu_count() or 1


class _Scene:
    """Data of all cameras: solids of the whole street, their colours, the light, shadows."""

    def __init__(
        self,
        street: Street,
        solids: SolidArrays,
        centre: _Array,
        seed: int,
        conditions: Conditions,
    ) -> None:
        rng = np.random.Generator(np.random.PCG64(np.random.SeedSequence([seed, 5])))
        self.solids, self.centre = solids, centre
        self.road, self.bumps = street.ground.parameters, street.ground.bumps
        self.daylight = make_daylight(rng, conditions)
        self.colour = colours_of(street, seed)
        every = np.arange(len(centre))
        self.arrays = in_order(solids, centre, every, np.zeros(len(centre)))
        self.corner = np.array([-_SHADOWS, -_SHADOWS])
        cells = int(2 * _SHADOWS / CELL)
        self.grid = (cells, cells)
        # The largest first: most shadows are those of houses, and one hit is enough.
        by_size = np.argsort(-solids.half.prod(1), kind="stable")
        starts, members = candidates_by_cell(self._shadow_cells()[by_size], cells, cells)
        self.shadows = (starts, by_size[members])

    def _shadow_cells(self) -> npt.NDArray[np.int64]:
        """Cells of the plane z = 0 that each solid's shadow touches."""
        sun, centre = self.daylight.towards, self.centre
        reach = self.solids.reach(self.solids.turn)
        spans = []
        for axis in (0, 1):
            slide = sun[axis] / sun[2]
            middle = centre[:, axis] - centre[:, 2] * slide - self.corner[axis]
            wide = reach[:, axis] + reach[:, 2] * abs(slide) + 0.05
            spans += [np.floor((middle - wide) / CELL), np.floor((middle + wide) / CELL)]
        return np.stack(spans, 1).astype(np.int64)


class _View:
    """Data of one camera: its position, its pixels, and the candidate solids of each tile."""

    def __init__(self, scene: _Scene, mount: CameraMount, pose: Pose) -> None:
        origin, (c, s) = pose
        turn = np.array([[c, s, 0.0], [-s, c, 0.0], [0.0, 0.0, 1.0]])  # rows: LiDAR's x, y, z
        self.mount = mount
        self.origin = origin + np.array(mount.position) @ turn
        self.axes = mount.axes @ turn
        k = mount.intrinsics
        self.lens = np.array([k[0, 0], k[1, 1], k[0, 2], k[1, 2]])
        solids, centre = scene.solids, scene.centre - self.origin
        box = screen_rectangles(self.lens, self.axes, centre, solids.turn, solids.half)
        box += np.array([-1.0, 1.0, -1.0, 1.0])
        inside = (box[:, 0] < mount.width) & (box[:, 1] > 0) & (box[:, 2] < mount.height)
        inside &= (box[:, 3] > 0) & (box[:, 0] <= box[:, 1])
        away = np.sqrt(centre[:, 0] ** 2 + centre[:, 1] ** 2)
        near = np.maximum(away - solids.radius, 0.0)
        inside &= near < _FAR
        seen = np.flatnonzero(inside)
        self.order = seen[np.argsort(near[seen], kind="stable")]
        across, down = -(-mount.width // _TILE), -(-mount.height // _TILE)
        tiles = np.clip(np.floor(box[self.order] / _TILE), -1, max(across, down))
        self.tiles = candidates_by_cell(tiles.astype(np.int64), across, down)
        self.solids = in_order(solids, centre, self.order, near[self.order])
        self.image = np.empty((mount.height, mount.width, 3), np.uint8)
        self.objects = np.empty((mount.height, mount.width), np.int32)


def _render_rows(scene: _Scene, view: _View, first: int, last: int) -> None:
    size = (last - first, view.mount.width)
    where, normal = np.empty((2, *size, 3), np.float32)
    hit, material = np.empty(size, np.int32), np.empty(size, np.uint8)
    light = np.empty(size, np.float32)
    cast_pixels(
        view.lens, view.axes, (first, last), view.mount.width, _TILE, view.tiles, view.solids,
        view.origin, scene.road, scene.bumps, _FAR, where, hit, material, normal,
    )  # fmt: skip
    solid = np.where(hit >= 0, view.order[np.maximum(hit, 0)], hit).astype(np.int32)
    cast_shadows(
        where, solid, normal, scene.daylight.towards, scene.corner, scene.grid, scene.shadows,
        scene.arrays, light,
    )  # fmt: skip
    shade(
        where, solid, material, normal, light, view.origin, scene.daylight.numbers, scene.colour,
        scene.arrays, view.image[first:last],
    )  # fmt: skip
    owner = scene.solids.owner[np.maximum(solid, 0)]
    view.objects[first:last] = np.where(
        solid >= 0, owner, np.where(solid == GROUND, GROUND_PIXEL, SKY_PIXEL)
    )


_Colour = tuple[float, float, float]

# Linear red, green, blue: shares of the light sent back.
_PLAIN: dict[Material, _Colour] = {
    Material.ASPHALT: (0.10, 0.10, 0.105),
    Material.MARKING: (0.70, 0.70, 0.66),
    Material.CONCRETE: (0.36, 0.35, 0.33),
    Material.GRASS: (0.11, 0.19, 0.04),
    Material.FACADE: (0.45, 0.38, 0.30),
    Material.WALL: (0.55, 0.52, 0.46),
    Material.GLASS: (0.03, 0.04, 0.05),
    Material.CAR_PAINT: (0.30, 0.30, 0.30),
    Material.RUBBER: (0.018, 0.018, 0.02),
    Material.METAL: (0.20, 0.21, 0.22),
    Material.FOLIAGE: (0.07, 0.15, 0.025),
    Material.BARK: (0.11, 0.075, 0.05),
    Material.CLOTH: (0.20, 0.20, 0.20),
    Material.SKIN: (0.50, 0.31, 0.22),
    Material.RETROREFLECTOR: (0.90, 0.90, 0.88),
    Material.PLASTIC: (0.25, 0.25, 0.25),
    Material.ROOF: (0.28, 0.10, 0.06),
    Material.WOOD: (0.18, 0.09, 0.045),
}
_PAINTS: tuple[_Colour, ...] = (
    (0.75, 0.75, 0.74), (0.60, 0.61, 0.62), (0.28, 0.29, 0.31), (0.12, 0.12, 0.13),
    (0.03, 0.03, 0.035), (0.55, 0.03, 0.03), (0.30, 0.02, 0.03), (0.03, 0.09, 0.36),
    (0.02, 0.04, 0.14), (0.05, 0.19, 0.28), (0.04, 0.14, 0.07), (0.55, 0.40, 0.05),
)  # fmt: skip
_FRONTS: tuple[_Colour, ...] = (
    (0.36, 0.13, 0.08), (0.28, 0.11, 0.07), (0.55, 0.47, 0.33), (0.62, 0.59, 0.52),
    (0.50, 0.36, 0.18), (0.40, 0.42, 0.42), (0.33, 0.38, 0.43), (0.47, 0.30, 0.22),
)  # fmt: skip
_ROOFS: tuple[_Colour, ...] = ((0.27, 0.09, 0.05), (0.19, 0.08, 0.06), (0.08, 0.08, 0.09))
_SHIRTS: tuple[_Colour, ...] = (
    (0.62, 0.08, 0.07), (0.07, 0.16, 0.45), (0.65, 0.64, 0.60), (0.06, 0.30, 0.20),
    (0.70, 0.48, 0.06), (0.05, 0.05, 0.06), (0.40, 0.12, 0.34), (0.20, 0.42, 0.55),
)  # fmt: skip
_TROUSERS: tuple[_Colour, ...] = (
    (0.03, 0.05, 0.12), (0.025, 0.025, 0.03), (0.10, 0.10, 0.11), (0.28, 0.22, 0.14),
)  # fmt: skip
_BUSES: tuple[_Colour, ...] = ((0.60, 0.06, 0.04), (0.62, 0.42, 0.04), (0.05, 0.22, 0.42))
_HAIR: tuple[_Colour, ...] = (
    (0.02, 0.015, 0.01), (0.08, 0.04, 0.02), (0.30, 0.20, 0.09), (0.32, 0.31, 0.30),
)  # fmt: skip
_RED, _AMBER, _GREEN = (0.75, 0.03, 0.02), (0.85, 0.45, 0.03), (0.03, 0.60, 0.25)


def colours_of(street: Street, seed: int) -> npt.NDArray[np.float64]:
    """Colour of every solid [solids, 3], in the order of `gather`; linear, 0 to 1."""
    rng = np.random.Generator(np.random.PCG64(np.random.SeedSequence([seed, 4])))
    draws = rng.random((len(street.objects), 2)).tolist()
    return np.array(
        [
            _colour(thing, solid, *draws[k])
            for k, thing in enumerate(street.objects)
            for solid in thing.solids
        ]
    )


def _pick(palette: tuple[_Colour, ...], draw: float) -> _Colour:
    return palette[int(draw * len(palette))]


def _colour(thing: SceneObject, solid: Solid, first: float, second: float) -> _Colour:
    made_of, high = solid.material, solid.centre[2]
    if made_of == Material.CAR_PAINT:
        if thing.name == "construction_vehicle":
            return 0.80, 0.45, 0.03
        return _pick(_BUSES if thing.name == "bus" else _PAINTS, first)
    if made_of == Material.CLOTH:
        low = solid.centre[2] < 0.45 * thing.size[2]
        return _pick(_TROUSERS, second) if low else _pick(_SHIRTS, first)
    if made_of in (Material.FACADE, Material.WALL):
        red, green, blue = _pick(_FRONTS, first)
        if made_of == Material.WALL:  # cornices and bays are of paler stone
            return 0.5 * red + 0.28, 0.5 * green + 0.27, 0.5 * blue + 0.25
        return red, green, blue
    if made_of == Material.ROOF:
        return _pick(_ROOFS, second)
    if made_of == Material.RETROREFLECTOR and thing.name == "sign":
        return (0.03, 0.10, 0.45) if first < 0.5 else (0.70, 0.03, 0.03)
    if made_of == Material.RETROREFLECTOR and high > 0.6 and thing.name != "traffic_cone":
        return (0.85, 0.85, 0.80) if solid.centre[0] > 0 else (0.55, 0.02, 0.02)
    if made_of == Material.PLASTIC:
        if thing.name == "traffic_cone":
            return 0.85, 0.22, 0.02
        if thing.name == "barrier":
            return (0.70, 0.06, 0.04) if high < 0.5 else (0.78, 0.76, 0.72)
        if thing.name == "traffic_light":
            return 0.02, 0.022, 0.02
        if thing.name == "pedestrian":
            return _pick(_HAIR, second)
        return _pick(_SHIRTS, second)
    if made_of == Material.GLASS and thing.name == "traffic_light":
        return _RED if high > 3.05 else _AMBER if high > 2.8 else _GREEN
    if made_of == Material.METAL and thing.name in ("truck", "trailer") and solid.size[2] > 1.0:
        return _pick(((0.68, 0.68, 0.66), (0.50, 0.52, 0.54), (0.14, 0.24, 0.42)), second)
    if made_of == Material.FOLIAGE:
        warm, lush = 0.6 + 0.9 * first, 0.75 + 0.5 * second
        return 0.07 * warm * lush, 0.15 * lush, 0.025 * lush
    return _PLAIN[made_of]
