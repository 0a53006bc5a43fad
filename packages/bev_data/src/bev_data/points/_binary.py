"""nuScenes and KITTI `.bin` files: bare little-endian rows without a header.

Which layout the rows have is told by the caller, or the only plausible one is taken.

A `.bin` file is bare numbers. Its size may divide by several row sizes (every KITTI file whose
point count is a multiple of five also divides into nuScenes rows), so the size alone proves
nothing. A layout is plausible where, in every row whose values are all finite,

- |x|, |y|, |z| < 1000 m,
- five columns: 0 ≤ intensity ≤ 255, and the last column is either a ring number (an integer,
  0..127) or a time lag (−10..10 s);
- four columns: 0 ≤ intensity ≤ 1, or ≤ 255 where the caller says four columns; where the caller
  says a scale, 0 ≤ intensity × scale ≤ 255,

and at least half of the rows are finite. A wrong layout fails at once: it puts coordinates, which
are negative half of the time, where the intensity should be.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt

from bev_data.points._errors import PointsError
from bevquant_quantizers.documents import read_content


@dataclass(frozen=True)
class Layout:
    """Row layout of a `.bin` file.

    Args:
        columns: numbers per row, 4 (KITTI) or 5 (nuScenes).
        dtype: "float32" or "float16", little-endian.
        label: how messages call it.
    """

    columns: int
    dtype: str
    label: str

    @property
    def row_bytes(self) -> int:
        """Bytes of one row."""
        return self.columns * np.dtype(self.dtype).itemsize


LAYOUTS = (
    Layout(5, "float32", "nuScenes, 5 × float32"),
    Layout(4, "float32", "KITTI, 4 × float32"),
    Layout(5, "float16", "nuScenes, 5 × float16"),
    Layout(4, "float16", "KITTI, 4 × float16"),
)

_COORDINATE_LIMIT = 1000.0
_RING_LIMIT = 127
_TIME_LIMIT = 10.0


def read_binary(
    path: Path, columns: int | None, dtype: str | None, intensity_scale: float | None
) -> npt.NDArray[np.float32]:
    """Points of a `.bin` file as float32 [points, 5].

    nuScenes rows are x, y, z, intensity 0..255, ring: the ring becomes time lag 0, since the file
    is one sweep; a fifth column that is no ring number is kept as a time lag in seconds. KITTI
    rows are x, y, z, intensity 0..1: intensity × 255, time lag 0. Intensities of 0..255 in four
    columns are taken as they are where the caller says four columns.

    Args:
        path: the file.
        columns: 4 or 5 where the caller knows; None decides by plausibility (see `_layout`).
        dtype: "float32" or "float16" where the caller knows.
        intensity_scale: factor on the intensity instead of 1 (five columns) or 255 (four).

    Raises:
        PointsError: empty file, size that fits no layout, no plausible layout, or as `points_of`.
    """
    raw = read_content(path, "frame")
    if not raw:
        raise PointsError(f"{path}: the file is empty (0 bytes); it must hold at least one point")
    layout = _choose(path, raw, columns, dtype, intensity_scale)
    return points_of(path, rows_in_layout(raw, layout), layout.label, intensity_scale)


def points_of(
    path: Path, rows: npt.NDArray[np.float32], label: str, intensity_scale: float | None
) -> npt.NDArray[np.float32]:
    """Rows of four or five columns as points, by the same rules whatever file they are of.

    A fifth column that is a ring number becomes time lag 0. Without `intensity_scale`, four columns
    with intensities of 0..1 are KITTI's: × 255.

    Args:
        path: the file, for messages.
        rows: float32 [points, 4 or 5].
        label: how messages call the layout.
        intensity_scale: factor on the intensity.

    Raises:
        PointsError: an intensity outside of 0..255, or a time lag beyond 10 s.
    """
    points = np.zeros((len(rows), 5), np.float32)
    points[:, :4] = rows[:, :4]
    if rows.shape[1] == 5 and not is_ring(rows[np.isfinite(rows[:, 4]), 4]):
        points[:, 4] = rows[:, 4]
    scale = intensity_scale
    if scale is None:
        finite = rows[np.isfinite(rows[:, 3]), 3]
        scale = 255.0 if rows.shape[1] == 4 and finite.max(initial=0.0) <= 1.0 else 1.0
    points[:, 3] *= np.float32(scale)
    _check(path, points, label, scale)
    return points


def _choose(
    path: Path, raw: bytes, columns: int | None, dtype: str | None, scale: float | None
) -> Layout:
    wanted = [
        layout
        for layout in LAYOUTS
        if (columns is None or layout.columns == columns)
        and (dtype is None or layout.dtype == dtype)
        # Four float16 columns are nobody's convention: only where the caller says so.
        and (layout != LAYOUTS[3] or columns == 4 or dtype == "float16")
    ]
    whole = [layout for layout in wanted if len(raw) % layout.row_bytes == 0]
    if not whole:
        sizes = ", ".join(f"{layout.row_bytes} ({layout.label})" for layout in wanted)
        raise PointsError(
            f"{path}: {len(raw)} bytes is not a multiple of any row size tried: {sizes}; "
            "the file is truncated or has another layout"
        )
    if columns is not None and dtype is not None:
        return whole[0]
    reasons = {
        layout: why_implausible(rows_in_layout(raw, layout), _top(layout, columns, scale))
        for layout in whole
    }
    fitting = [layout for layout, reason in reasons.items() if reason is None]
    if len(fitting) == 1:
        return fitting[0]
    hint = "say the layout with columns=4 or columns=5 and dtype='float32' or dtype='float16'"
    if fitting:
        if path.name.endswith(".pcd.bin") and LAYOUTS[0] in fitting:
            return LAYOUTS[0]  # nuScenes' own extension settles it
        raise PointsError(
            f"{path}: {len(raw)} bytes can be read as "
            f"{' and as '.join(layout.label for layout in fitting)}; {hint}"
        )
    for layout in whole:
        if layout.columns == 4 and why_implausible(rows_in_layout(raw, layout), 255.0) is None:
            hint += "; intensities that are 0..255 already are read with columns=4"
    tried = "; ".join(f"{layout.label}: {reason}" for layout, reason in reasons.items())
    uneven = [layout.label for layout in wanted if layout not in reasons]
    if uneven:
        tried += f"; {len(raw)} bytes is not a multiple of the row size of {', '.join(uneven)}"
    raise PointsError(
        f"{path}: {len(raw)} bytes fit no layout tried ({tried}); "
        f"the file is truncated, damaged or no point cloud, or {hint}"
    )


def _top(layout: Layout, columns: int | None, scale: float | None) -> float:
    """The largest intensity that a layout may have in the file."""
    own = 255.0 if layout.columns == 5 or columns == 4 else 1.0
    return max(own, 255.5 / scale) if scale is not None and scale > 0 else own


def _check(path: Path, points: npt.NDArray[np.float32], label: str, scale: float) -> None:
    finite = points[np.isfinite(points).all(axis=1)]
    intensity, lag = finite[:, 3], float(np.abs(finite[:, 4]).max(initial=0.0))
    low, high = float(intensity.min(initial=0.0)), float(intensity.max(initial=0.0))
    if low < 0.0 or high > 255.5:
        raise PointsError(
            f"{path}: read as {label} with intensity × {scale:g}, the intensity spans "
            f"{low:.4g}..{high:.4g}, not 0..255; set intensity_scale= (255 by the sensor's largest "
            "intensity), or for a .bin check columns= and dtype="
        )
    if lag > _TIME_LIMIT:
        raise PointsError(
            f"{path}: read as {label}, the fifth column reaches {lag:.4g}: neither a ring number "
            f"(0..{_RING_LIMIT}) nor a time lag of up to {_TIME_LIMIT:g} s; write the seconds "
            "since the point was measured, or leave the column out"
        )


def rows_in_layout(raw: bytes, layout: Layout) -> npt.NDArray[np.float32]:
    """The file's bytes as float32 rows; `len(raw)` must be a multiple of `layout.row_bytes`."""
    flat = np.frombuffer(raw, np.dtype(layout.dtype).newbyteorder("<"))
    return flat.astype(np.float32).reshape(-1, layout.columns)


