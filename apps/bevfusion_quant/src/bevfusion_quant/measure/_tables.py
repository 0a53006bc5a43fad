"""Tables of what was measured, for the screen."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from bev_data.metrics import aligned_table

if TYPE_CHECKING:
    from bevfusion_quant.measure._agreement import AgreementRow, FoundRow
    from bevfusion_quant.measure._compare import LayerRow
    from bevfusion_quant.measure._stage_maps import StageRow

__all__ = ["agreement_text", "layer_table", "or_dash", "short_names", "stage_table"]


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


def agreement_text(
    agreement: Sequence[AgreementRow], found: Sequence[FoundRow], other: str = "quantized"
) -> str:
    """How many detections of float and `other` model match, and how many labels they find."""
    head = ("within", "float", other, "matched", "mean |Δscore|", "max |Δscore|")
    text = aligned_table(
        head,
        [
            (
                f"{r.distance:g} m",
                str(r.float_detections),
                str(r.quantized_detections),
                str(r.matched),
                or_dash(r.score_mean, ".4f"),
                or_dash(r.score_max, ".4f"),
            )
            for r in agreement
        ],
    )
    if not found:
        return text
    columns = ("within", "labels", "found by float", f"found by {other}")
    cells = [
        (f"{r.distance:g} m", str(r.labels), str(r.found_float), str(r.found_quantized))
        for r in found
    ]
    return f"{text}\n\n{aligned_table(columns, cells)}"


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


def or_dash(value: float | None, form: str) -> str:
    """A number in the given form, a dash for None."""
    return "–" if value is None else format(value, form)
