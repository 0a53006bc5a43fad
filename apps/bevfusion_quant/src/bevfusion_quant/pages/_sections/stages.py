"""Feature maps of each stage: float, quantized, difference."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from bevfusion_quant.pages._content import ReportContent, ReportStage, arranged
from bevfusion_quant.pages._format import packed_map, rounded
from bevfusion_quant.pages._page import Section

ORDER = 30
Map = npt.NDArray[np.floating[Any]]
COLUMNS = 3
CLIPPED = 99.5  # percentile: one hot cell must not turn the rest of a map flat


def section(content: ReportContent) -> Section | None:
    """Tabs, one for each stage; without a script all stages are shown below each other."""
    if not content.stages:
        return None
    cameras = [camera.name for camera in content.scene.cameras] if content.scene else []
    data = [
        {
            "name": stage.name,
            "title": stage.title,
            "sqnr_db": stage.sqnr_db,
            "cosine": stage.cosine,
            "wide": stage.extent is None,
            "maps": (
                ("Float", stage.quantity),
                ("Quantized", stage.quantity),
                ("Difference", stage.difference_quantity),
            ),
        }
        for stage in content.stages
    ]
    script = [_drawn(stage, cameras) for stage in content.stages]
    return Section("stages", "Feature maps", data, script)


def _drawn(stage: ReportStage, cameras: Sequence[str]) -> dict[str, Any]:
    """The maps in display order, first row on top, and the limits of the two colour scales."""
    difference = stage.difference_map
    if difference is None:
        difference = stage.quantized_map - stage.float_map
    maps = [_shown(m, stage, cameras) for m in (stage.float_map, stage.quantized_map, difference)]
    return {
        "extent": None if stage.extent is None else [rounded(v) for v in stage.extent],
        "maps": [packed_map(m) for m in maps],
        "scales": [_scale(np.stack(maps[:2])), _scale(maps[2])],
    }


def _shown(values: Map, stage: ReportStage, cameras: Sequence[str]) -> Map:
    values = np.asarray(values, np.float32)
    if stage.extent is not None:
        return values.T[::-1]  # [x, y] with y up
    if values.ndim == 2:
        return values
    count, rows, columns = values.shape
    order = arranged(cameras) if len(cameras) == count else list(range(count))
    across = min(COLUMNS, count)
    down = -(-count // across)
    tiled = np.full((down * (rows + 1) - 1, across * (columns + 1) - 1), np.nan, np.float32)
    for place, index in enumerate(order):
        top, left = place // across * (rows + 1), place % across * (columns + 1)
        tiled[top : top + rows, left : left + columns] = values[index]
    return tiled


def _scale(values: Map) -> list[float]:
    """Limits of a colour scale: around zero where values have both signs."""
    known = values[np.isfinite(values)]
    if not known.size:
        return [0.0, 1.0]
    low, high = (float(v) for v in np.percentile(known, [100 - CLIPPED, CLIPPED]))
    if known.min() < 0 < high:
        reach = float(np.percentile(np.abs(known), CLIPPED)) or 1.0
        return [-rounded(reach), rounded(reach)]
    if 0 <= low < 0.25 * high:
        low = 0.0
    return [rounded(low), rounded(high if high > low else low + 1.0)]
