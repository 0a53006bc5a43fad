"""nuScenes and KITTI `.bin` files: bare little-endian rows without a header.

Which layout the rows have is told by the caller, or the only plausible one is taken.

A `.bin` file is bare numbers. Its size may divide by several row sizes (every KITTI file whose
point count is a multiple of five also divides into nuScenes rows), so the size alone proves
nothing. A layout is plausible where, in every row whose values are all finite,

- |x|, |y|, |z| < 1000 m,
- five columns: 0 ≤ intensity ≤ 255, and the last column is either a ring number (an integer,
  0..127) or a time lag (−10..10 s);
- four columns: 0 ≤ intensity ≤ 1,

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
    rows are x, y, z, intensity 0..1: intensity × 255, time lag 0.

    Args:
        path: the file.
        columns: 4 or 5 where the caller knows; None decides by plausibility (see `_layout`).
        dtype: "float32" or "float16" where the caller knows.
        intensity_scale: factor on the intensity instead of 1 (five columns) or 255 (four).

    Raises:
        PointsError: empty file, size that fits no layout, or no plausible layout.
    """
    raw = read_content(path, "frame")
    if not raw:
        raise PointsError(f"{path}: the file is empty (0 bytes); it must hold at least one point")
    layout = _choose(path, raw, columns, dtype)
    rows = rows_in_layout(raw, layout)
    points = np.zeros((len(rows), 5), np.float32)
    points[:, :4] = rows[:, :4]
    if layout.columns == 5 and not is_ring(rows[np.isfinite(rows[:, 4]), 4]):
        points[:, 4] = rows[:, 4]
    scale = (255.0 if layout.columns == 4 else 1.0) if intensity_scale is None else intensity_scale
    points[:, 3] *= np.float32(scale)
    _check_intensity(path, points[:, 3], layout, scale)
    return points


def _choose(path: Path, raw: bytes, columns: int | None, dtype: str | None) -> Layout:
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
    reasons = {layout: why_implausible(rows_in_layout(raw, layout)) for layout in whole}
    fitting = [layout for layout, reason in reasons.items() if reason is None]
    if len(fitting) == 1:
        return fitting[0]
    hint = "say the layout with columns=4 or 5 and dtype='float32' or 'float16'"
    if fitting:
        if path.name.endswith(".pcd.bin") and LAYOUTS[0] in fitting:
            return LAYOUTS[0]  # nuScenes' own extension settles it
        raise PointsError(
            f"{path}: {len(raw)} bytes can be read as "
            f"{' and as '.join(layout.label for layout in fitting)}; {hint}"
        )
    tried = "; ".join(f"{layout.label}: {reason}" for layout, reason in reasons.items())
    uneven = [layout.label for layout in wanted if layout not in reasons]
    if uneven:
        tried += f"; {len(raw)} bytes is not a multiple of the row size of {', '.join(uneven)}"
    raise PointsError(
        f"{path}: {len(raw)} bytes fit no layout tried ({tried}); "
        f"the file is truncated, damaged or no point cloud, or {hint}"
    )


def _check_intensity(
    path: Path, intensity: npt.NDArray[np.float32], layout: Layout, scale: float
) -> None:
    finite = intensity[np.isfinite(intensity)]
    low, high = float(finite.min(initial=0.0)), float(finite.max(initial=0.0))
    if low < 0.0 or high > 255.5:
        raise PointsError(
            f"{path}: read as {layout.label} with intensity × {scale:g}, the intensity spans "
            f"{low:.4g}..{high:.4g}, not 0..255; check columns= and dtype=, or set intensity_scale="
        )


def rows_in_layout(raw: bytes, layout: Layout) -> npt.NDArray[np.float32]:
    """The file's bytes as float32 rows; `len(raw)` must be a multiple of `layout.row_bytes`."""
    flat = np.frombuffer(raw, np.dtype(layout.dtype).newbyteorder("<"))
    return flat.astype(np.float32).reshape(-1, layout.columns)


def why_implausible(rows: npt.NDArray[np.float32]) -> str | None:
    """The first rule of the module's docstring that `rows` breaks, or None where all hold."""
    finite = np.isfinite(rows).all(axis=1)
    if finite.sum() * 2 < len(rows):
        return f"{len(rows) - int(finite.sum())} of {len(rows)} rows hold NaN or Inf"
    good = rows[finite]
    reach = float(np.abs(good[:, :3]).max(initial=0.0))
    if reach >= _COORDINATE_LIMIT:
        return f"coordinates reach {reach:.3g} m"
    intensity = good[:, 3]
    top = 255.0 if rows.shape[1] == 5 else 1.0
    low, high = float(intensity.min(initial=0.0)), float(intensity.max(initial=0.0))
    if low < 0.0 or high > top:
        return f"intensity would span {low:.3g}..{high:.3g}, not 0..{top:.0f}"
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
