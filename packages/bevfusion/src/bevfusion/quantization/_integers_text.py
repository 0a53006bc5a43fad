"""Result of running in integers as text and tables."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from bev_data.metrics import agreement_text, record_table
from bev_data.tables import CellParts, Columns, Table, plural, table_of
from bevfusion.quantization._evaluate import short_path
from bevfusion.quantization._integers import Simulation, in_integers
from bevquant_int8sim import LayerRow

QUERIES = (
    "Behind the head's choice of queries the models may look at different places of the map; "
    "their figures there say little."
)
_LEGEND = (
    "max, mean: steps between integer and fake-quantized output; off: share of values that differ; "
    "same: max on the same input"
)
_LONGEST = 46


def simulation_text(simulation: Simulation, *, layers: bool, reasons_in: str = "`islands`") -> str:
    """First difference, then tables: layers on request, stages, detections; kernels and time.

    Args:
        simulation: Result of `simulate_detector`.
        layers: Whether each layer has a line.
        reasons_in: Where the reasons of float steps are listed.
    """
    parts = ["\n".join(_verdict(simulation))]
    if simulation.stages:
        parts.append(_stage_table(simulation))
    if layers:
        computed = [row for row in simulation.layers if in_integers(row)]
        floats = len(simulation.layers) - len(computed)
        counted = [fallback.share for fallback in simulation.islands if fallback.share is not None]
        much = f" with {100 * sum(counted):.2g} % of the arithmetic" if counted else ""
        rest = f"\nand {plural(floats, 'operation')} in float{much}; {reasons_in} says why"
        lines = [_layer_table(computed) + (rest if floats else ""), _LEGEND, simulation.compared_on]
        parts.insert(0, "\n".join(filter(None, lines)))
    if simulation.agreement:
        detections = agreement_text(simulation.agreement, simulation.found, "integer")
        parts += ["Detections, float against integer, same class", detections]
    seconds = ", ".join(f"{s:.2f}" for s in simulation.frame_seconds[:8])
    more = " …" if len(simulation.frame_seconds) > 8 else ""
    parts.append(
        f"Kernels: {simulation.backend}; seconds in integers, frame by frame: {seconds}{more}"
    )
    return "\n\n".join(parts)


def _verdict(simulation: Simulation) -> list[str]:
    """The first layer that differs, and by how much; layers with errors of their own; reasons."""
    first = simulation.first_departure
    stored = any(row.max_steps is not None for row in simulation.layers)
    text = "Integer and fake-quantized results agree within one step everywhere."
    if not stored:
        text = "No result is held in integers: FP8 and float are compared in dB."
    if first is not None:
        text = (
            f"{first.path} ({first.op}) departs first by more than one step: by up to "
            f"{first.max_steps} from the fake-quantized result, {100 * (first.off or 0):.2g} % of "
            f"its values differ; on the same input by {_up_to(first.forced_max_steps)}."
        )
    lines = [text]
    if simulation.wrong:
        lines.append(f"WRONG on the same input: {_named(simulation.wrong)}.")
    for row in simulation.explained:
        steps = plural(row.forced_max_steps, "step")
        lines.append(f"On the same input {row.path} is {steps} off: {row.why}.")
    if len(lines) == 1 and stored:
        lines.append("On the same input every layer agrees within one step.")
    if broken := next((row for row in simulation.layers if any(row.not_finite)), None):
        lines.append(f"{broken.path} ({broken.op}) has infinite or NaN values, float has none.")
    if any(row.path.startswith("heads.") and in_integers(row) for row in simulation.layers):
        lines.append(QUERIES)
    return lines


def _named(rows: Sequence[LayerRow]) -> str:
    more = f" and {len(rows) - 5} more" if len(rows) > 5 else ""
    named = (f"{row.path} ({plural(row.forced_max_steps, 'step')})" for row in rows[:5])
    return ", ".join(named) + more


def _up_to(steps: int | None) -> str:
    return f"up to {plural(steps, 'step')}" if steps else "no step"


def _stage_table(simulation: Simulation) -> str:
    columns = {
        "stage": "{title}",
        "in int": "{integers}",
        "in float": "{floats}",
        "fake dB": "{fake_sqnr_db:.2f}",
        "int dB": "{integer_sqnr_db:.2f}",
        "max steps": "{max_steps:.0f}",
        "mean steps": "{mean_steps:.4f}",
        "same input": "{forced_max_steps:.0f}",
    }
    return record_table(simulation.stages, columns)


def _layer_table(rows: Sequence[LayerRow]) -> str:
    columns = {
        "layer": "{path}",
        "operation": "{op}",
        "fake dB": "{fake_sqnr_db:.1f}",
        "int dB": "{integer_sqnr_db:.1f}",
        "cosine": "{integer_cosine:.4f}",
        "max": "{max_steps:.0f}",
        "mean": "{mean_steps:.3f}",
        "off %": "{off:100*.2f}",
        "same": "{forced_max_steps:.0f}",
        "sat %": "{saturated:100*.2f}",
        "bits": "{peak_bits:.0f}",
    }
    shown = [replace(row, path=_short(row.path), op=row.op.removesuffix(" + ReLU")) for row in rows]
    return record_table(shown, columns)


def _short(path: str) -> str:
    """A long path without its beginning; the layer's own name stays."""
    short = short_path(path).replace(".encoder_layers.", ".")
    return short if len(short) <= _LONGEST else "…" + short[1 - _LONGEST :]


def integer_stage_table(simulation: Simulation) -> Table:
    """Both quantized models against float at the end of each stage, and their difference."""
    columns: Columns = {
        "Last layer of the stage": lambda row: CellParts(text=row.title, note_path=row.layer),
        "Fake dB": "{fake_sqnr_db:.1f}",
        "Integer dB": "{integer_sqnr_db:.1f}",
        "Max steps": "{max_steps:.0f}",
        "Same input": "{forced_max_steps:.0f}",
    }
    return table_of(
        "SQNR against float; largest differences in the stage", simulation.stages, columns
    )


def integer_box_table(simulation: Simulation) -> Table:
    """Boxes of the float model against those of the model in integers."""
    columns = {
        "Within": "{distance:g} m",
        "Float": "{float_detections:,}",
        "Integer": "{quantized_detections:,}",
        "Matched": "{matched:,}",
        "Mean |\u2060Δscore|": "{score_mean:.4f}",
    }
    return table_of("Detections, float against integer, same class", simulation.agreement, columns)
