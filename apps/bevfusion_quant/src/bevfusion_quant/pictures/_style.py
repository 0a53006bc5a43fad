"""One look for every picture, set for a figure at a time and never for the process."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Literal

from matplotlib import rc_context
from matplotlib.figure import Figure

__all__ = ["BLUE", "GREY", "INK", "ORANGE", "figure", "save"]

Layout = Literal["constrained"] | None

INK = "#1f2933"
GREY = "#7b8794"
BLUE = "#2b6cb0"
ORANGE = "#d9480f"

STYLE = {
    "font.family": "DejaVu Sans",
    "font.size": 9,
    "text.color": INK,
    "axes.edgecolor": "#9aa5b1",
    "axes.labelcolor": INK,
    "axes.linewidth": 0.8,
    "axes.titlesize": 10,
    "axes.titlelocation": "left",
    "axes.titlepad": 7,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "xtick.color": GREY,
    "ytick.color": GREY,
    "xtick.labelcolor": INK,
    "ytick.labelcolor": INK,
    "figure.facecolor": "white",
    "savefig.facecolor": "white",
}


@contextmanager
def figure(width: float, height: float, layout: Layout = "constrained") -> Iterator[Figure]:
    """A figure of the given size in inches, drawn without pyplot and so without a display."""
    with rc_context(STYLE):
        yield Figure(figsize=(width, height), layout=layout)


def save(drawn: Figure, path: Path, *, dpi: int = 130) -> Path:
    """Write the figure as PNG."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg

    FigureCanvasAgg(drawn)
    # No date or version in the file: the same run writes the same bytes.
    drawn.savefig(path, dpi=dpi, metadata={"Software": None})
    return path
