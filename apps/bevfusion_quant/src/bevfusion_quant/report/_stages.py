"""Feature maps of each stage: float, quantized, difference."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from bevfusion_quant.report._camera_views import arranged
from bevfusion_quant.report._encode import packed_map, rounded
from bevfusion_quant.report._format import decibels, fixed
from bevfusion_quant.report._html import Html, tag
from bevfusion_quant.report._section import Section

if TYPE_CHECKING:
    from bevfusion_quant.report._content import ReportStage

__all__ = ["stages_section"]

Map = npt.NDArray[np.floating[Any]]

COLUMNS = 3
TITLES = ("Float", "Quantized", "Difference")
CLIPPED = 99.5  # percentile: one hot cell must not turn the rest of a map flat


def stages_section(stages: Sequence[ReportStage], cameras: Sequence[str]) -> Section:
    """Tabs, one for each stage; without a script all stages are shown below each other."""
    tabs = tag(
        "div",
        *(_tab(stage, index) for index, stage in enumerate(stages)),
        role="tablist",
        aria_label="Stages",
        class_="tabs",
    )
    panels = [_panel(stage, index) for index, stage in enumerate(stages)]
    data = [_data(stage, cameras) for stage in stages]
    return Section("stages", "Feature maps", tag("div", tabs, *panels), data)


def _tab(stage: ReportStage, index: int) -> Html:
    return tag(
        "button",
        tag("span", stage.name),
        tag("span", decibels(stage.sqnr_db), class_="note"),
        type="button",
        role="tab",
        id=f"tab-{index}",
        aria_controls=f"stage-{index}",
        aria_selected="true" if index == 0 else "false",
        tabindex=0 if index == 0 else -1,
    )


def _panel(stage: ReportStage, index: int) -> Html:
    judged = f"SQNR {decibels(stage.sqnr_db)}, cosine {fixed(stage.cosine, 5)}"
    maps = [_map(stage, number) for number in range(len(TITLES))]
    where = "arrow keys or the pointer read single cells"
    return tag(
        "div",
        tag("h3", stage.title),
        tag("p", judged, class_="note"),
        tag(
            "div", *maps, class_="maps" + (" wide" if stage.extent is None else ""), tabindex=0,
            role="group", aria_label=f"Maps of {stage.title}: {where}",
        ),
        tag("output", "Point at a map, or focus the maps and use the arrow keys, to read values.",
            class_="readout", id=f"readout-{index}"),
        role="tabpanel", id=f"stage-{index}", aria_labelledby=f"tab-{index}", class_="stage",
        data_stage=index,
    )  # fmt: skip


def _map(stage: ReportStage, number: int) -> Html:
    quantity = stage.difference_quantity if number == 2 else stage.quantity
    return tag(
        "figure",
        tag("figcaption", TITLES[number]),
        tag(
            "div",
            tag("canvas", width=1, height=1, role="img",
                aria_label=f"{TITLES[number]} map of {stage.title}"),
            tag("span", class_="cross", hidden=True),
            class_="stack",
        ),
        tag("div", tag("canvas", width=256, height=1, aria_hidden="true"),
            tag("span"), tag("span"), tag("span"), class_="scale"),
        tag("p", quantity, class_="note"),
        data_map=number,
    )  # fmt: skip


def _data(stage: ReportStage, cameras: Sequence[str]) -> dict[str, Any]:
    """The maps as they are shown, first row on top, and the ends of the two colour scales."""
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
    """Both ends of a colour scale: around zero where values have both signs."""
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
