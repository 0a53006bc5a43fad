"""Tables of what was measured, for the screen."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from bev_data.metrics import aligned_table, or_dash

if TYPE_CHECKING:
    from bevfusion_quant.measure._compare import LayerRow
    from bevfusion_quant.measure._stage_maps import StageRow

__all__ = ["layer_table", "short_names", "stage_table"]


def layer_table(rows: Sequence[LayerRow]) -> str:
    """The per-layer table as text of at most 100 columns."""
    head = ("layer", "channels", "rows", "SQNR dB", "cosine", "saturated %", "input amax")
    names = short_names(rows)
    return aligned_table(head, [_cells(name, row) for name, row in zip(names, rows, strict=True)])


def stage_table(rows: Sequence[StageRow]) -> str:
    """One line for each stage."""
    head = ("stage", "channels", "SQNR dB", "cosine")
    return aligned_table(
        head,
        [
            (r.title, str(r.channels), or_dash(r.sqnr_db, ".1f"), or_dash(r.cosine, ".6f"))
            for r in rows
        ],
    )


def short_names(rows: Sequence[LayerRow]) -> list[str]:
    """Layer names without what they all begin with."""
    paths = [row.layer for row in rows if row.layer != "output"]
    lidar = "encoders.lidar.backbone."
    prefix = lidar if all(path.startswith(lidar) for path in paths) else "encoders."
    return [
        f"output ({row.kind})" if row.layer == "output" else row.layer.removeprefix(prefix)
        for row in rows
    ]


def _cells(name: str, row: LayerRow) -> tuple[str, ...]:
    return (
        name,
        str(row.channels),
        f"{row.rows:,.0f}",
        or_dash(row.sqnr_db, ".1f"),
        or_dash(row.cosine, ".6f"),
        or_dash(None if row.saturated is None else row.saturated * 100, ".3f"),
        or_dash(row.input_amax, ".4g"),
    )
