"""The head of a run's page: its name and the figures it is judged by."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from bev_data.metrics import Accuracy, points, span
from bevfusion_quant.integer import Simulation
from bevfusion_quant.report._content import ReportContent
from bevfusion_quant.report._format import count, decibels, finite, memory, number, plural, seconds
from bevfusion_quant.report._page import Section
from bevfusion_quant.results import BpuOutcome

Figure = dict[str, Any]


def head(content: ReportContent) -> Section:
    """Title, what was compared, headline figures, the command."""
    about = [content.config and f"config {content.config}"]
    frames = list(content.frames)
    if frames:
        named = ", ".join(frames[:3]) + (" …" if len(frames) > 3 else "")
        about.append(f"{plural(len(frames), 'frame')}: {named}")
    data = {
        "title": content.title,
        "about": " · ".join(a for a in about if a),
        "low": content.low_sqnr_db,
        "stages": [
            {"name": stage.name, "sqnr_db": stage.sqnr_db, "cosine": stage.cosine}
            for stage in content.stages
        ],
        "figures": list(_figures(content)),
        "command": content.command,
    }
    return Section("head_run", content.title, data)


def _figure(label: str, value: str, note: str = "", low: bool = False) -> Figure:
    """A figure and a note below it, whose end may be made a link: `link`, to the id `href`."""
    return {"label": label, "value": value, "note": note, "low": low, "href": "", "link": ""}


def _figures(content: ReportContent) -> Iterator[Figure]:
    output = next((row for row in content.layers if row.layer == "output"), None)
    if output is not None:
        known = finite(output.cosine)
        cosine = "" if known is None else f"cosine {known:.5f}"
        yield _figure("SQNR of the output", decibels(output.sqnr_db), cosine)
    if content.layers:
        yield _low_layers(content)
    if content.quantizers:
        weights = sum(q.is_weight for q in content.quantizers)
        shared = sum(len(q.paths) > 1 for q in content.quantizers)
        note = f"{weights} of weights, {shared} shared"
        yield _figure("Quantizers", count(len(content.quantizers)), note)
    if content.accuracy is not None:
        yield _mean_ap(content.accuracy)
    if content.integers is not None:
        yield _departure(content.integers)
    if content.bpu is not None:
        yield from _bpu(content.bpu)
    for more in content.figures:
        yield _figure(more.label, more.value, more.note)
    if "total" in content.seconds:
        yield _figure("Time", seconds(content.seconds["total"]))
    if content.peak_memory_mib is not None:
        yield _figure("Peak memory", memory(content.peak_memory_mib))


def _low_layers(content: ReportContent) -> Figure:
    """How many are low, and the layer of lowest SQNR, linked to its row."""
    known = [
        (decibel, index)
        for index, row in enumerate(content.layers)
        if (decibel := finite(row.sqnr_db)) is not None
    ]
    low = sum(decibel < content.low_sqnr_db for decibel, _ in known)
    figure = _figure(
        f"Layers below {content.low_sqnr_db:g} dB", f"{low} of {len(content.layers)}", low=bool(low)
    )
    if known:
        decibel, index = min(known)
        short = ".".join(content.layers[index].layer.split(".")[-3:])
        worst = f"worst {decibels(decibel)} at "
        figure |= {"note": worst, "href": f"layer-{index}", "link": short}
    return figure


def _mean_ap(accuracy: Accuracy) -> Figure:
    """Mean average precision of the last model, against the first."""
    first, last = accuracy.models[0], accuracy.models[-1]
    note = f"{first.model} {points(first.metrics.mean_ap)}"
    if last.difference is not None and last.difference.mean_ap is not None:
        note += f"; difference {100 * last.difference.mean_ap:+.2f}"
        if last.difference.interval is not None:
            note += f" ({span(last.difference.interval, signed=True)})"
    return _figure(f"mAP, {last.model}, of 100", points(last.metrics.mean_ap), note)


def _departure(simulation: Simulation) -> Figure:
    """Where integer and fake-quantized results part."""
    first, layers = simulation.first_departure, simulation.layers
    most = max((row.forced_max_steps or 0 for row in layers), default=0)
    title, low = "Integer against fake-quantized, same inputs", bool(simulation.wrong)
    if first is None:
        note = "no layer departs by more than one step"
        return _figure(title, plural(most, "step"), note, low)
    short = ".".join(first.path.split(".")[-3:])
    figure = _figure(title, plural(most, "step"), "departs first: ", low)
    after = f", up to {first.max_steps} steps"
    return {**figure, "href": f"integer-{layers.index(first)}", "link": short, "after": after}


def _bpu(outcome: BpuOutcome) -> Iterator[Figure]:
    """Bytes between BPU and CPU, and the estimate of the BPU's time."""
    boundaries = len(outcome.plan.boundaries)
    note = f"of integers in a frame, {boundaries} boundaries"
    size = number((outcome.plan.transfer_bytes or 0) / 1e6, 3)
    yield _figure("Between BPU and CPU", f"{size} MB", note)
    estimates = outcome.estimates.values()
    total = sum(estimate.seconds for estimate in estimates)
    chip = next(iter(estimates)).figures.chip
    note = f"one core of {chip}; from public figures, no measurement"
    yield _figure("Estimated on the BPU", f"{total * 1e3:,.1f} ms", note)
