"""The bird's-eye view: input voxels, float features, quantized features, and their difference."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt
import torch
from matplotlib import colormaps
from matplotlib.colors import Colormap, ListedColormap

from bevfusion_quant.pictures._style import GREY, figure, save

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure
    from torch import Tensor

    from bevfusion_quant.model import LidarConfig

__all__ = ["bev_pictures"]

Map = npt.NDArray[np.floating[Any]]
Draw = Callable[["Figure", "Axes"], None]
# Without the darkest part, which would pass for the background.
GLOW = ListedColormap(colormaps["magma"](np.linspace(0.17, 1, 256)))
NORM = "L2 norm over channels"
ERROR = "L2 norm of quantized − float"


def bev_pictures(
    folder: Path, config: LidarConfig, features: Tensor, coords: Tensor, wanted: Tensor, got: Tensor
) -> list[Path]:
    """Write `bev.png` (all four side by side) and one PNG for each of the four.

    Feature maps [1, channels, x, y] are shown as their L2 norm over the channels; cells without a
    voxel stay dark. Float and quantized share one colour scale, from the 1st to the 99.5th
    percentile of the float map; the difference (the norm of the difference vector) has its own,
    from 0.

    Args:
        folder: Where to write.
        config: Gives the metres.
        features: float [voxels, 5] of the frame; column 2 is the height z in metres.
        coords: int32 [voxels, 4]: batch, x, y, z.
        wanted: The float model's map.
        got: The fake-quant model's map.
    """
    occupied = ((wanted[0] != 0) | (got[0] != 0)).any(0)
    float_map, quant_map = _norm(wanted, occupied), _norm(got, occupied)
    error = _norm(got - wanted, occupied)
    scale, worst = _span(float_map, 1), (0.0, _span(error, 0)[1])
    low, high = config.point_cloud_range[2], config.point_cloud_range[5]
    heights = _heights(config, features, coords)
    title = f"Difference, own scale ({_sqnr(wanted, got)})"
    panels: dict[str, Draw] = {
        "input": _panel(
            config,
            heights,
            f"Input: {len(coords):,} voxels, highest of each column",
            "height z [m]",
            "viridis",
            (low, high),
        ),
        "float": _panel(config, float_map, "Float features", NORM, GLOW, scale),
        "quantized": _panel(config, quant_map, "Fake-quantized features", NORM, GLOW, scale),
        "difference": _panel(config, error, title, ERROR, GLOW, worst),
    }
    written = []
    with figure(12.4, 10.6) as whole:
        for axes, draw in zip(whole.subplots(2, 2).flat, panels.values(), strict=True):
            draw(whole, axes)
        written.append(save(whole, folder / "bev.png"))
    for name, draw in panels.items():
        with figure(6.6, 5.6) as single:
            draw(single, single.subplots())
            written.append(save(single, folder / f"bev_{name}.png"))
    return written


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


def _norm(features: Tensor, occupied: Tensor) -> Map:
    """L2 norm over the channels, NaN where no voxel is."""
    norm = features[0].float().norm(dim=0)
    masked: Map = norm.masked_fill(~occupied, torch.nan).numpy()
    return masked


def _span(values: Map, percentile: float) -> tuple[float, float]:
    """A low percentile and the 99.5th of the cells that have a value."""
    known = values[np.isfinite(values)]
    if not known.size or known.max() <= 0:
        return 0.0, 1.0
    low, high = np.percentile(known, [percentile, 99.5])
    return float(low), max(float(high), float(low) + 1e-6)


def _heights(config: LidarConfig, features: Tensor, coords: Tensor) -> Map:
    """Highest voxel of each column of about 0.3 m, [cells, cells]; NaN where there is none."""
    step = max(1, round(0.3 / config.voxel_size[0]))
    cells = [-(-n // step) for n in config.sparse_shape[:2]]
    flat = (coords[:, 1].long() // step) * cells[1] + coords[:, 2].long() // step
    top = torch.full((cells[0] * cells[1],), -torch.inf)
    top.scatter_reduce_(0, flat, features[:, 2].float(), "amax")
    return np.where(np.isfinite(top.numpy()), top.numpy(), np.nan).reshape(cells)


def _sqnr(wanted: Tensor, got: Tensor) -> str:
    signal = float(wanted.double().square().sum())
    noise = float((got.double() - wanted.double()).square().sum())
    return f"SQNR {10 * np.log10(signal / noise):.1f} dB" if signal and noise else "equal"
