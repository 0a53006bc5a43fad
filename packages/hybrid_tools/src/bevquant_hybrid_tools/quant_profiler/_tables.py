"""Tables, curves and histograms, and the folder that they are written to."""

from __future__ import annotations

import html
import math
import os
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from torch import Tensor

from bevquant_graph import file_path
from bevquant_quantizers.documents import write_whole

Cell = str | int

_COLOURS = ("#2a6f97", "#c8553d", "#588157", "#7b5ea7")
_LEFT, _TOP, _HEIGHT, _STEP = 90, 20, 320, 16  # pixels: margins, plot, between two operators


def simple_table(header: Sequence[str], rows: Sequence[Sequence[Cell]]) -> str:
    """Columns under dashes.

    A column whose cells are all integers stands to the right, any other to the left; a column is
    at least two wider than its title.

    Example:
        >>> print(simple_table(["name", "called times"], [["conv", 1], ["pool.0", 12]]))
        name      called times
        ------  --------------
        conv                 1
        pool.0              12
    """
    columns = _columns(header, rows)
    rule = "  ".join("-" * width for width, _ in columns)
    lines = [_joined(header, columns), rule, *(_joined(row, columns) for row in rows)]
    return "\n".join(line.rstrip() for line in lines)


def grid_table(header: Sequence[str], rows: Sequence[Sequence[Cell]]) -> str:
    """Columns between bars; a title may have several lines.

    Example:
        >>> print(grid_table(["Weight Name", "ch_axis"], [["conv.weight", 0]]))
        +---------------+-----------+
        | Weight Name   |   ch_axis |
        |---------------+-----------|
        | conv.weight   |         0 |
        +---------------+-----------+
    """
    columns = _columns(header, rows)
    dashes = ["-" * (width + 2) for width, _ in columns]
    edge = f"+{'+'.join(dashes)}+"
    titles = [title.split("\n") for title in header]
    deepest = max(len(lines) for lines in titles)
    heads = [[lines[i] if i < len(lines) else "" for lines in titles] for i in range(deepest)]
    body = [f"| {_joined(row, columns, ' | ')} |" for row in [*heads, *rows]]
    rule = f"|{'+'.join(dashes)}|"
    return "\n".join([edge, *body[:deepest], rule, *body[deepest:], edge])


def _columns(header: Sequence[str], rows: Sequence[Sequence[Cell]]) -> list[tuple[int, bool]]:
    """Width of each column, and whether it stands to the right."""
    columns = []
    for i, title in enumerate(header):
        cells = [row[i] for row in rows]
        longest = max(len(line) for line in title.split("\n"))
        width = max([longest + 2, *(len(str(cell)) for cell in cells)])
        columns.append((width, bool(cells) and all(isinstance(cell, int) for cell in cells)))
    return columns


def _joined(row: Sequence[Cell], columns: Sequence[tuple[int, bool]], gap: str = "  ") -> str:
    return gap.join(
        str(cell).rjust(width) if right else str(cell).ljust(width)
        for cell, (width, right) in zip(row, columns, strict=True)
    )


def write_text(out_dir: str | os.PathLike[str] | None, name: str, text: str) -> Path:
    """Write a file completely or not at all; return its path. None: in the current folder."""
    return write_whole(
        (Path() if out_dir is None else file_path(out_dir, "folder")) / name, text, parents=True
    )


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
    """Return a part of a page with one curve per series; a point shows its operator and value.

    None and values that are not finite leave a gap.
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
        bar_label = html.escape(f"{names[i]}: {series} {value:.7g}")
        points.append(
            f'<circle cx="{x(i):.1f}" cy="{y(value):.1f}" r="3" fill="{colour}">'
            f"<title>{bar_label}</title></circle>"
        )
    lines = [
        f'<polyline points="{" ".join(run)}" fill="none" stroke="{colour}"/>' for run in runs if run
    ]
    return "".join([*lines, *points])


def write_histograms(
    titles: Sequence[str],
    tensors: Sequence[tuple[Tensor, int]],
    folder: str | os.PathLike[str] | None,
    per_channel: bool = False,
) -> None:
    """Write one histogram per tensor, or one per channel of it (along axis 1 for an axis of −1)."""
    try:
        from torch.utils.tensorboard import SummaryWriter
    except ImportError as error:
        raise ImportError(
            "with_tensorboard=True needs TensorBoard: pip install tensorboard"
        ) from error
    make: Any = SummaryWriter
    with make(None if folder is None else os.fspath(folder)) as writer:
        for title, (tensor, axis) in zip(titles, tensors, strict=True):
            values = tensor.detach().double()
            if values.numel() == 0 or not bool(values.isfinite().all()):
                continue
            if not per_channel or values.dim() < 2:
                writer.add_histogram(title, values)
                continue
            for channel, part in enumerate(values.unbind(axis if axis >= 0 else 1)):
                writer.add_histogram(f"{title}/{channel}", part)
