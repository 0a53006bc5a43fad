"""Seconds by step, told on the way; and whose fault a refusal is."""

from __future__ import annotations

import logging
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

from bevfusion_quant._errors import InputError

__all__ = ["Clock"]

LOG = logging.getLogger(__name__)


@dataclass
class Clock:
    """Times the steps of a run.

    Attributes:
        taken: Seconds by step, so far.
    """

    taken: dict[str, float] = field(default_factory=dict)
    _start: float = field(default_factory=time.perf_counter)

    @contextmanager
    def step(self, name: str, blame: str = "") -> Iterator[None]:
        """Time a step; with `blame`, what it refuses is the input's fault and is said so."""
        LOG.info("%s …", name)
        start = time.perf_counter()
        try:
            yield
        except ValueError as error:
            if not blame or isinstance(error, InputError):
                raise
            raise InputError(f"{blame}: {error}") from error
        self.taken[name] = round(time.perf_counter() - start, 3)

    def seconds(self) -> dict[str, float]:
        """The steps, and `total` from the first moment."""
        return {**self.taken, "total": round(time.perf_counter() - self._start, 3)}
