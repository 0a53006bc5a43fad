"""One card for each quantizer: where it sits, its range, a histogram of what it saw."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from bevfusion_quant.report._encode import rounded_or_none
from bevfusion_quant.report._format import number, part_of, percent
from bevfusion_quant.report._html import Html, join, path_name, tag
from bevfusion_quant.report._section import Section, field, select

if TYPE_CHECKING:
    from bevfusion_quant.measure import QuantizerValues

__all__ = ["quantizers_section"]

STRIP = 64  # bars at most in the strip of channel ranges
SORTS = {
    "order": "model order",
    "saturated": "most saturated",
    "spread": "widest channel spread",
    "unused": "most unused range",
}


def quantizers_section(
    quantizers: Sequence[QuantizerValues], calibration: Mapping[str, Any] | None
) -> Section:
    """Controls, then a grid of cards whose histograms are drawn when they come into view."""
    methods = _methods(calibration)
    parts = {part_of(values.paths[0]): "" for values in quantizers}
    controls = tag(
        "div",
        field("Search", tag("input", type="search", id="quantizer-search", placeholder="path",
                            autocomplete="off", spellcheck="false")),
        field("Part", select("quantizer-part", {"": "all", **{p: p for p in parts}})),
        field("Kind", select("quantizer-kind", {"": "all", "input": "inputs",
                                                "weight": "weights"})),
        field("Order", select("quantizer-sort", SORTS)),
        tag("fieldset", tag("legend", "Counts", class_="hidden"),
            _choice("log", "log", True), _choice("linear", "linear", False), class_="segments"),
        tag("output", f"{len(quantizers)} quantizers", id="quantizer-shown"),
        class_="controls",
    )  # fmt: skip
    legend = tag(
        "p",
        tag("span", tag("span", class_="swatch counts"), "values the quantizer is handed"),
        tag("span", tag("span", class_="swatch edge"), "range ±amax, the widest channel's"),
        tag("span", tag("span", class_="swatch spread"), "ranges of the other channels"),
        class_="note legend",
    )  # fmt: skip
    cards = [_card(i, v, methods.get(v.paths[0], "")) for i, v in enumerate(quantizers)]
    html = tag("div", controls, legend, tag("ul", *cards, class_="cards", id="quantizer-cards"))
    return Section("quantizers", "Quantizers", html, [_data(v) for v in quantizers])


def _choice(value: str, text: str, checked: bool) -> Html:
    button = tag("input", type="radio", name="counts", value=value, checked=checked)
    return tag("label", button, tag("span", text))


def _methods(calibration: Mapping[str, Any] | None) -> dict[str, str]:
    """How each quantizer's range was chosen, by path."""
    found = {}
    for quantizer in (calibration or {}).get("quantizers", ()):
        for name in quantizer.get("names", ()):
            found[name] = str(quantizer.get("method") or "")
    return found


def _card(index: int, values: QuantizerValues, method: str) -> Html:
    path, _, role = values.paths[0].rpartition(".")
    kind = "weight" if values.is_weight else "input"
    low, high = float(values.amax.min()), float(values.amax.max())
    many = values.amax.size > 1
    ranges = f"±{number(low, 3)} … ±{number(high, 3)}" if many else f"±{number(high)}"
    beyond = values.beyond / max(values.total, 1)
    spread = high / low if low > 0 else float("inf") if high > 0 else 1.0
    times = f"×{number(spread, 3)}" if math.isfinite(spread) else "a range of 0"
    unused = 1 - min(1.0, values.largest / high) if high > 0 else 1.0
    facts = [
        ("range", ranges),
        ("beyond", percent(beyond)),
        ("zeros", percent(values.zeros / max(values.total, 1))),
        ("spread", f"{times} over {values.amax.size} channels") if many else None,
    ]
    about = " · ".join(filter(None, (kind, f"{values.bits} bit", method)))
    label = f"Histogram of the {kind} values: range {ranges}, {percent(beyond)} beyond it"
    return tag(
        "li",
        tag("h3", path_name(path)),
        tag("p", about, class_="note"),
        tag("div", class_="histogram", role="img", aria_label=label),
        tag("dl", *(join(tag("dt", f[0]), tag("dd", f[1])) for f in facts if f)),
        _readers(values.paths),
        id=f"quantizer-{index}",
        class_="card",
        data_part=part_of(path),
        data_kind=kind,
        data_text=" ".join((*values.paths, role)).lower(),
        data_saturated=f"{beyond:.6g}",
        data_spread=f"{spread if math.isfinite(spread) else 1e30:.6g}",
        data_unused=f"{unused:.6g}",
    )


def _readers(paths: Sequence[str]) -> Html | None:
    if len(paths) < 2:
        return None
    items = [tag("li", path_name(path)) for path in paths]
    return tag("details", tag("summary", f"shared by {len(paths)} readers"), tag("ul", *items))


def _data(values: QuantizerValues) -> dict[str, Any]:
    """Counts of the bins over [−largest, largest], range, channel ranges as shares of the widest.

    Where no value is negative, `counts` holds the upper half alone.
    """
    counts = values.counts.tolist()
    middle = len(counts) // 2
    signed = any(counts[:middle])
    high = float(values.amax.max())
    data: dict[str, Any] = {
        "counts": counts if signed else counts[middle:],
        "signed": signed,
        "largest": rounded_or_none(values.largest),
        "range": [rounded_or_none(values.amax.min()), rounded_or_none(high)],
    }
    if values.amax.size > 1:
        rising = np.sort(values.amax) / (high or 1.0)
        picked = np.linspace(0, rising.size - 1, min(rising.size, STRIP)).round().astype(int)
        data["channels"] = [rounded_or_none(v, 3) for v in rising[picked]]
    return data
