"""A comparison as PNG files: a frame and its maps from above, layers in order.

Needs matplotlib: ``pip install matplotlib``. The data comes from
`bevfusion.quantization.evaluate_quantized`.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from bev_data.tables import finite
from bevfusion.model import LidarConfig
from bevfusion.quantization import StageMaps, short_names
from bevquant_qnn import LayerRow

try:
    from matplotlib import colormaps, rc_context
    from matplotlib.axes import Axes
    from matplotlib.colors import Colormap, ListedColormap
    from matplotlib.figure import Figure
except ImportError as error:
    raise ImportError("pictures need matplotlib: pip install matplotlib") from error

__all__ = ["bev_picture", "layer_picture"]

INK = "#1f2933"
GREY = "#7b8794"
BLUE = "#2b6cb0"
ORANGE = "#d9480f"

STYLE = {
    "font.family": "DejaVu Sans",
    "font.size": 9,
    "text.color": INK,
    "axes.edgecolor": "#9aa5b1",
    "axes.labelcolor": INK,
    "axes.linewidth": 0.8,
    "axes.titlesize": 10,
    "axes.titlelocation": "left",
    "axes.titlepad": 7,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "xtick.color": GREY,
    "ytick.color": GREY,
    "xtick.labelcolor": INK,
    "ytick.labelcolor": INK,
    "figure.facecolor": "white",
    "savefig.facecolor": "white",
}


@contextmanager
def figure(width: float, height: float) -> Iterator[Figure]:
    """A figure of the given size in inches, drawn without pyplot and so without a display."""
    with rc_context(STYLE):
        yield Figure(figsize=(width, height), layout="constrained")


def save(drawn: Figure, path: Path) -> Path:
    """Write the figure as PNG."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg

    drawn.set_dpi(130)
    # No date or version in the file: the same run writes the same bytes. `Figure.savefig` would
    # draw twice, the first time for a layout that drawing makes again.
    FigureCanvasAgg(drawn).print_png(path, metadata={"Software": None})
    return path


def layer_picture(folder: Path, rows: Sequence[LayerRow]) -> list[Path]:
    """Write `layers.png`: SQNR of every layer's output in the order of execution."""
    shown = [row for row in rows if finite(row.sqnr_db) is not None]
    if not shown:
        return []
    # Narrower lines for the whole model, which has several times more layers than one branch.
    step, size = (0.27, 8) if len(shown) <= 60 else (0.16, 6)
    with figure(8.6, 1.3 + step * len(shown)) as whole:
        axes = whole.subplots()
        heights = range(len(shown))
        decibels = [float(row.sqnr_db or 0) for row in shown]
        names = [
            name.replace("encoder_layers.encoder_layer", "layer") for name in short_names(shown)
        ]
        blocks = [not row.kind.startswith("Quant") for row in shown]
        axes.hlines(heights, 0, decibels, color="#cbd2d9", linewidth=1.2)
        for is_block, colour, label in ((False, BLUE, "layer"), (True, ORANGE, "block end")):
            members = [i for i in heights if blocks[i] == is_block and i != len(shown) - 1]
            if members:
                axes.scatter(
                    [decibels[i] for i in members], members,
                    s=34, color=colour, label=label, zorder=3,
                )  # fmt: skip
        last = len(shown) - 1
        axes.scatter(
            [decibels[last]], [last], s=48, marker="D", color=INK, label="output", zorder=3
        )
        for height, value in zip(heights, decibels, strict=True):
            axes.annotate(
                f"{value:.1f}", (value, height), (7, 0),
                textcoords="offset points", va="center", fontsize=size, color=GREY,
            )  # fmt: skip
        axes.set_yticks(list(heights), names, fontsize=size)
        axes.set_ylim(last + 0.6, -0.6)  # the first on top, and no wide margins
        axes.set_xlim(min(0.0, min(decibels) * 1.1), max(decibels) * 1.12)
        axes.set_xlabel("SQNR of the layer's output, fake-quantized against float [dB]")
        axes.set_title("Error carried to each layer, first layer on top")
        axes.grid(axis="x", color="#e4e7eb", linewidth=0.6)
        axes.set_axisbelow(True)
        axes.spines["left"].set_visible(False)
        axes.tick_params(axis="y", length=0)
        axes.legend(
            loc="lower right", bbox_to_anchor=(1, 1), ncols=3, frameon=False, fontsize=8,
            borderaxespad=0.2, handletextpad=0.2,
        )  # fmt: skip
        return [save(whole, folder / "layers.png")]


