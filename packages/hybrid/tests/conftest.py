"""What the tests share: fresh settings of the process, and documents to compare with."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from bevquant_hybrid import march, qat_mode


@pytest.fixture(autouse=True)
def _fresh_process_settings():
    """Every test starts on BAYES with folded batch norms."""
    before = march.get_march()
    march.set_march(march.March.BAYES)
    yield
    qat_mode.set_qat_mode("fuse_bn")
    march._chosen[:] = [before] if before else []


def shared_folder() -> Path:
    data = os.environ.get("BEVQUANT_DATA")
    if data:
        return Path(data).parent
    return Path(__file__).resolve().parents[4] / "shared"


@pytest.fixture(scope="session")
def document():
    """Text of a document of the vendor's, by the number its file name starts with."""

    def read(number: str) -> str:
        found = sorted((shared_folder() / "seeds").glob(f"{number}_*.txt"))
        if not found:
            pytest.skip(f"document {number} is not in {shared_folder() / 'seeds'}")
        return found[0].read_text()

    return read


@pytest.fixture(scope="session")
def data_folder() -> Path:
    found = Path(os.environ.get("BEVQUANT_DATA") or shared_folder() / "data")
    if not found.is_dir():
        pytest.skip(f"no test data in {found}")
    return found
