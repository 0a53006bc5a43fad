"""A bar for a loop, where tqdm is installed and somebody watches."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from bevquant_quantizers.plugins import importable


@contextmanager
def progress_bar(
    show: bool | None, total: int | None, initial: int = 0, *, desc: str, unit: str = "batch"
) -> Iterator[Callable[[], object]]:
    """Yield a function to call after each item.

    `show` None shows the bar where tqdm is installed and stderr is a terminal.
    """
    installed = importable("tqdm")
    if show and not installed:
        raise ImportError("progress=True needs tqdm: pip install tqdm, or leave progress at None")
    if show is False or not installed or (show is None and not sys.stderr.isatty()):
        yield lambda: None
        return
    from tqdm.auto import tqdm

    with tqdm(total=total, initial=initial, desc=desc, unit=unit, leave=bool(show)) as bar:
        yield bar.update
