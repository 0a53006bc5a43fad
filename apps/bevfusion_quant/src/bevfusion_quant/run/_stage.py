"""The current stage: a line in a log, elapsed time on a terminal; compilations are named."""

from __future__ import annotations

import logging
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from numba.core.event import Event, Listener, install_listener
from tqdm import tqdm

LOG = logging.getLogger(__name__)
COMPILING = "compiling kernels, once on this machine"


class _Compilations(Listener):  # type: ignore[misc]  # numba has no types
    """Reports when numba compiles a kernel that is not in its cache."""

    def __init__(self, say: Callable[[str], None]) -> None:
        self._say = say

    def on_start(self, event: Event) -> None:
        """A compilation starts."""
        self._say(COMPILING)

    def on_end(self, event: Event) -> None:
        """A compilation ends."""
        self._say("")


@contextmanager
def shown_stage(name: str) -> Iterator[None]:
    """Show the name of the stage while the block runs; nothing with --quiet.

    Args:
        name: Name of the stage.
    """
    if not LOG.isEnabledFor(logging.INFO):
        yield
        return
    shown = _bar if sys.stderr.isatty() else _lines
    with shown(name) as say, install_listener("numba:compile", _Compilations(say)):
        yield


@contextmanager
def _lines(name: str) -> Iterator[Callable[[str], None]]:
    said: set[str] = {""}

    def say(note: str) -> None:
        if note not in said:
            said.add(note)
            LOG.info("%s: %s …", name, note)

    LOG.info("%s …", name)
    yield say


@contextmanager
def _bar(name: str) -> Iterator[Callable[[str], None]]:
    ended = threading.Event()

    def tick(bar: tqdm[Any]) -> None:
        while not ended.wait(1.0):
            bar.refresh()

    with tqdm(desc=name, bar_format="{desc}  {elapsed}") as bar:
        clock = threading.Thread(target=tick, args=(bar,), daemon=True)
        clock.start()
        try:
            yield lambda note: bar.set_description_str(f"{name}: {note}" if note else name)
        finally:
            ended.set()
            clock.join()
