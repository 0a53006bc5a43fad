"""spconv, where it is at hand."""

from __future__ import annotations

import warnings

import pytest


@pytest.fixture(scope="session")
def spconv():
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return pytest.importorskip("spconv.pytorch", reason="spconv is not installed")
