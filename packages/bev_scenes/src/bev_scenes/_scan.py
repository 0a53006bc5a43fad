"""Several sweeps of a street by a LiDAR on a moving vehicle, in the newest sweep's frame."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from bev_data.points import Labels
from bev_scenes._candidates import candidates_by_column
from bev_scenes._conditions import CLEAR, Conditions
from bev_scenes._labels import Pose, into_frame, labels_of, scanner_pose
from bev_scenes._raycast import GROUND, NOTHING, cast_rays
from bev_scenes._solid_arrays import SolidArrays, columns_of, gather, in_order, place
from bev_scenes._solids import REFLECTIVITY, Material, units
from bev_scenes._street import Street

# A spinning LiDAR: its beams, its pace and its errors.


@dataclass(frozen=True)
class SpinningLidar:
    """A scanner with the elevations and the pace of the HDL-32E that nuScenes drove with.

    Args:
        beams: lasers, evenly spaced between the two elevations.
        azimuth_steps: firings per turn.
        elevation: lowest and highest beam [degrees].
        max_range: [m].
        height: of the scanner above the ground [m].
        range_noise: standard deviation of the range [m]; ranges come in steps of 2 mm.
        sweep_time: between two turns [s].

    Raises:
        ValueError: numbers that make no scanner.
    """

    beams: int = 32
    azimuth_steps: int = 1084
    elevation: tuple[float, float] = (-30.67, 10.67)
    max_range: float = 70.0
    height: float = 1.84
    range_noise: float = 0.015
    sweep_time: float = 0.05

    def __post_init__(self) -> None:
        if self.beams < 1 or self.azimuth_steps < 4:
            raise ValueError(
                f"beams={self.beams}, azimuth_steps={self.azimuth_steps}: at least 1 and 4"
            )
        low, high = self.elevation
        if not -90.0 < low <= high < 90.0:
            raise ValueError(f"elevation={self.elevation}: expected -90 < lowest ≤ highest < 90")
        if self.max_range <= 1.0 or self.height <= 0.0 or self.sweep_time <= 0.0:
            raise ValueError(
                f"max_range={self.max_range}, height={self.height}, sweep_time={self.sweep_time}: "
                "expected a range above 1 m, positive height and time"
            )
        if self.range_noise < 0.0:
            raise ValueError(f"range_noise={self.range_noise}: must not be negative")


_REFLECTIVITY = np.array([REFLECTIVITY[m][0] for m in Material])
_LOSS = np.array([REFLECTIVITY[m][1] for m in Material])


@dataclass(frozen=True, eq=False)
class Scan:
    """Result of the scanner, in the frame of the newest sweep (x right, y forward, z up).

    Args:
        points: float32 [points, 5], x, y, z [m], intensity 0..255, time lag [s].
        objects: int32 [points], index into `Street.objects`, -1 for the ground, -2 for drops.
        materials: uint8 [points], `Material` of each return; 255 for drops.
        labels: labels of objects with at least one return: tight boxes at time 0, velocities over
            ground, visible share of the silhouette (see `visible_shares`), and returns of all
            sweeps, also those of a trail outside the box.
    """

    points: npt.NDArray[np.float32]
    objects: npt.NDArray[np.int32]
    materials: npt.NDArray[np.uint8]
    labels: Labels


def scan_street(
    street: Street,
    lidar: SpinningLidar | None = None,
    *,
    sweeps: int = 10,
    seed: int = 0,
    conditions: Conditions = CLEAR,
) -> Scan:
    """Scan `street` with the newest sweep at time 0 and the others before it.

    Each sweep is taken at one instant, objects and vehicle at that instant's places; its points
    are moved into the newest sweep's frame by the vehicle's motion alone, so that moving objects
    leave a trail, as accumulated nuScenes sweeps do.

    Args:
        street: the scene.
        lidar: the scanner; the default one where None.
        sweeps: how many.
        seed: of noise, dropout and the first firing's angle.
        conditions: weather and faults.

    Raises:
        ValueError: fewer than one sweep, negative seed.
    """
    if sweeps < 1 or seed < 0:
        raise ValueError(f"sweeps={sweeps}, seed={seed}: at least one sweep, no negative seed")
    lidar = lidar or SpinningLidar()
    solids = gather(street)
    now = scanner_pose(street, lidar.height)
    parts = []
    for sweep in range(sweeps):
        rng = np.random.Generator(np.random.PCG64(np.random.SeedSequence([seed, 2, sweep])))
        parts.append(_one_sweep(street, lidar, solids, sweep, now, rng, conditions, seed))
    points, objects, materials = (np.concatenate(column) for column in zip(*parts, strict=True))
    return Scan(points, objects, materials, labels_of(street, solids, objects, now))


def _one_sweep(
    street: Street,
    lidar: SpinningLidar,
    solids: SolidArrays,
    sweep: int,
    now: Pose,
    rng: np.random.Generator,
    conditions: Conditions,
    seed: int,
) -> tuple[npt.NDArray[np.float32], npt.NDArray[np.int32], npt.NDArray[np.uint8]]:
    lag = sweep * lidar.sweep_time
    origin, _ = scanner_pose(street, lidar.height, -lag)
    columns, beams = lidar.azimuth_steps, lidar.beams
    step = 2 * math.pi / columns
    phase = float(rng.random()) * step
    azimuth = units(phase + step * np.arange(columns, dtype=np.float64))
    low, high = lidar.elevation
    elevation = units(np.linspace(low, high, beams) * (math.pi / 180.0))
    chance, luck, fade = rng.random((3, columns, beams))
    noise = rng.standard_normal((columns, beams))
    flicker = rng.standard_normal((columns, beams))
    drop, sent_back = conditions.drops((columns, beams), lidar.max_range, rng)

    centre = place(street, solids, -lag) - origin
    order, near, first, last = columns_of(centre, solids, phase, step)
    distance, hit, material, cosine = cast_rays(
        azimuth,
        elevation,
        candidates_by_column(first, last, columns),
        in_order(solids, centre, order, near),
        origin,
        street.ground.parameters,
        street.ground.bumps,
        chance,
        lidar.max_range,
    )
    distance = np.minimum(distance, lidar.max_range)  # of rays that hit nothing
    gain = np.append(solids.gain[order], 1.0)[np.where(hit >= 0, hit, len(order))]
    back = _REFLECTIVITY[material] * gain
    # A dark or grazed surface is lost sooner: the range at which half the light it would need
    # comes back, with a soft edge over its last fifth.
    kept = luck >= _LOSS[material]
    kept &= _is_seen(back * (0.12 + 0.88 * cosine), distance, fade, conditions)
    kept &= (hit != NOTHING) & (distance > 1.0)
    wet = (drop > 1.0) & (drop < distance) & _is_seen(sent_back, drop, fade, conditions)
    distance = np.where(wet, drop, distance)
    kept = (kept | wet) & conditions.open_beams(beams, seed)
    measured = np.round((distance + lidar.range_noise * noise) * 500.0) / 500.0
    intensity = 255.0 * back * (0.35 + 0.65 * cosine) * (1.0 + 0.22 * flicker)
    intensity = np.where(wet, 255.0 * sent_back, intensity)
    intensity *= np.exp(-2.0 * conditions.extinction * distance)
    intensity = np.clip(np.round(intensity), 0.0, 255.0)

    at, beam = np.nonzero(kept)  # firing by firing, lowest beam first, as nuScenes files
    flat = measured[kept] * elevation[beam, 0]
    world = origin + np.stack(
        [flat * azimuth[at, 0], flat * azimuth[at, 1], measured[kept] * elevation[beam, 1]], 1
    )
    points = np.empty((len(at), 5), np.float32)
    seen = into_frame(world, now)
    points[:, :3] = conditions.displaced(seen, rng) if sweep else seen
    points[:, 3] = intensity[kept]
    points[:, 4] = lag
    owner = np.append(solids.owner[order], GROUND)
    objects = np.maximum(owner[np.where(hit >= 0, hit, len(order))], -1)
    objects, material = np.where(wet, -2, objects), np.where(wet, 255, material)
    return points, objects[kept].astype(np.int32), material[kept].astype(np.uint8)


def _is_seen(
    light: npt.NDArray[np.float64],
    distance: npt.NDArray[np.float64],
    fade: npt.NDArray[np.float64],
    conditions: Conditions,
) -> npt.NDArray[np.bool_]:
    """Whether enough light comes back: it falls with the distance's square and in wet air."""
    visible = 75.0 * np.sqrt(light / 0.05)
    path = distance * np.exp(conditions.extinction * distance)
    return np.asarray((visible - path) > 0.2 * visible * fade)
