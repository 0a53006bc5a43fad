"""Ctrl-C and SIGTERM as a request that is met between two steps."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from types import FrameType

__all__ = ["StopRequest", "stop_on_signals"]


@dataclass
class StopRequest:
    """Whether somebody wants the run to end.

    Attributes:
        asked: Set by the first signal; the second one interrupts at once.
    """

    asked: bool = False


@contextmanager
def stop_on_signals() -> Iterator[StopRequest]:
    """Note SIGINT and SIGTERM instead of breaking off in the middle of a step.

    The handlers that were there come back at the end. In a thread, where Python lets nobody handle
    signals, the request stays as it is.
    """
    request = StopRequest()

    def note(number: int, frame: FrameType | None) -> None:
        if request.asked:
            raise KeyboardInterrupt
        request.asked = True

    before = {}
    try:
        for number in (signal.SIGINT, signal.SIGTERM):
            try:
                before[number] = signal.signal(number, note)
            except ValueError:  # not the main thread
                break
        yield request
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
