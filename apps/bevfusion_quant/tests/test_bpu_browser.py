"""The section "BPU and CPU" in headless Chromium: drawn, apart from the page, on a phone."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from bpu_outcome import LAYERS, outcome
from browser_page import values

from bevfusion_quant.pages import ReportContent, write_report

EVIL = '<img src=x onerror="window.hurt=1">'
PICTURE = "document.querySelector('.partition > div').shadowRoot.querySelector('svg')"


@pytest.fixture(scope="module")
def page(tmp_path_factory: pytest.TempPathFactory) -> Path:
    content = ReportContent("bpu", versions={"torch": "2.13"}, bpu=outcome(EVIL))
    return write_report(tmp_path_factory.mktemp("report") / "report.html", content)


@pytest.fixture
def tab(show: Callable[..., Any], page: Path) -> Any:
    """The page, freshly opened, 1280 pixels wide."""
    return show(page)


def test_the_picture_is_drawn_and_the_console_silent(tab: Any) -> None:
    assert values(tab, f"{PICTURE}.querySelectorAll('.card.BPU').length") == LAYERS
    assert values(tab, f"{PICTURE}.getBoundingClientRect().width") > 500
    assert tab.get_log("browser") == []
    assert values(tab, "document.getElementById('failure').hidden")
    assert values(tab, "window.hurt === undefined")


def test_the_pages_styles_and_the_pictures_keep_apart(tab: Any) -> None:
    bar = f"{PICTURE}.querySelector('rect.bar')"
    assert values(tab, f"getComputedStyle({bar}).height") == "26px"  # the page's .bar has 3px
    fills = values(tab, "getComputedStyle(document.querySelector('h1')).fill")
    assert fills == "rgb(0, 0, 0)"  # the picture's `text` and `.name` do not reach out


@pytest.mark.parametrize(("scheme", "other"), [("light", "dark"), ("dark", "light")])
def test_colours_follow_the_system_and_then_the_reader(
    show: Callable[..., Any], page: Path, scheme: str, other: str
) -> None:
    browser = show(page, scheme=scheme)
    ink = f"getComputedStyle({PICTURE}.querySelector('.name')).fill"
    area = f"getComputedStyle({PICTURE}.querySelector('.area.BPU')).fill"
    inks = {"light": "rgb(29, 39, 51)", "dark": "rgb(232, 237, 242)"}
    areas = {"light": "rgb(223, 235, 248)", "dark": "rgb(21, 43, 66)"}
    assert (values(browser, ink), values(browser, area)) == (inks[scheme], areas[scheme])
    browser.execute_script(f"document.querySelector('#theme [value={other}]').click()")
    assert (values(browser, ink), values(browser, area)) == (inks[other], areas[other])


def test_on_a_phone_the_page_stays_within_its_width(show: Callable[..., Any], page: Path) -> None:
    browser = show(page, 400)
    assert values(browser, "document.documentElement.scrollWidth") == 400
    # The first node has come into view, though the picture is wider than the page.
    box = values(browser, "document.querySelector('.partition').getBoundingClientRect().toJSON()")
    node = values(browser, f"{PICTURE}.querySelector('g rect').getBoundingClientRect().toJSON()")
    assert values(browser, f"{PICTURE}.getBoundingClientRect().width") > box["width"]
    assert box["left"] <= node["left"]
    assert node["right"] <= box["right"]
    for table in ("#bpu-layers", "#estimate-camera", ".boundaries"):
        wide = values(browser, f"document.querySelector('#bpu {table}').scrollWidth")
        assert wide <= 400, table
    kinds = "[...document.querySelectorAll('.boundaries td:nth-of-type(1)')]"
    assert values(browser, f"{kinds}.every(e => e.getClientRects().length === 1)")


def test_the_picture_fits_the_width_on_request(show: Callable[..., Any], page: Path) -> None:
    browser = show(page, 400)
    full = values(browser, f"{PICTURE}.getBoundingClientRect().width")
    button = browser.find_element("id", "partition-fit")
    browser.execute_script("arguments[0].scrollIntoView({block: 'center'})", button)
    button.click()
    room = values(browser, "document.querySelector('.partition').clientWidth")
    assert values(browser, f"{PICTURE}.getBoundingClientRect().width") <= room < full
    assert button.get_attribute("aria-pressed") == "true"
    button.click()
    assert values(browser, f"{PICTURE}.getBoundingClientRect().width") == full


def test_keys_reach_and_scroll_what_scrolls(tab: Any) -> None:
    """Boxes that scroll take the focus and have names."""
    boxes = "[...document.querySelectorAll('#bpu .partition, #bpu .scroll')]"
    assert values(tab, f"{boxes}.length") == 3
    assert values(tab, f"{boxes}.every(b => b.tabIndex === 0 && b.getAttribute('aria-label'))")
    assert values(tab, "document.querySelector('.top nav a[href=\"#bpu\"]').textContent") == (
        "BPU and CPU"
    )
