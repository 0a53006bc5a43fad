"""`.bin` files: bare little-endian rows without a header.

The caller says the layout, or the only plausible one is taken. A `.bin` file is bare numbers. Its
size may divide by several row sizes (every KITTI file whose point count is a multiple of five also
divides into nuScenes rows), so the size alone proves nothing. A layout is plausible if at least
half of its rows are finite and their values pass the rules of `_columns`; four columns, if the
caller does not say four, only with intensities of 0..1. A wrong layout fails at once: it puts
coordinates, which are negative half of the time, where the intensity should be.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt

from bev_data.points._columns import Said, converted, fault, points_of, roles_in_order
from bev_data.points._frame import PointsError
from bevquant_quantizers.documents import read_content

_NAMES = {5: "nuScenes, ", 4: "KITTI, "}


@dataclass(frozen=True)
class Layout:
    """Row layout of a `.bin` file.

    Args:
        columns: numbers per row.
        dtype: "float32", "float16" or "float64", little-endian.
    """

    columns: int
    dtype: str

    @property
    def row_bytes(self) -> int:
        """Bytes of one row."""
        return self.columns * np.dtype(self.dtype).itemsize

    @property
    def label(self) -> str:
        """How messages call it."""
        return f"{_NAMES.get(self.columns, '')}{self.columns} × {self.dtype}"

    def rows(self, raw: bytes) -> npt.NDArray[np.floating]:
        """The file's bytes as rows; `len(raw)` must be a multiple of `row_bytes`."""
        flat = np.frombuffer(raw, np.dtype(self.dtype).newbyteorder("<"))
        return flat.reshape(-1, self.columns)


def read_binary(
    path: Path, said: Said, dtype: str | None, intensity_scale: float | None
) -> npt.NDArray[np.float32]:
    """Points of a `.bin` file as float32 [points, 5].

    Args:
        path: the file.
        said: the columns, or their number, if the caller knows.
        dtype: "float32", "float16" or "float64" if the caller knows.
        intensity_scale: factor on the intensity instead of the rules'.

    Raises:
        PointsError: empty file, size that fits no layout, no plausible layout, or as `points_of`.
    """
    raw = read_content(path, "frame")
    if not raw:
        raise PointsError(f"{path}: the file is empty (0 bytes); it must hold at least one point")
    layout = _choose(path, raw, said, dtype, intensity_scale)
    return points_of(path, layout.rows(raw), said, layout.label, intensity_scale)


def _choose(path: Path, raw: bytes, said: Said, dtype: str | None, scale: float | None) -> Layout:
    counts = (5, 4) if said is None else (said if isinstance(said, int) else len(said),)
    wanted = [
        Layout(count, kind)
        for kind in ((dtype,) if dtype else ("float32", "float16"))
        for count in counts
        # Four float16 columns are nobody's convention: only where the caller says so.
        if said is not None or dtype or (count, kind) != (4, "float16")
    ]
    whole = [layout for layout in wanted if len(raw) % layout.row_bytes == 0]
    if not whole:
        sizes = ", ".join(f"{layout.row_bytes} ({layout.label})" for layout in wanted)
        raise PointsError(
            f"{path}: {len(raw)} bytes is not a multiple of any row size tried: {sizes}; "
            "the file is truncated or has another layout"
        )
    if said is not None and dtype is not None:
        return whole[0]
    reasons = {layout: _why_implausible(path, raw, layout, said, scale) for layout in whole}
    fitting = [layout for layout, reason in reasons.items() if reason is None]
    if len(fitting) == 1:
        return fitting[0]
    hint = "say the layout with columns=4 or columns=5 and dtype='float32' or dtype='float16'"
    if fitting:
        if path.name.endswith(".pcd.bin") and Layout(5, "float32") in fitting:
            return Layout(5, "float32")  # nuScenes' own extension settles it
        raise PointsError(
            f"{path}: {len(raw)} bytes can be read as "
            f"{' and as '.join(layout.label for layout in fitting)}; {hint}"
        )
    if said is None:
        hint += ", or list other columns, such as columns='x,y,z,intensity,ring,-'"
        four = [layout for layout in whole if layout.columns == 4]
        if any(_why_implausible(path, raw, layout, 4, scale) is None for layout in four):
            hint += "; intensities that are 0..255 already are read with columns=4"
    tried = "; ".join(f"{layout.label}: {reason}" for layout, reason in reasons.items())
    uneven = [layout.label for layout in wanted if layout not in reasons]
    if uneven:
        tried += f"; {len(raw)} bytes is not a multiple of the row size of {', '.join(uneven)}"
    raise PointsError(
        f"{path}: {len(raw)} bytes fit no layout tried ({tried}); "
        f"the file is truncated, damaged or no point cloud, or {hint}"
    )


def _why_implausible(
    path: Path, raw: bytes, layout: Layout, said: Said, scale: float | None
) -> str | None:
    """The first rule that the file breaks in this layout, or None."""
    rows = layout.rows(raw)
    finite = np.isfinite(rows).all(axis=1)
    if finite.sum() * 2 < len(rows):
        return f"{len(rows) - int(finite.sum())} of {len(rows)} rows hold NaN or Inf"
    good = rows[finite]
    roles = roles_in_order(said, layout.columns)
    values = {role: good[:, i] for i, role in enumerate(roles) if role not in ("ring", "-")}
    reason: str | None = None
    for factor in dict.fromkeys((scale, None)):  # a wrong factor is reported later, as such
        try:
            points, used = converted(path, values, factor)
        except PointsError as error:
            return error.reason
        reason = fault(points)
        if reason is None and said is None and layout.columns == 4 and (used, factor) == (1, None):
            reason = f"intensity spans 0..{points[:, 3].max():.4g}, not 0..1"
        if reason is None:
            return None
    return str(reason).partition(";")[0]
