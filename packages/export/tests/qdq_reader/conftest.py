"""Where real files lie."""

from __future__ import annotations

import logging
import os
from collections.abc import Iterator
from pathlib import Path

import pytest


@pytest.fixture
def shared_data() -> Path:
    """The folder of real data."""
    folders = [parent / "shared" / "data" for parent in Path(__file__).parents]
    if "BEVQUANT_DATA" in os.environ:
        folders.insert(0, Path(os.environ["BEVQUANT_DATA"]))
    found = next((folder for folder in folders if folder.is_dir()), None)
    if found is None:
        pytest.skip("real data not found: set BEVQUANT_DATA")
    return found


@pytest.fixture(autouse=True)
def _quiet() -> Iterator[None]:
    """ONNX Runtime's quantizer advises preprocessing, which these files have no need of."""
    logging.disable(logging.WARNING)
    yield
    logging.disable(logging.NOTSET)
