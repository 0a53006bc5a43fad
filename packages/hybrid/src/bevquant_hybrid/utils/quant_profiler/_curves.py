"""Curves over the operators of a model, as one page that needs nothing else."""

from __future__ import annotations

import html
import math
from collections.abc import Callable, Mapping, Sequence

__all__ = ["curves_page", "curves_picture", "page"]

_COLOURS = ("#2a6f97", "#c8553d", "#588157", "#7b5ea7")
_LEFT, _TOP, _HEIGHT, _STEP = 90, 20, 320, 16  # pixels: margins, plot, between two operators


def curves_page(
    title: str, names: Sequence[str], curves: Mapping[str, Sequence[float | None]]
) -> str:
    """Return an HTML page with the picture of `curves_picture`."""
    return page(title, curves_picture(names, curves))


def page(title: str, content: str) -> str:
    """Return an HTML page."""
    heading = html.escape(title)
    return (
        f'<!doctype html>\n<meta charset="utf-8">\n<title>{heading}</title>\n'
        "<style>body { font-family: sans-serif } circle:hover { r: 6 } "
        "pre { overflow-x: auto }</style>\n"
        f"<h1>{heading}</h1>\n{content}"
    )


def curves_picture(names: Sequence[str], curves: Mapping[str, Sequence[float | None]]) -> str:
    """Return a part of a page with one curve per series; a point tells its operator and value.

    Args:
        names: Of the operators, from left to right.
        curves: Values by the name of the series; None and what is not finite leaves a gap.
    """
    finite = [v for values in curves.values() for v in values if v is not None and math.isfinite(v)]
    low, high = (min(finite), max(finite)) if finite else (0.0, 1.0)
    ticks = _ticks(low, high)
    low, high = min(low, ticks[0]), max(high, ticks[-1])
    width = max(640, _STEP * len(names) + 20)
    step = (width - 20) / max(1, len(names))

    def x(index: int) -> float:
        return _LEFT + (index + 0.5) * step

    def y(value: float) -> float:
        return _TOP + (high - value) / (high - low) * _HEIGHT

    parts = [_axis(ticks, y, width)]
    for i, name in enumerate(names):
        label = html.escape(name)
        parts.append(
            f'<text transform="translate({x(i) + 4:.1f},{_TOP + _HEIGHT + 10}) rotate(-90)" '
            f'text-anchor="end">{label}</text>'
        )
    for colour, (series, values) in zip(_COLOURS * len(curves), curves.items(), strict=False):
        parts.append(_curve(colour, series, names, values, x, y))
    legend = " ".join(
        f'<span style="color:{colour}">■ {html.escape(series)}</span>'
        for colour, series in zip(_COLOURS * len(curves), curves, strict=False)
    )
    space = 7 * max((len(name) for name in names), default=0) + 30
    picture = (
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{_LEFT + width}" '
        f'height="{_TOP + _HEIGHT + space}" font-family="sans-serif" font-size="11">'
        f"{''.join(parts)}</svg>"
    )
    return f'<p>{legend}</p>\n<div style="overflow-x: auto">{picture}</div>\n'


def _ticks(low: float, high: float) -> list[float]:
    """Round numbers from below the smallest value to above the largest."""
    if high - low <= 1e-9 * max(abs(low), abs(high)):
        half = max(0.5, 1e-3 * abs(high))
        low, high = low - half, high + half
    rough = (high - low) / 5
    power = 10.0 ** math.floor(math.log10(rough))
    step = next(factor * power for factor in (1, 2, 5, 10) if factor * power >= rough * 0.999)
    first, last = math.floor(low / step), math.ceil(high / step)
    return [i * step for i in range(first, last + 1)]


def _axis(ticks: Sequence[float], y: Callable[[float], float], width: float) -> str:
    decimals = max(0, -math.floor(math.log10((ticks[1] - ticks[0]) * 1.001)))
    lines = []
    for value in ticks:
        at = y(value)
        label = f"{value:.3g}" if abs(value) >= 1e6 else f"{value:.{decimals}f}"
        lines.append(
            f'<line x1="{_LEFT}" x2="{_LEFT + width}" y1="{at:.1f}" y2="{at:.1f}" stroke="#ddd"/>'
            f'<text x="{_LEFT - 6}" y="{at + 4:.1f}" text-anchor="end">{label}</text>'
        )
    return "".join(lines)


def _curve(
    colour: str,
    series: str,
    names: Sequence[str],
    values: Sequence[float | None],
    x: Callable[[int], float],
    y: Callable[[float], float],
) -> str:
    runs: list[list[str]] = [[]]
    points = []
    for i, value in enumerate(values):
        if value is None or not math.isfinite(value):
            runs.append([])
            continue
        runs[-1].append(f"{x(i):.1f},{y(value):.1f}")
        told = html.escape(f"{names[i]}: {series} {value:.7g}")
        points.append(
            f'<circle cx="{x(i):.1f}" cy="{y(value):.1f}" r="3" fill="{colour}">'
            f"<title>{told}</title></circle>"
        )
    lines = [
        f'<polyline points="{" ".join(run)}" fill="none" stroke="{colour}"/>' for run in runs if run
    ]
    return "".join([*lines, *points])
