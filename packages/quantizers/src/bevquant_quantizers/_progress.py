"""A progress bar where tqdm is installed."""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager

__all__ = ["progress_bar"]


@contextmanager
def progress_bar(
    show: bool | None, total: int | None, initial: int = 0
) -> Iterator[Callable[[], object]]:
    """Yield a function to call after each batch.

    Args:
        show: None shows the bar where tqdm is installed and stderr is a terminal.
        total: Number of batches, None where unknown.
        initial: Batches done before.

    Raises:
        ValueError: `show` is True and tqdm is not installed.
    """
    installed = importlib.util.find_spec("tqdm") is not None
    if show and not installed:
        raise ValueError(
            "progress=True needs tqdm: pip install 'bevquant-quantizers[progress]', or leave "
            "progress at None"
        )
    if show is False or not installed or (show is None and not sys.stderr.isatty()):
        yield lambda: None
        return
    from tqdm import tqdm

    with tqdm(total=total, initial=initial, desc="calibrate", unit="batch") as bar:
        yield bar.update
