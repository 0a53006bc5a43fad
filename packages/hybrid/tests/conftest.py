"""What the tests share: fresh settings of the process, and the tools that are not below them."""

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


@pytest.fixture(scope="session")
def tools():
    """The package that has the profiler, estimates and pictures, which documented names find."""
    missing = "bevquant-hybrid-tools is not installed"
    return pytest.importorskip("bevquant_hybrid_tools", reason=missing)
