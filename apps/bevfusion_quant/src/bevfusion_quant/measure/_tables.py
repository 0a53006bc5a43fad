"""Tables of what was measured, for the screen."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from bev_data.metrics import record_table

if TYPE_CHECKING:
    from bevfusion_quant.measure._compare import LayerRow
    from bevfusion_quant.measure._stage_maps import StageRow

__all__ = ["layer_table", "short_names", "stage_table"]


def layer_table(rows: Sequence[LayerRow]) -> str:
    """The per-layer table as text of at most 100 columns."""
    columns = {
        "layer": "{layer}",
        "channels": "{channels}",
        "rows": "{rows:,.0f}",
        "SQNR dB": "{sqnr_db:.1f}",
        "cosine": "{cosine:.6f}",
        "saturated %": "{saturated:100*.3f}",
        "input amax": "{input_amax:.4g}",
    }
    named = [replace(row, layer=name) for row, name in zip(rows, short_names(rows), strict=True)]
    return record_table(named, columns)


def stage_table(rows: Sequence[StageRow]) -> str:
    """One line for each stage."""
    columns = {
        "stage": "{title}",
        "channels": "{channels}",
        "SQNR dB": "{sqnr_db:.1f}",
        "cosine": "{cosine:.6f}",
    }
    return record_table(rows, columns)


def short_names(rows: Sequence[LayerRow]) -> list[str]:
    """Layer names without what they all begin with."""
    paths = [row.layer for row in rows if row.layer != "output"]
    lidar = "encoders.lidar.backbone."
    prefix = lidar if all(path.startswith(lidar) for path in paths) else "encoders."
    return [
        f"output ({row.kind})" if row.layer == "output" else row.layer.removeprefix(prefix)
        for row in rows
    ]
