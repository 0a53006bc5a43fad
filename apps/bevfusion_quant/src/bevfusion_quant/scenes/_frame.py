"""The embedded default frame: a street from a seed, scanned."""

from __future__ import annotations

from bevfusion_quant.points import Frame
from bevfusion_quant.scenes._lidar import SpinningLidar
from bevfusion_quant.scenes._scan import scan_street
from bevfusion_quant.scenes._street import build_street

__all__ = ["street_frame"]


def street_frame(
    seed: int = 0,
    *,
    beams: int = 32,
    sweeps: int = 10,
    azimuth_steps: int = 1084,
    max_range: float = 70.0,
    scan_seed: int | None = None,
) -> Frame:
    """A street seen by a spinning LiDAR, ray-cast; needs no file and no download.

    The frame is that of nuScenes' scanner: x right, y forward, z up, the ground about 1.84 m
    below the origin. The same arguments give the same frame, bit for bit, with one numpy version
    (its generators decide the noise).

    Args:
        seed: of the street: every seed is another street.
        beams: lasers, evenly spaced from −30.67° to 10.67°.
        sweeps: turns, the newest at time lag 0, 0.05 s apart.
        azimuth_steps: firings per turn.
        max_range: [m].
        scan_seed: of noise and dropout; `seed` where None.

    Returns:
        A frame with points and with labels (boxes of labelled objects that have returns).

    Raises:
        ValueError: numbers that make no street or no scanner.

    Examples:
        >>> frame = street_frame(beams=8, sweeps=1, azimuth_steps=90)
        >>> frame.points.shape[1], set(frame.labels.names) <= {
        ...     "car", "truck", "bus", "trailer", "barrier", "traffic_cone",
        ...     "pedestrian", "bicycle", "motorcycle"}
        (5, True)
    """
    if seed < 0:
        raise ValueError(f"seed={seed}: must not be negative")
    lidar = SpinningLidar(beams=beams, azimuth_steps=azimuth_steps, max_range=max_range)
    scan = scan_street(
        build_street(seed), lidar, sweeps=sweeps, seed=seed if scan_seed is None else scan_seed
    )
    return Frame(f"street_{seed}", scan.points, labels=scan.labels)
