"""Result of a calibration, quantizer by quantizer."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass

import numpy as np
from torch import Tensor

from bevquant_graph import HtmlTable

from ._abs_histogram import AbsHistogram
from ._findings import CalibrationFinding, bin_width, find, reach
from ._format import format_of
from .calib._calibrator import Calibrator
from .calib._histogram_calibrator import HistogramCalibrator
from .documents import text_table

# A range this many times the 99.99th percentile leaves 127 / 8 integers to nearly all values.
_EXPLODING = 8.0
_SATURATED = 0.01


@dataclass(frozen=True)
class QuantizerReport:
    """One quantizer after calibration.

    Attributes:
        names: All of its paths.
        method: Method of its range; always ``"max"`` for a MaxCalibrator.
        amax: Its range in the units of the tensor, one value or one per channel; None without a
            range.
        saturation: Share of the values in histogram bins at or above the range; None without a
            histogram.
        zeros: Share of zeros; None without a histogram.
        bins: Number of bins of its largest histogram; None without one.
        values: Number of values; None without a histogram.
        largest: Largest absolute value; None without values.
        warnings: Facts to look at.
        findings: Reasons why the calibration cannot be right, or why another method would be
            better.
    """

    names: tuple[str, ...]
    method: str
    amax: tuple[float, ...] | None
    saturation: float | None
    zeros: float | None
    bins: int | None
    values: int | None
    largest: float | None
    warnings: tuple[str, ...] = ()
    findings: tuple[CalibrationFinding, ...] = ()

    @property
    def name(self) -> str:
        """The first path."""
        return self.names[0]


@dataclass(frozen=True)
class CalibrationReport(HtmlTable):
    """Result of `calibrate`: ``print(report)`` is a table, ``report[path]`` one quantizer.

    Attributes:
        quantizers: One entry per quantizer object, in the order of the module tree.
        batches: Number of batches, including those of an interrupted run.
        warnings: Warnings that concern the whole run.
    """

    quantizers: tuple[QuantizerReport, ...]
    batches: int
    warnings: tuple[str, ...] = ()

    def __getitem__(self, name: str) -> QuantizerReport:
        """Return the entry of the quantizer at a path, whichever of its paths it is."""
        for entry in self.quantizers:
            if name in entry.names:
                return entry
        raise KeyError(name)

    @property
    def findings(self) -> tuple[CalibrationFinding, ...]:
        """Findings of all quantizers."""
        return tuple(finding for entry in self.quantizers for finding in entry.findings)

    @property
    def poor(self) -> tuple[CalibrationFinding, ...]:
        """Findings that forbid the use of these ranges; empty after a good calibration."""
        return tuple(finding for finding in self.findings if finding.poor)

    def to_json(self, indent: int | None = 2) -> str:
        """Return everything as JSON."""
        return json.dumps({"schema": "bevquant-calibration/1", **asdict(self)}, indent=indent)

    def __str__(self) -> str:
        head = ("quantizer", "method", "amax", "saturated", "zeros", "bins", "values")
        rows = [head, *(_cells(entry) for entry in self.quantizers)]
        lines = [text_table(rows, right=range(2, len(head)), rule="-")]
        for entry in self.quantizers:
            if len(entry.names) > 1:
                lines.append(f"shared: {' = '.join(entry.names)}")
        lines += [f"warning: {text}" for text in self.warnings]
        lines += [f"warning: {q.name}: {text}" for q in self.quantizers for text in q.warnings]
        lines += [f"{'poor' if f.poor else 'note'}: {f}" for f in self.findings]
        return "\n".join(lines)


def _cells(entry: QuantizerReport) -> tuple[str, ...]:
    if entry.amax is None:
        amax = "none"
    elif len(entry.amax) == 1:
        amax = f"{entry.amax[0]:.4g}"
    else:
        amax = f"[{min(entry.amax):.4g}, {max(entry.amax):.4g}]({len(entry.amax)})"
    more = f" (+{len(entry.names) - 1})" if len(entry.names) > 1 else ""
    return (
        entry.name + more,
        entry.method,
        amax,
        "-" if entry.saturation is None else f"{entry.saturation:.3%}",
        "-" if entry.zeros is None else f"{entry.zeros:.1%}",
        "-" if entry.bins is None else str(entry.bins),
        "-" if entry.values is None else str(entry.values),
    )


def describe(
    names: tuple[str, ...],
    calibrator: Calibrator,
    found: Tensor | None,
    loaded: Tensor | None,
    amax: Tensor | None,
    method: str,
    channels: tuple[CalibrationFinding, ...] = (),
) -> QuantizerReport:
    """Describe one quantizer."""
    findings = (*find(names[0], calibrator, found, method), *channels)
    numbers: tuple[float, ...] | None = None
    if amax is not None:
        numbers = tuple(amax.detach().float().reshape(-1).tolist())
    if not isinstance(calibrator, HistogramCalibrator):
        largest = None if found is None else float(found.max())
        warnings = _no_range(found, loaded, numbers)
        return QuantizerReport(
            names, "max", numbers, None, None, None, None, largest, warnings, findings
        )
    rows = calibrator._rows
    warnings = _no_range(found, loaded, numbers)
    saturation = zeros = largest = None
    values = sum(row.values for row in rows)
    if values and found is not None:
        ranges = found.float().cpu().reshape(-1).tolist()
        zeros = sum(row.zeros for row in rows) / values
        largest = max(row.max for row in rows)
        above = sum(_above(row, limit) for row, limit in zip(rows, ranges, strict=True))
        saturation = above / values
        if not warnings:
            # Up to half a step above, rounding brings a value back to the range as clipping does.
            form = format_of(calibrator._num_bits, calibrator._unsigned)
            edge = 1 + 0.5 * form.last_step / form.high
            lost = sum(_above(row, limit * edge) for row, limit in zip(rows, ranges, strict=True))
            warnings = _suspicious(rows, ranges, lost / values)
    bins = max((row.counts.numel() for row in rows), default=None)
    return QuantizerReport(
        names, method, numbers, saturation, zeros, bins, values, largest, warnings, findings
    )


def _no_range(
    found: Tensor | None, loaded: Tensor | None, amax: tuple[float, ...] | None
) -> tuple[str, ...]:
    stays = "its range stays dynamic" if amax is None else "it keeps the range it had"
    if found is None:
        return (f"it saw no values; {stays}: run batches that reach it, or disable it",)
    if not bool(found.any()):
        if loaded is not None and bool(loaded.any()):
            stays = "its range is 1, which is a guess should other values come"
        elif loaded is not None:  # of ranges per channel
            stays = "its ranges are 0"
        return (f"dead: every value it saw was zero; {stays}",)
    if loaded is not None and float(loaded.max()) > float(found.max()):
        return (
            f"vanishing: its values reach {float(found.max()):.2g}, too little for a scale; its "
            "range is 2^-23",
        )
    return ()


def _suspicious(rows: list[AbsHistogram], ranges: list[float], lost: float) -> tuple[str, ...]:
    warnings = []
    if lost > _SATURATED:
        warnings.append(f"{lost:.1%} of the values lie above the range")
    dead = sum(not limit for limit in ranges)
    if dead:
        warnings.append(f"dead: {dead} of {len(ranges)} channels saw zeros alone")
    worst = max(
        (
            (limit / usual, limit, usual)
            for limit, usual in zip(ranges, map(_usual, rows), strict=True)
            if usual
        ),
        default=(0.0, 0.0, 0.0),
    )
    if worst[0] > _EXPLODING:
        warnings.append(
            f"exploding: the range {worst[1]:.4g} is {worst[0]:.0f} times the 99.99th percentile "
            f"of the values other than zero, {worst[2]:.4g}; look for outliers, or use "
            "method='percentile'"
        )
    merged = max(row.shift for row in rows)
    if merged:
        warnings.append(
            f"outliers made the bins {2**merged} times as wide as the first batch set them"
        )
    return tuple(warnings)


def _above(row: AbsHistogram, limit: float) -> int:
    """Count the values in bins that begin at or above `limit`."""
    if not row.upper:
        return 0
    starts = np.arange(row.counts.numel()) * bin_width(row)
    return int(row.counts.numpy()[starts >= limit].sum())


def _usual(row: AbsHistogram) -> float:
    """Return the 99.99th percentile of the values other than zero, at its bin's upper edge."""
    total = row.values - row.zeros
    # Of fewer than ten thousand values the largest alone is left out, of a handful none.
    return reach(row, min(0.9999 * total, total - 1) if total >= 100 else total)
