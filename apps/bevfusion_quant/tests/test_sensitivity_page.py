"""The section "Sensitivity" from a made-up table, escaped, and drawn in Chromium."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from bevfusion_quant.pages import ReportContent, write_report
from bevfusion_quant.sensitivity import SensitivityOutcome
from bevquant_qnn import PlannedGroup, PrecisionPlan, SensitivityRow, SensitivityTable

EVIL = "encoders.lidar.</script><script>window.hurt=1</script>"
LAYERS = 40


@pytest.fixture(scope="module")
def outcome() -> SensitivityOutcome:
    """Forty groups, each half a decibel better than the one before; the worst three in float."""
    names = [EVIL, *(f"encoders.camera.backbone.layer{i}.conv" for i in range(1, LAYERS))]
    rows = tuple(
        SensitivityRow((name, f"{name}_too"), 1000, {"int8": 30 + i / 2, "int16": 60.0}, 20.0)
        for i, name in enumerate(names)
    )
    table = SensitivityTable("sqnr", 144.5, 19.0, rows, 3)
    groups = [PlannedGroup(row.modules, "float" if i < 3 else "int8") for i, row in enumerate(rows)]
    plan = PrecisionPlan(tuple(groups), 1.2, 31.0, "sqnr")
    return SensitivityOutcome(table, "decoder.neck", ("int8", "int16"), plan, "time=1.2")


@pytest.fixture(scope="module")
def page(outcome: SensitivityOutcome, tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("report") / "report.html"
    return write_report(path, ReportContent("made up", sensitivity=outcome))


def test_names_are_escaped_and_other_pages_have_no_section(page: Path, tmp_path: Path) -> None:
    text = page.read_text(encoding="utf-8")
    assert "<script>window.hurt" not in text
    without = write_report(tmp_path / "without.html", ReportContent("made up"))
    assert "sensitivity" not in without.read_text(encoding="utf-8")


def test_chromium_draws_it_in_both_schemes_and_on_a_phone(
    page: Path, show: Callable[..., Any]
) -> None:
    look = (
        "const bars = [...document.querySelectorAll('#sensitivity rect.int8')];"
        "return [getComputedStyle(bars[0]).fill, bars.map(b => b.getBoundingClientRect().width),"
        " document.documentElement.scrollWidth, window.hurt ?? 0]"
    )
    fills = {}
    for width, scheme in ((1280, "light"), (1280, "dark"), (400, "light")):
        browser = show(page, width, scheme)
        fill, widths, whole, hurt = browser.execute_script(look)
        fills[scheme] = fill
        assert len(widths) == LAYERS
        assert widths[0] > 25
        assert widths == sorted(widths, reverse=True)
        assert widths[20] == pytest.approx(widths[0] / 10, rel=0.02)  # 10 dB better
        assert whole <= width
        assert hurt == 0
        assert browser.get_log("browser") == []
    assert len(set(fills.values())) == 2
