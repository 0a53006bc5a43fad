"""Arrays and pictures as text inside the page, small and the same for the same input."""

from __future__ import annotations

import base64
import io
import zlib
from typing import Any

import numpy as np
import numpy.typing as npt

# Twelve bits: a step is a fortieth of a per cent of the map's range, finer than the readout.
LEVELS = 4095
EMPTY = 0xFFFF
JPEG_QUALITY = 80


def rounded(value: float, digits: int = 6) -> float:
    """A float to that many significant digits, so that JSON stays short."""
    return float(f"{float(value):.{digits}g}")


def rounded_or_none(value: float, digits: int = 6) -> float | None:
    """The same; None for NaN and infinity, which JSON does not know."""
    return rounded(value, digits) if np.isfinite(value) else None


def packed_map(values: npt.NDArray[np.floating[Any]]) -> dict[str, Any]:
    """A map in 4096 levels between its smallest and its largest value.

    `data` is base64 of zlib of the high bytes, then the low bytes, of uint16 in row order; cell
    i holds low + level·(high − low)/4095, or nothing where the level is 65535 (not finite).

    Args:
        values: float [rows, columns].
    """
    known = np.isfinite(values)
    low = float(values[known].min()) if known.any() else 0.0
    high = float(values[known].max()) if known.any() else 0.0
    span = (high - low) or 1.0
    levels = np.full(values.shape, EMPTY, np.uint16)
    levels[known] = np.rint((values[known].astype(np.float64) - low) / span * LEVELS)
    planes = np.concatenate([levels >> 8, levels & 0xFF], axis=None).astype(np.uint8)
    rows, columns = values.shape
    return {
        "rows": rows,
        "columns": columns,
        "low": rounded(low, 8),
        "high": rounded(low + span, 8),
        "data": _packed(planes),
    }


def packed_shares(shares: npt.NDArray[np.floating[Any]]) -> dict[str, Any]:
    """A picture of one byte a cell: 0 is empty, 1 … 255 the shares 0 … 1; NaN is empty."""
    known = np.isfinite(shares)
    levels = np.zeros(shares.shape, np.uint8)
    levels[known] = np.rint(1 + np.clip(shares[known], 0, 1) * 254)
    return {"rows": shares.shape[0], "columns": shares.shape[1], "data": _packed(levels)}


def _packed(values: npt.NDArray[np.uint8]) -> str:
    return base64.b64encode(zlib.compress(values.tobytes(), 9)).decode("ascii")


def jpeg(image: npt.NDArray[np.uint8], width: int) -> tuple[str, int, int]:
    """An RGB picture as base64 of JPEG, at most `width` pixels wide, and its width and height."""
    from PIL import Image

    picture = Image.fromarray(image)
    if picture.width > width:
        height = max(1, round(picture.height * width / picture.width))
        picture = picture.resize((width, height), Image.Resampling.LANCZOS)
    file = io.BytesIO()
    picture.save(file, "JPEG", quality=JPEG_QUALITY, optimize=True)
    data = base64.b64encode(file.getvalue()).decode("ascii")
    return data, picture.width, picture.height
