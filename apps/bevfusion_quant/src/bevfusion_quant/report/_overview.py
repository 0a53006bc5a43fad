"""The head of the page: the run's name and the figures it is judged by."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

from bev_data.metrics import points, span
from bevfusion_quant.report._format import count, decibels, fixed, memory, number, seconds
from bevfusion_quant.report._html import Html, join, tag
from bevfusion_quant.report._section import Section

if TYPE_CHECKING:
    from bev_data.metrics import Accuracy
    from bevfusion_quant.integer import Simulation
    from bevfusion_quant.measure import LayerRow
    from bevfusion_quant.report._content import ReportContent
    from bevfusion_quant.results import BpuOutcome

__all__ = ["head", "reproduce"]


def head(content: ReportContent) -> Html:
    """Title, what was compared, headline figures, the command."""
    about = [content.config and f"config {content.config}"]
    frames = list(content.frames)
    if frames:
        named = ", ".join(frames[:3]) + (" …" if len(frames) > 3 else "")
        about.append(f"{len(frames)} frame{'s' * (len(frames) > 1)}: {named}")
    return join(
        tag("p", "Quantized model against float model", class_="kicker"),
        tag("h1", content.title),
        tag("p", " · ".join(a for a in about if a), class_="lead"),
        _stage_strip(content),
        tag("dl", *_figures(content), class_="figures"),
        _command(content.command, "head-command"),
    )


def _stage_strip(content: ReportContent) -> Html | None:
    """SQNR of every stage in the order of execution."""
    if not content.stages:
        return None
    steps = []
    for stage in content.stages:
        low = stage.sqnr_db is not None and stage.sqnr_db < content.low_sqnr_db
        steps.append(
            tag(
                "li",
                tag("span", stage.name, class_="step-name"),
                tag("strong", decibels(stage.sqnr_db), class_="low" if low else None),
                tag("span", f"cosine {fixed(stage.cosine, 4)}", class_="note"),
            )
        )
    return tag("ol", *steps, class_="strip", aria_label="SQNR of each stage's output")


def _figures(content: ReportContent) -> Iterator[Html]:
    output = next((row for row in content.layers if row.layer == "output"), None)
    if output is not None:
        yield _figure("SQNR of the output", decibels(output.sqnr_db), _cosine(output.cosine))
    if content.layers:
        known = [row for row in content.layers if row.sqnr_db is not None]
        low = [row for row in known if row.sqnr_db < content.low_sqnr_db]  # type: ignore[operator]
        text = f"{len(low)} of {len(content.layers)}"
        yield _figure(
            f"Layers below {content.low_sqnr_db:g} dB", text, _worst(content.layers), bool(low)
        )
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
        yield _figure("Time", seconds(content.seconds["total"]), "")
    if content.peak_memory_mib is not None:
        yield _figure("Peak memory", memory(content.peak_memory_mib), "")


def _worst(layers: Sequence[LayerRow]) -> Html | str:
    """The layer of lowest SQNR, linked to its row."""
    known = [(row.sqnr_db, index) for index, row in enumerate(layers) if row.sqnr_db is not None]
    if not known:
        return ""
    decibel, index = min(known)
    short = ".".join(layers[index].layer.split(".")[-3:])
    return join(f"worst {decibels(decibel)} at ", tag("a", short, href=f"#layer-{index}"))


def _mean_ap(accuracy: Accuracy) -> Html:
    """Mean average precision of the last model, against the first."""
    first, last = accuracy.models[0], accuracy.models[-1]
    note = f"{first.model} {points(first.metrics.mean_ap)}"
    if last.difference is not None and last.difference.mean_ap is not None:
        note += f"; difference {100 * last.difference.mean_ap:+.2f}"
        if last.difference.interval is not None:
            note += f" ({span(last.difference.interval, signed=True)})"
    return _figure(f"mAP, {last.model}, of 100", points(last.metrics.mean_ap), note)


def _departure(simulation: Simulation) -> Html:
    """Where integer and fake-quantized results part."""
    first, wrong = simulation.first_departure, len(simulation.wrong)
    most = max((row.forced_max_steps or 0 for row in simulation.layers), default=0)
    note: Html | str = "no layer departs by more than one step"
    if first is not None:
        index = simulation.layers.index(first)
        short = ".".join(first.path.split(".")[-3:])
        link = tag("a", short, href=f"#integer-{index}")
        note = join("departs first: ", link, f", up to {first.max_steps} steps")
    text = f"{most} step{'s' * (most != 1)}"
    return _figure("Integer against fake-quantized, same inputs", text, note, bool(wrong))


def _bpu(outcome: BpuOutcome) -> Iterator[Html]:
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


def _figure(label: str, value: str, note: Html | str, low: bool = False) -> Html:
    return tag(
        "div",
        tag("dt", label),
        tag("dd", value, class_="low" if low else None),
        tag("dd", note, class_="note") if note else None,
    )


def _cosine(value: float | None) -> str:
    return "" if value is None else f"cosine {value:.5f}"


def _command(command: str, name: str) -> Html | None:
    if not command:
        return None
    return tag(
        "div",
        tag("code", command, id=name, tabindex=0, role="textbox", aria_readonly="true",
            aria_label="Command that repeats this run"),
        tag("button", "Copy", type="button", data_copy=name),
        class_="command",
    )  # fmt: skip


def reproduce(content: ReportContent) -> Section | None:
    """Settings, versions and where the time went."""
    tables = [
        _pairs("Settings", {k.replace("_", " "): _plain(v) for k, v in content.settings.items()}),
        _pairs("Versions", content.versions),
        _times(content),
    ]
    if not any(tables):
        return None
    return Section("reproduce", "Reproduce", tag("div", *tables, class_="columns"))


def _plain(value: Any) -> str:
    if value is None:
        return "–"
    if isinstance(value, (list, tuple)):
        return ", ".join(map(str, value)) or "–"
    return str(value)


def _pairs(title: str, pairs: Any) -> Html | None:
    if not pairs:
        return None
    rows = [tag("tr", tag("th", k, scope="row"), tag("td", v)) for k, v in pairs.items()]
    return tag("table", tag("caption", title), tag("tbody", *rows), class_="pairs")


def _times(content: ReportContent) -> Html | None:
    total = content.seconds.get("total") or sum(content.seconds.values())
    if not total:
        return None
    rows = []
    for step, spent in content.seconds.items():
        share = 100 * spent / total
        bar = tag("span", class_="bar", style=f"--share:{share:.1f}%")
        shown = None if step == "total" else bar
        rows.append(tag("tr", tag("th", step, scope="row"), tag("td", f"{spent:.2f} s", shown)))
    return tag("table", tag("caption", "Time"), tag("tbody", *rows), class_="pairs times")
