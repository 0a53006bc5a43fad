"""One card per quantizer: position, range, histogram of observed values."""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from bev_data.tables import or_dash, percent
from bevfusion_quant.pages._content import ReportContent
from bevfusion_quant.pages._format import part_of, rounded_or_none
from bevfusion_quant.pages._page import Section
from bevquant_quantizers import QuantizerValues

ORDER = 100
STRIP = 64  # bars at most in the strip of channel ranges


def section(content: ReportContent) -> Section | None:
    """Controls, then a grid of cards whose histograms are drawn when they scroll into view."""
    quantizers = content.quantizers
    if not quantizers:
        return None
    methods = {
        name: str(quantizer.get("method") or "")
        for quantizer in (content.calibration or {}).get("quantizers", ())
        for name in quantizer.get("names", ())
    }
    data = {
        "parts": list(dict.fromkeys(part_of(values.paths[0]) for values in quantizers)),
        "cards": [_card(v, methods.get(v.paths[0], "")) for v in quantizers],
    }
    return Section("quantizers", "Quantizers", data, [_drawn(v) for v in quantizers])


def _card(values: QuantizerValues, method: str) -> dict[str, Any]:
    path, _, role = values.paths[0].rpartition(".")
    kind = "weight" if values.is_weight else "input"
    low, high = float(values.amax.min()), float(values.amax.max())
    many = values.amax.size > 1
    beyond = values.beyond / max(values.total, 1)
    spread = high / low if low > 0 else float("inf") if high > 0 else 1.0
    widest = or_dash(high, ".3g" if many else ".4g")
    facts = [
        ("range", f"±{or_dash(low, '.3g')} … ±{widest}" if many else f"±{widest}"),
        ("beyond", percent(beyond)),
        ("zeros", percent(values.zeros / max(values.total, 1))),
    ]
    if many:
        times = f"×{spread:.3g}" if math.isfinite(spread) else "a range of 0"
        facts.append(("spread", f"{times} over {values.amax.size} channels"))
    fp8 = values.form.startswith("fp8")
    form = values.form.upper().replace("_", " ") if fp8 else f"{values.bits} bit"
    return {
        "path": path,
        "kind": kind,
        "about": " · ".join(filter(None, (kind, form, method))),
        "facts": facts,
        "paths": values.paths,
        "part": part_of(path),
        "search": " ".join((*values.paths, role)).lower(),
        "beyond": beyond,
        "spread": spread if math.isfinite(spread) else 1e30,
        "unused": 1 - min(1.0, values.largest / high) if high > 0 else 1.0,
    }


def _drawn(values: QuantizerValues) -> dict[str, Any]:
    """Counts of the bins over ±largest, range, channel ranges as shares of the widest."""
    counts = values.counts.tolist()
    middle = len(counts) // 2
    signed = any(counts[:middle])
    high = float(values.amax.max())
    data: dict[str, Any] = {
        # Without negative values the lower half is empty.
        "counts": counts if signed else counts[middle:],
        "signed": signed,
        "largest": rounded_or_none(values.reach),
        "range": [rounded_or_none(values.amax.min()), rounded_or_none(high)],
    }
    if values.amax.size > 1:
        rising = np.sort(values.amax) / (high or 1.0)
        picked = np.linspace(0, rising.size - 1, min(rising.size, STRIP)).round().astype(int)
        data["channels"] = [rounded_or_none(v, 3) for v in rising[picked]]
    return data
