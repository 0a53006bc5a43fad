"""The page to sign in headless Chromium: drawn, quiet, by keyboard, on a phone, on paper."""

from __future__ import annotations

import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from browser_page import values, wait
from review_runs import LAYERS, MadeUpRuns

from bevfusion_quant.report import find_browser, print_pdf, run_report

EVIL = "fuser.</script><script>window.hurt=1</script><img src=x onerror=window.hurt=2>"
SIGNED = ["sign-remarks", "sign-name", "sign-role", "sign-date", "sign-signature"]


@pytest.fixture(scope="module")
def page(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = MadeUpRuns(tmp_path_factory.mktemp("made"), EVIL)
    run, trained, chip = made.everything()
    made.compare(run, trained)
    result = run_report(run, qat=trained, bpu=chip, runs=made.root, command="report")
    return result.folder / "report.html"


def press(browser: Any, *keys: str) -> None:
    from selenium.webdriver import ActionChains

    ActionChains(browser, duration=0).send_keys(*keys).perform()


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_charts_are_drawn_and_the_console_is_silent(
    page: Path, show: Callable[..., Any], scheme: str
) -> None:
    browser = show(page, scheme=scheme)
    wait(browser, f"document.querySelectorAll('#layer-chart .dot').length === {LAYERS}")
    wait(browser, "document.getElementById('scene-canvas').width > 1")
    values(browser, "document.querySelector('#quantizer-0').scrollIntoView({behavior: 'instant'})")
    wait(browser, "document.querySelector('#quantizer-0 .counts')")
    for drawn in (
        "document.querySelector('#sensitivity rect.int8')",
        "document.querySelector('#accuracy .curve.integer')",
        "document.querySelector('#scene .box.integer path')",
        "document.querySelector('.partition > div').shadowRoot.querySelector('.card.BPU')",
    ):
        box = values(browser, f"{drawn}.getBoundingClientRect().toJSON()")
        assert box["width"] > 0, drawn
        assert box["height"] > 0, drawn
    ground = values(browser, "getComputedStyle(document.body).backgroundColor")
    assert ground == {"light": "rgb(251, 251, 249)", "dark": "rgb(16, 20, 26)"}[scheme]
    assert values(browser, "document.getElementById('failure').hidden")
    assert values(browser, "window.hurt === undefined")
    assert browser.get_log("browser") == []


@pytest.mark.parametrize("width", [360, 400])
def test_a_phone_needs_no_sideways_scrolling(
    page: Path, show: Callable[..., Any], width: int
) -> None:
    browser = show(page, width)
    wait(browser, "document.querySelectorAll('#layer-chart .dot').length")
    root = "document.documentElement"
    assert values(browser, f"{root}.scrollWidth <= {root}.clientWidth")
    assert values(browser, f"{root}.clientWidth") == width
    wide = """[...document.querySelectorAll('main *')].filter(e => e.checkVisibility() &&
        !e.closest('.scroll, .wide-table, .partition, svg') &&
        getComputedStyle(e).overflowX === 'visible' &&
        e.getBoundingClientRect().right > innerWidth + 1).map(e => e.outerHTML.slice(0, 80))"""
    assert values(browser, wide) == []


def test_the_keyboard_reaches_questions_tables_charts_and_lines(
    page: Path, show: Callable[..., Any]
) -> None:
    browser = show(page)
    wait(browser, "document.querySelector('#layer-chart svg')")
    # What is reached on other pages too, and what is alike: each would take a press.
    alike = (
        "#accuracy, #integers, #export, #decisions, #quantizers, .bpu-part, main td a, "
        "th + th > button, .folder + .folder"
    )
    values(browser, f"document.querySelectorAll('{alike}').forEach(e => e.remove())")
    look = """((e, s) => [e === document.body ? 'body' : e.id || e.getAttribute('aria-label') ||
        e.closest('[id]')?.id || e.textContent, !!e.closest('.segments'),
        s.outlineStyle + s.outlineWidth])(document.activeElement,
        getComputedStyle(document.activeElement))"""
    reached: list[str] = []
    while len(reached) < 150 and (not reached or reached[-1] != "body"):
        press(browser, "\ue004")
        name, is_switch, line = values(browser, look)
        reached.append(name)
        if name != "body" and not is_switch:  # a switch's label has the line
            assert line == "solid2px", name
    assert reached[-1] == "body", reached
    assert {*SIGNED, "Headline table", "Layer table", "Picture of the partition"} <= set(reached)
    assert {"Loss of each group of layers", "Layer, SQNR of its output"} <= set(reached)
    assert "Seen: What does it lose against float?" in reached


def test_every_control_and_picture_has_a_name(page: Path, show: Callable[..., Any]) -> None:
    browser = show(page)
    others = "main > section:not(#verdict, #scene, #sensitivity, #trail, #sign)"
    values(browser, f"document.querySelectorAll('{others}').forEach(e => e.remove())")
    tree = browser.execute_cdp_cmd("Accessibility.getFullAXTree", {})["nodes"]
    named = {"button", "checkbox", "radio", "textbox", "slider", "combobox", "link", "image",
             "img", "region", "columnheader", "rowheader"}  # fmt: skip
    roles = [(n["role"]["value"], n.get("name", {}).get("value", "")) for n in tree if "role" in n]
    assert {"checkbox", "radio", "textbox", "rowheader"} <= {role for role, _ in roles}
    assert [role for role, told in roles if role in named and not told.strip()] == []


def test_paper_has_everything_in_light_colours(page: Path, show: Callable[..., Any]) -> None:
    browser = show(page, scheme="dark")
    wait(browser, "document.querySelectorAll('#layer-chart .dot').length")
    browser.execute_cdp_cmd("Emulation.setEmulatedMedia", {"media": "print"})
    # A4 less its margins, at 96 pixels an inch.
    metrics = {"width": 703, "height": 1009, "deviceScaleFactor": 1, "mobile": False}
    browser.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", metrics)
    assert values(browser, "getComputedStyle(document.body).backgroundColor") == (
        "rgb(255, 255, 255)"
    )
    clipped = """[...document.querySelectorAll('.scroll, .wide-table, main table')]
        .filter(e => e.checkVisibility() && !e.closest('#bpu figure') &&
            e.getBoundingClientRect().right > 704).map(e => e.id || e.outerHTML.slice(0, 80))"""
    assert values(browser, clipped) == []
    assert values(browser, "getComputedStyle(document.querySelector('.top')).display") == "none"
    small = """[...document.querySelectorAll('main td, main th, main p, .chart text')]
        .filter(e => e.checkVisibility() && parseFloat(getComputedStyle(e).fontSize) < 8)
        .map(e => e.outerHTML.slice(0, 80))"""
    assert values(browser, small) == []
    browser.execute_cdp_cmd("Emulation.setEmulatedMedia", {"media": ""})


def test_chromium_prints_it(page: Path, tmp_path: Path) -> None:
    if not any(map(shutil.which, ("chromium", "google-chrome"))):
        pytest.skip("neither Chromium nor Chrome is installed")
    pdf = print_pdf(page, tmp_path / "report.pdf", find_browser())
    assert pdf.read_bytes().startswith(b"%PDF")
    reader = shutil.which("pdftotext")
    if reader is None:
        pytest.skip("no pdftotext to read it with")
    told = subprocess.run([reader, "-layout", pdf, "-"], capture_output=True, text=True, check=True)
    pages = told.stdout.rstrip("\f").split("\f")
    assert "Verdict" in pages[0]
    assert "Signature" in pages[-1]
    assert f"{len(pages)} / {len(pages)}" in pages[-1]
    for words in ("tallest bin", "decoder.5", "Estimate for one core", "run on the BPU"):
        assert any(words in text for text in pages), words
