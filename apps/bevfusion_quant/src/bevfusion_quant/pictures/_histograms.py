"""What every quantizer sees, with its range: pages of small histograms."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from matplotlib.ticker import NullLocator

from bevfusion_quant.pictures._style import BLUE, GREY, ORANGE, figure, save

if TYPE_CHECKING:
    from matplotlib.axes import Axes

    from bevfusion_quant.ptq._quantizer_values import QuantizerValues

__all__ = ["histogram_pictures"]

ROWS, COLUMNS = 4, 3
# Inches: the page's width and margins, a row with the gap below it, and that gap.
WIDTH, TOP, BOTTOM, ROW, GAP = 12.4, 0.95, 0.35, 2.5, 0.8


def histogram_pictures(folder: Path, quantizers: Sequence[QuantizerValues]) -> list[Path]:
    """Write `histograms_inputs_1.png`, … and `histograms_weights_1.png`, …, twelve to a page."""
    written = []
    kinds = {
        "inputs": [q for q in quantizers if not q.is_weight],
        "weights": [q for q in quantizers if q.is_weight],
    }
    for kind, members in kinds.items():
        size = ROWS * COLUMNS
        pages = [members[i : i + size] for i in range(0, len(members), size)]
        for number, page in enumerate(pages, start=1):
            path = folder / f"histograms_{kind}_{number}.png"
            written.append(_page(path, kind, page, f"page {number} of {len(pages)}"))
    return written


def _page(path: Path, kind: str, members: Sequence[QuantizerValues], number: str) -> Path:
    rows = -(-len(members) // COLUMNS)
    height = TOP + BOTTOM + ROW * rows - GAP
    # A fixed grid: letting matplotlib fit it doubles the time to draw a page.
    with figure(WIDTH, height, layout=None) as whole:
        what = (
            "values each input quantizer is handed on the first frame (fake-quantized upstream)"
            if kind == "inputs"
            else "folded weights, one range per output channel (shaded: smallest to largest)"
        )
        whole.suptitle(
            f"Quantizer {kind}: {what}; {number}",
            x=0.6 / WIDTH, y=1 - 0.14 / height, ha="left", va="top", fontsize=12, weight="bold",
        )  # fmt: skip
        grid = whole.subplots(
            rows,
            COLUMNS,
            squeeze=False,
            gridspec_kw={
                "left": 0.6 / WIDTH,
                "right": 1 - 0.2 / WIDTH,
                "top": 1 - TOP / height,
                "bottom": BOTTOM / height,
                "wspace": 0.19,
                "hspace": GAP / (ROW - GAP),
            },
        )
        for axes in grid.flat[len(members) :]:
            axes.set_visible(False)
        for axes, values in zip(grid.flat, members, strict=False):
            _histogram(axes, values)
        return save(whole, path)


def _histogram(axes: Axes, values: QuantizerValues) -> None:
    edges, counts = values.edges, values.counts
    if counts.any():  # a logarithmic axis without a value above zero is an error to matplotlib
        axes.stairs(counts, edges, fill=True, color=BLUE, alpha=0.55, linewidth=0)
        axes.set_yscale("log")
        axes.set_ylim(0.7, float(counts.max()) * 3)
    low, high = float(values.amax.min()), float(values.amax.max())
    if values.amax.size > 1:
        for side in (-1, 1):
            axes.axvspan(min(side * low, side * high), max(side * low, side * high),
                         color=ORANGE, alpha=0.16, linewidth=0)  # fmt: skip
        ranges = f"±{low:.3g} … ±{high:.3g}, {values.amax.size} channels"
    else:
        ranges = f"±{high:.4g}"
    for edge in (-high, high):
        axes.axvline(edge, color=ORANGE, linewidth=1.3)
    reach = max(values.largest, high) * 1.06 or 1.0
    both_signs = bool(counts[: len(counts) // 2].any())
    axes.set_xlim(-reach if both_signs else -0.04 * reach, reach)
    axes.set_title(_short(values.paths), fontsize=9, pad=16)
    saturated = values.beyond / max(values.total, 1)
    axes.text(
        0, 1.02, f"range {ranges} · beyond {_percent(saturated)}",
        transform=axes.transAxes, fontsize=7.5, color=GREY, va="bottom",
    )  # fmt: skip
    axes.tick_params(labelsize=7.5)
    axes.yaxis.set_minor_locator(NullLocator())
    axes.grid(axis="y", color="#e4e7eb", linewidth=0.6)
    axes.set_axisbelow(True)
    axes.set_ylabel("values", fontsize=7.5)


def _short(paths: Sequence[str]) -> str:
    """The first reader's path without the branch's prefix, and how many more readers share it."""
    name = paths[0].removeprefix("encoders.lidar.backbone.")
    name = name.removesuffix("._input_quantizer").removesuffix("._weight_quantizer")
    name = name.replace("encoder_layers.encoder_layer", "layer")
    return name if len(paths) == 1 else f"{name}  (+{len(paths) - 1} sharing)"


def _percent(share: float) -> str:
    return "0" if share == 0 else f"{share * 100:.2g} %" if share >= 1e-5 else "< 0.001 %"