def why_implausible(rows: npt.NDArray[np.float32], top: float) -> str | None:
    """The first rule of the module's docstring that `rows` breaks, or None; intensity to `top`."""
    finite = np.isfinite(rows).all(axis=1)
    if finite.sum() * 2 < len(rows):
        return f"{len(rows) - int(finite.sum())} of {len(rows)} rows hold NaN or Inf"
    good = rows[finite]
    reach = float(np.abs(good[:, :3]).max(initial=0.0))
    if reach >= _COORDINATE_LIMIT:
        return f"coordinates reach {reach:.3g} m"
    intensity = good[:, 3]
    low, high = float(intensity.min(initial=0.0)), float(intensity.max(initial=0.0))
    if low < 0.0 or high > top:
        return f"intensity would span {low:.3g}..{high:.3g}, not 0..{top:.4g}"
    if rows.shape[1] == 5 and not is_ring(good[:, 4]):
        worst = float(np.abs(good[:, 4]).max(initial=0.0))
        if worst > _TIME_LIMIT:
            return f"the last column is neither a ring number nor a time (it reaches {worst:.3g})"
    return None


def is_ring(column: npt.NDArray[np.float32]) -> bool:
    """Whether a fifth column numbers the laser (integers 0..127) instead of telling the time.

    A column of zeros is both; read as a ring it becomes time 0, the same thing.
    """
    inside = (column >= 0) & (column <= _RING_LIMIT)
    return bool((inside & (column == np.floor(column))).all())
