"""The bird's-eye view: the frame, float features, quantized features, and their difference."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt
from matplotlib import colormaps
from matplotlib.colors import Colormap, ListedColormap

from bevfusion_quant.pictures._style import GREY, figure, save

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

    from bevfusion.model import LidarConfig
    from bevfusion_quant.measure import StageMaps

__all__ = ["bev_picture"]

Map = npt.NDArray[np.floating[Any]]
Draw = Callable[["Figure", "Axes"], None]
# Without the darkest part, which would pass for the background.
GLOW = ListedColormap(colormaps["magma"](np.linspace(0.17, 1, 256)))
# Metres: cells of the input's picture.
CELL = 0.3


def bev_picture(
    folder: Path, config: LidarConfig, points: Map, kind: str, stage: StageMaps
) -> Path:
    """Write `bev.png`: the frame, and one stage in float, quantized and their difference.

    Cells without anything stay dark. Float and quantized share one colour scale, from the 1st to
    the 99.5th percentile of the float map; the difference has its own, from 0.

    Args:
        folder: Where to write.
        config: Gives the metres.
        points: float [n, 3] of the frame, x, y, z in metres.
        kind: What they are: "points" or "voxels".
        stage: A bird's-eye view of both models.
    """
    error = np.abs(stage.difference_map)
    scale, worst = _span(stage.float_map, 1), (0.0, _span(error, 0)[1])
    low, high = config.point_cloud_range[2], config.point_cloud_range[5]
    row = stage.row
    sqnr = "equal" if row.sqnr_db is None else f"SQNR {row.sqnr_db:.1f} dB"
    panels: tuple[Draw, ...] = (
        _panel(
            config,
            _heights(config, points),
            f"Input: {len(points):,} {kind}, highest of each column",
            "height z [m]",
            "viridis",
            (low, high),
        ),
        _panel(config, stage.float_map, f"{row.title}: float", stage.quantity, GLOW, scale),
        _panel(
            config,
            stage.quantized_map,
            f"{row.title}: fake-quantized",
            stage.quantity,
            GLOW,
            scale,
        ),
        _panel(
            config,
            error,
            f"Difference, own scale (all frames: {sqnr})",
            stage.difference_quantity,
            GLOW,
            worst,
        ),
    )
    with figure(12.4, 10.6) as whole:
        for axes, draw in zip(whole.subplots(2, 2).flat, panels, strict=True):
            draw(whole, axes)
        return save(whole, folder / "bev.png")


def _panel(
    config: LidarConfig,
    values: Map,
    title: str,
    label: str,
    colours: str | Colormap,
    limits: tuple[float, float],
) -> Draw:
    low_x, low_y, _, high_x, high_y, _ = config.point_cloud_range

    def draw(whole: Figure, axes: Axes) -> None:
        axes.set_facecolor("#0b0c10")
        image = axes.imshow(
            values.T,
            origin="lower",
            extent=(low_x, high_x, low_y, high_y),
            cmap=colours,
            vmin=limits[0],
            vmax=limits[1],
            interpolation="nearest",
        )
        axes.plot(0, 0, marker="+", color="white", markersize=7, markeredgewidth=1.2, alpha=0.8)
        axes.set_title(title)
        axes.set_xlabel("x [m]")
        axes.set_ylabel("y [m]")
        axes.tick_params(color=GREY)
        above = bool(np.nanmax(values, initial=limits[0]) > limits[1])
        below = bool(np.nanmin(values, initial=limits[1]) < limits[0])
        extend = {(0, 0): "neither", (0, 1): "max", (1, 0): "min", (1, 1): "both"}[below, above]
        bar = whole.colorbar(
            image, ax=axes, fraction=0.046, pad=0.02, extend=extend, extendfrac=0.03
        )
        bar.set_label(label)
        bar.outline.set_visible(False)

    return draw


def _span(values: Map, percentile: float) -> tuple[float, float]:
    """A low percentile and the 99.5th of the cells that have a value."""
    known = values[np.isfinite(values)]
    if not known.size or known.max() <= 0:
        return 0.0, 1.0
    low, high = np.percentile(known, [percentile, 99.5])
    return float(low), max(float(high), float(low) + 1e-6)


def _heights(config: LidarConfig, points: Map) -> Map:
    """Highest point of each cell, [x, y]; NaN where there is none."""
    low_x, low_y, _, high_x, high_y, _ = config.point_cloud_range
    cells = (round((high_x - low_x) / CELL), round((high_y - low_y) / CELL))
    x, y = (
        np.clip(((points[:, axis] - low) / CELL).astype(np.int64), 0, cells[axis] - 1)
        for axis, low in enumerate((low_x, low_y))
    )
    top = np.full(cells, -np.inf)
    np.maximum.at(top, (x, y), points[:, 2])
    return np.where(np.isfinite(top), top, np.nan)
