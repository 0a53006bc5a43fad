"""How well each layer survives quantization: one dot per layer."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from bevfusion_quant.measure import short_names
from bevfusion_quant.pictures._style import BLUE, GREY, INK, ORANGE, figure, save

if TYPE_CHECKING:
    from bevfusion_quant.measure import LayerRow

__all__ = ["layer_picture"]


def layer_picture(folder: Path, rows: Sequence[LayerRow]) -> list[Path]:
    """Write `layers.png`: SQNR of every layer's output in the order of execution."""
    shown = [row for row in rows if row.sqnr_db is not None]
    if not shown:
        return []
    # Narrower lines for the whole model, which has several times the layers of one branch.
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
            axes.scatter(
                [decibels[i] for i in members], members, s=34, color=colour, label=label, zorder=3
            )
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
        axes.invert_yaxis()
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
