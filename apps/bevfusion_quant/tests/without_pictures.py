"""Runs whose pictures and pages are not what a test is about."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from bevfusion_quant.pages import EvaluatedRun

__all__ = ["without_pictures"]


@contextmanager
def without_pictures(*, page: bool = False) -> Iterator[None]:
    """For the length of the block, runs write neither: a second each; the page if it is wanted."""
    with pytest.MonkeyPatch.context() as patch:
        for name in ("draw",) if page else ("draw", "write_page"):
            patch.setattr(EvaluatedRun, name, lambda *given: None)
        yield