Map = npt.NDArray[np.floating[Any]]
# Without the darkest part, which would pass for the background.
GLOW = ListedColormap(colormaps["magma"](np.linspace(0.17, 1, 256)))
# Metres: cells of the input's picture.
CELL = 0.3


def bev_picture(
    folder: Path, config: LidarConfig, points: Map, kind: str, stage: StageMaps
) -> Path:
    """Write `bev.png`: the frame, and one stage in float, quantized and their difference.

    Empty cells stay dark. Float and quantized share one colour scale, from the 1st to
    the 99.5th percentile of the float map; the difference has its own, from 0.

    Args:
        folder: Where to write.
        config: Gives the metres.
        points: float [n, 3] of the frame, x, y, z in metres.
        kind: "points" or "voxels".
        stage: A bird's-eye view of both models.
    """
    error = np.abs(stage.difference_map)
    scale, worst = _span(stage.float_map, 1), (0.0, _span(error, 0)[1])
    low, high = config.point_cloud_range[2], config.point_cloud_range[5]
    row = stage.row
    sqnr = "equal" if row.sqnr_db is None else f"SQNR {row.sqnr_db:.1f} dB"
    title, quantity = row.title, stage.quantity
    seen = f"Input: {len(points):,} {kind}, highest of each column"
    apart = f"Difference, own scale (all frames: {sqnr})"
    panels: tuple[tuple[Map, str, str, str | Colormap, tuple[float, float]], ...] = (
        (_heights(config, points), seen, "height z [m]", "viridis", (low, high)),
        (stage.float_map, f"{title}: float", quantity, GLOW, scale),
        (stage.quantized_map, f"{title}: fake-quantized", quantity, GLOW, scale),
        (error, apart, stage.difference_quantity, GLOW, worst),
    )
    with figure(12.4, 10.6) as whole:
        for axes, panel in zip(whole.subplots(2, 2).flat, panels, strict=True):
            _draw_map(whole, axes, config.extent, *panel)
        return save(whole, folder / "bev.png")


def _draw_map(
    whole: Figure, axes: Axes, extent: Sequence[float], values: Map, title: str, label: str,
    colours: str | Colormap, limits: tuple[float, float],
) -> None:  # fmt: skip
    low_x, low_y, high_x, high_y = extent
    axes.set_facecolor("#0b0c10")
    image = axes.imshow(
        values.T, origin="lower", extent=(low_x, high_x, low_y, high_y), cmap=colours,
        vmin=limits[0], vmax=limits[1], interpolation="nearest",
    )  # fmt: skip
    axes.plot(0, 0, marker="+", color="white", markersize=7, markeredgewidth=1.2, alpha=0.8)
    axes.set_title(title)
    axes.set_xlabel("x [m]")
    axes.set_ylabel("y [m]")
    axes.tick_params(color=GREY)
    above = bool(np.nanmax(values, initial=limits[0]) > limits[1])
    below = bool(np.nanmin(values, initial=limits[1]) < limits[0])
    extend = {(0, 0): "neither", (0, 1): "max", (1, 0): "min", (1, 1): "both"}[below, above]
    bar = whole.colorbar(image, ax=axes, fraction=0.046, pad=0.02, extend=extend, extendfrac=0.03)
    bar.set_label(label)
    bar.outline.set_visible(False)


def _span(values: Map, percentile: float) -> tuple[float, float]:
    """A low percentile and the 99.5th of the cells that have a value."""
    known = values[np.isfinite(values)]
    if not known.size or known.max() <= 0:
        return 0.0, 1.0
    low, high = np.percentile(known, [percentile, 99.5])
    return float(low), max(float(high), float(low) + 1e-6)


def _heights(config: LidarConfig, points: Map) -> Map:
    """Highest point of each cell, [x, y]; NaN where there is none."""
    low_x, low_y, high_x, high_y = config.extent
    cells = (round((high_x - low_x) / CELL), round((high_y - low_y) / CELL))
    x, y = (
        np.clip(((points[:, axis] - low) / CELL).astype(np.int64), 0, cells[axis] - 1)
        for axis, low in enumerate((low_x, low_y))
    )
    top = np.full(cells, -np.inf)
    np.maximum.at(top, (x, y), points[:, 2])
    return np.where(np.isfinite(top), top, np.nan)
