"""Tables, curves and histograms, and the folder that they are written to."""

from __future__ import annotations

import html
import math
import os
from collections.abc import Mapping, Sequence
from itertools import groupby
from pathlib import Path
from typing import Any

from torch import Tensor

from bevquant_graph import file_path
from bevquant_hybrid_tools._template import render
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
    xs = [_LEFT + (i + 0.5) * step for i in range(len(names))]

    def y(value: float) -> float:
        return _TOP + (high - value) / (high - low) * _HEIGHT

    drawn = []
    for colour, (series, values) in zip(_COLOURS * len(curves), curves.items(), strict=False):
        points = [
            (x, y(value), f"{name}: {series} {value:.7g}")
            if value is not None and math.isfinite(value)
            else None
            for x, name, value in zip(xs, names, values, strict=False)
        ]
        runs = [list(run) for known, run in groupby(points, lambda p: p is not None) if known]
        drawn.append({"colour": colour, "series": series, "runs": runs})
    return render(
        __package__,
        "curves.html",
        curves=drawn,
        ticks=[(y(value), label) for value, label in zip(ticks, _labels(ticks), strict=True)],
        names=list(zip(xs, names, strict=True)),
        left=_LEFT,
        width=width,
        foot=_TOP + _HEIGHT + 10,
        height=_TOP + _HEIGHT + 7 * max((len(name) for name in names), default=0) + 30,
    )


def _ticks(low: float, high: float) -> list[float]:
    """Round numbers from below the smallest value to above the largest."""
    # Equal values have no range to divide.
    if high - low <= 1e-9 * max(abs(low), abs(high)):
        half = max(0.5, 1e-3 * abs(high))
        low, high = low - half, high + half
    rough = (high - low) / 5
    power = 10.0 ** math.floor(math.log10(rough))
    step = next(factor * power for factor in (1, 2, 5, 10) if factor * power >= rough * 0.999)
    first, last = math.floor(low / step), math.ceil(high / step)
    return [i * step for i in range(first, last + 1)]


def _labels(ticks: Sequence[float]) -> list[str]:
    decimals = max(0, -math.floor(math.log10((ticks[1] - ticks[0]) * 1.001)))
    return [f"{v:.3g}" if abs(v) >= 1e6 else f"{v:.{decimals}f}" for v in ticks]


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
