"""The learning rate of every step."""

from __future__ import annotations

import math

RISE, FIRST, LAST = 0.3, 25.0, 1e4


def one_cycle(step: int, steps: int, highest: float) -> float:
    """Smith and Topin's one-cycle schedule (2018), with cosines, as torch's `OneCycleLR` has it.

    From highest / 25 up to `highest` in the first 30 % of the steps, then down to
    highest / 25 / 10⁴ at the last one, each along half a cosine. A function of the step alone, so
    that a run goes on where it stopped.

    Args:
        step: From 0.
        steps: Of the whole run.
        highest: The largest learning rate.

    Example:
        >>> [round(one_cycle(step, 100, 1.0), 3) for step in (0, 29, 99)]
        [0.04, 1.0, 0.0]
    """
    first = highest / FIRST
    top = RISE * steps - 1
    if step <= top:
        return _between(first, highest, step / top if top > 0 else 1.0)
    return _between(highest, first / LAST, min(1.0, (step - top) / (steps - 1 - top)))


def _between(start: float, end: float, share: float) -> float:
    return end + (start - end) / 2 * (1 + math.cos(math.pi * share))
