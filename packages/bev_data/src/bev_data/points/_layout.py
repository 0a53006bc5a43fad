"""Which row layout a headerless `.bin` file has: told by the caller, or the only plausible one.

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

import numpy as np
import numpy.typing as npt

__all__ = ["LAYOUTS", "Layout", "rows_in_layout", "why_implausible"]


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
