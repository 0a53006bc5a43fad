"""What the tests share: fresh settings of the process."""

from __future__ import annotations

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
