"""nuScenes and KITTI `.bin` files: bare little-endian rows without a header."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import numpy.typing as npt

from bev_data.points._errors import PointsError
from bev_data.points._layout import (
    LAYOUTS,
    Layout,
    is_ring,
    rows_in_layout,
    why_implausible,
)
from bevquant_quantizers.documents import read_content

__all__ = ["read_binary"]


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
