"""A simulation as text for the screen."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from bevfusion_quant.ptq._summary import aligned_table, or_dash

if TYPE_CHECKING:
    from bevfusion_quant.integer._simulation import Simulation
    from bevquant_int8sim import LayerRow

__all__ = ["simulation_text", "verdict"]


def simulation_text(simulation: Simulation, *, layers: bool) -> str:
    """Tables of at most 100 columns: stages, and layers if wanted; then who departs first."""
    parts = [_stage_table(simulation)]
    if layers:
        exact = [row for row in simulation.layers if row.form != "float"]
        parts.insert(0, _layer_table(exact))
        count = len(simulation.layers) - len(exact)
        if count:
            parts.insert(1, f"and {count} steps in float, which the page lists with the reasons")
    seconds = ", ".join(f"{s:.2f}" for s in simulation.frame_seconds[:8])
    more = " …" if len(simulation.frame_seconds) > 8 else ""
    parts += [
        verdict(simulation),
        f"Kernels: {simulation.backend}; seconds in integers, frame by frame: {seconds}{more}",
    ]
    return "\n\n".join(parts)


def verdict(simulation: Simulation) -> str:
    """Which layer departs first and by how much, and whether any layer is wrong in itself."""
    first = simulation.first_departure
    text = "Integer and fake-quantized results agree within one step everywhere."
    if first is not None:
        text = (
            f"{first.path} departs first: up to {first.max_steps} steps from the fake-quantized "
            f"result, {100 * (first.off or 0):.2g} % of its values differ."
        )
    wrong = simulation.wrong
    if wrong:
        named = ", ".join(f"{row.path} ({row.forced_max_steps} steps)" for row in wrong[:5])
        return f"{text}\nOn the same inputs these are more than one step apart: {named}."
    return f"{text}\nOn the same inputs every layer agrees within one step, or says why not."


def _stage_table(simulation: Simulation) -> str:
    head = ("stage", "int", "float", "fake dB", "int dB", "max steps", "mean steps", "same input")
    return aligned_table(
        head,
        [
            (
                row.title,
                str(row.integers),
                str(row.floats),
                or_dash(row.fake_sqnr_db, ".2f"),
                or_dash(row.integer_sqnr_db, ".2f"),
                or_dash(row.max_steps, ".0f"),
                or_dash(row.mean_steps, ".4f"),
                or_dash(row.forced_max_steps, ".0f"),
            )
            for row in simulation.stages
        ],
    )


def _layer_table(rows: Sequence[LayerRow]) -> str:
    head = ("layer", "fake dB", "int dB", "max", "mean", "off %", "same", "sat %", "bits")
    return aligned_table(
        head,
        [
            (
                _short(row.path),
                or_dash(row.fake_sqnr_db, ".1f"),
                or_dash(row.integer_sqnr_db, ".1f"),
                or_dash(row.max_steps, ".0f"),
                or_dash(row.mean_steps, ".3f"),
                or_dash(None if row.off is None else row.off * 100, ".2f"),
                or_dash(row.forced_max_steps, ".0f"),
                or_dash(None if row.saturated is None else row.saturated * 100, ".2f"),
                or_dash(row.peak_bits, ".0f"),
            )
            for row in rows
        ],
    )


def _short(path: str) -> str:
    """At most 50 characters: the beginning is cut, the layer's own name stays."""
    short = path.removeprefix("encoders.").replace(".encoder_layers.", ".")
    return short if len(short) <= 50 else "…" + short[-49:]
