"""The page in headless Chromium: drawn, quiet, usable by keyboard, on a phone, on paper."""

from __future__ import annotations

import base64
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from browser_page import values, wait
from integer_rows import float_row, layer_row, simulation

from bev_data.cameras import CAMERA_NAMES, Camera
from bevfusion_quant.pages import (
    ReportBoxes,
    ReportContent,
    ReportScene,
    ReportStage,
    write_report,
)
from bevquant_qnn import LayerRow
from bevquant_quantizers import QuantizerValues

LAYERS = 80
EXTENT = (-20.0, -20.0, 20.0, 20.0)
EVIL = "encoders.lidar.</script><script>window.hurt=1</script><img src=x onerror=window.hurt=2>"


def content() -> ReportContent:
    """Two quantizers for each of 80 layers, maps from above and of the cameras, six pictures."""
    rng = np.random.default_rng(0)
    parts = ("encoders.camera.backbone", "encoders.lidar.backbone", "fuser", "decoder")
    names = [EVIL, *(f"{parts[i * 4 // LAYERS]}.layer{i}.conv" for i in range(1, LAYERS))]
    layers = [
        LayerRow(name, "QuantConv2d", 8, 100.0, 40 - 0.3 * i, 1 - i * 1e-4, i * 1e-4, 2.0)
        for i, name in enumerate(names)
    ]
    quantizers = []
    for name in names:
        for role, amax in (("input", [2.0]), ("weight", [1.0, 2.0, 3.0])):
            seen = QuantizerValues((f"{name}._{role}_quantizer",), 8, np.array(amax))
            values = rng.standard_normal(400)
            seen.largest, seen.total = float(np.abs(values).max()), values.size
            seen.counts = np.histogram(values, seen.edges)[0]
            quantizers.append(seen)
    matrix = np.array([[100.0, 0, 80], [0, 100, 45], [0, 0, 1]])
    ahead = np.eye(4)
    ahead[:3, :3] = [[1, 0, 0], [0, 0, -1], [0, 1, 0]]
    image = rng.integers(0, 255, (90, 160, 3), dtype=np.uint8)
    boxes = np.array([[0.0, 8, 0, 4, 2, 1.5, 0.3], [3, 12, 0, 4, 2, 1.5, 0]])
    found = ReportBoxes(boxes, ("car", EVIL), np.array([0.9, 0.4]))
    flat = rng.random((30, 30)).astype(np.float32)
    seen_by = rng.random((6, 8, 16)).astype(np.float32)
    return ReportContent(
        title="browser",
        command="bevfusion-quant demo",
        versions={"torch": "2.13"},
        seconds={"total": 1.0},
        scene=ReportScene(
            EVIL, rng.uniform(-20, 20, (2000, 3)), EXTENT, "points",
            ReportBoxes(boxes, ("car", "bus")), found, found,
            [Camera(name, image, matrix, ahead) for name in CAMERA_NAMES],
        ),
        stages=[
            ReportStage("camera", "Camera", seen_by, seen_by * 1.1, sqnr_db=30.0),
            ReportStage("lidar", EVIL, flat, flat * 1.1, extent=EXTENT, sqnr_db=19.0),
        ],
        layers=layers,
        quantizers=quantizers,
        fusion={"fused": [{"conv": "a.conv", "bn": "a.bn", "how": "removed"}], "skipped": []},
        quantization={"skipped": [{"path": EVIL, "reason": "a softmax stays float"}]},
        calibration={"quantizers": [], "warnings": ["few frames"]},
        integers=simulation(
            *(layer_row(name, max_steps=i % 7, fake_cosine=1 - i * 1e-4)
              for i, name in enumerate(names)),
            layer_row("fuser.told", forced_max_steps=3, max_steps=9, why="bias rounded to ±3"),
            float_row("heads.object"),
        ),
    )  # fmt: skip


@pytest.fixture(scope="module")
def page(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_report(tmp_path_factory.mktemp("report") / "report.html", content())


@pytest.fixture
def tab(drawn: Callable[..., Any]) -> Any:
    """The page, freshly opened and drawn, 1280 pixels wide."""
    return drawn()


@pytest.fixture
def drawn(show: Callable[..., Any], page: Path) -> Callable[..., Any]:
    """Opens the page and waits for its charts."""

    def opened(width: int = 1280, scheme: str = "light") -> Any:
        browser = show(page, width, scheme)
        wait(browser, "document.querySelector('#stage-0 canvas').width > 1")
        wait(browser, "document.getElementById('scene-canvas').width > 1")
        wait(browser, "document.querySelectorAll('#layer-chart .dot').length")
        return browser

    return opened


def shown(browser: Any, selector: str) -> int:
    found = f"[...document.querySelectorAll({selector!r})]"
    return int(values(browser, f"{found}.filter(e => !e.hidden).length"))


def click(browser: Any, selector: str) -> None:
    """Bring it to the middle, away from the bar on top, then click it as a pointer does."""
    element = browser.find_element("css selector", selector)
    browser.execute_script("arguments[0].scrollIntoView({block: 'center'})", element)
    element.click()


def choose(browser: Any, name: str, value: str) -> None:
    browser.execute_script(
        "const e = document.getElementById(arguments[0]); e.value = arguments[1];"
        "e.dispatchEvent(new Event('input', {bubbles: true}))", name, value,
    )  # fmt: skip


def press(browser: Any, *keys: str) -> None:
    from selenium.webdriver import ActionChains

    ActionChains(browser, duration=0).send_keys(*keys).perform()


def type_into(browser: Any, name: str, text: str) -> None:
    field = browser.find_element("id", name)
    field.clear()
    field.send_keys(text)


def test_the_console_stays_silent_and_nothing_is_requested(tab: Any, page: Path) -> None:
    assert tab.get_log("browser") == []
    requests = [
        message["params"]["request"]["url"]
        for entry in tab.get_log("performance")
        if (message := json.loads(entry["message"])["message"])["method"]
        == "Network.requestWillBeSent"
    ]
    outside = [u for u in requests if not u.startswith("data:") and u != page.as_uri()]
    assert page.as_uri() in requests
    assert outside == []


def test_names_with_markup_do_nothing(tab: Any) -> None:
    assert values(tab, "window.hurt === undefined")
    assert tab.find_element("css selector", "#layer-0 .name").text == EVIL
    assert values(tab, "document.querySelectorAll('img:not([src^=\"data:\"])').length") == 0


def test_charts_and_pictures_are_drawn(tab: Any) -> None:
    assert shown(tab, "#layer-chart .dot") == LAYERS
    assert shown(tab, "#layer-chart .dot.low") == LAYERS - 67
    drawn = values(tab, "[...document.querySelectorAll('#stage-0 figure canvas')].map(colours)"
                   .replace("colours", COLOURS))  # fmt: skip
    assert all(count > 20 for count in drawn)
    assert values(tab, f"({COLOURS})(document.getElementById('scene-canvas'))") > 20
    assert values(tab, "[...document.images].every(i => i.complete && i.naturalWidth === 160)")
    assert shown(tab, ".cameras .box") == 6 * 6


COLOURS = """canvas => new Set(new Uint32Array(canvas.getContext('2d')
    .getImageData(0, 0, canvas.width, canvas.height).data.buffer)).size"""


def test_histograms_are_drawn_when_they_come_into_view(tab: Any) -> None:
    drawn = "document.querySelectorAll('.histogram .counts').length"
    before = values(tab, drawn)
    assert before < 2 * LAYERS
    last = f"#quantizer-{2 * LAYERS - 1}"
    values(tab, f"document.querySelector('{last}').scrollIntoView({{behavior: 'instant'}})")
    wait(tab, f"document.querySelector('{last} .counts')")
    assert shown(tab, f"{last} .edge") == 2
    assert shown(tab, f"{last} .spread") == 2
    assert shown(tab, f"{last} .channels") == 1


def test_linear_and_logarithmic_counts_differ(tab: Any) -> None:
    values(tab, "document.querySelector('#quantizer-0').scrollIntoView({behavior: 'instant'})")
    wait(tab, "document.querySelector('#quantizer-0 .counts')")
    outline = "document.querySelector('#quantizer-0 .counts').getAttribute('d')"
    before = values(tab, outline)
    click(tab, "input[name=counts][value=linear]")
    assert values(tab, outline) != before
    click(tab, "input[name=counts][value=log]")
    assert values(tab, outline) == before


def test_quantizers_filter_and_sort(tab: Any) -> None:
    type_into(tab, "quantizer-search", "layer7")
    assert shown(tab, ".card") == 2 * 11  # layer7 and layer70 to layer79
    choose(tab, "quantizer-kind", "weight")
    assert shown(tab, ".card") == 11
    assert tab.find_element("id", "quantizer-shown").text == "11 of 160 quantizers"
    choose(tab, "quantizer-sort", "spread")
    assert values(tab, "document.querySelector('#quantizer-cards').children[0].dataset.kind") == (
        "weight"
    )


def test_a_layers_range_leads_to_its_histogram_even_if_filtered_away(tab: Any) -> None:
    type_into(tab, "quantizer-search", "nothing like it")
    assert shown(tab, ".card") == 0
    values(tab, "document.querySelector('#layer-5 td.amax a').click()")
    wait(tab, "!document.querySelector('#quantizer-10').hidden")
    assert tab.current_url.endswith("#quantizer-10")


def test_the_table_sorts_by_every_column(tab: Any) -> None:
    order = "[...document.querySelectorAll('#layer-table tbody tr')].map(r => +r.id.slice(6))"
    rising = list(range(LAYERS))
    for key, first, state in (
        ("sqnr", rising[::-1], "ascending"),
        ("saturated", rising[::-1], "descending"),
        ("order", rising, "ascending"),
        ("cosine", rising[::-1], "ascending"),
    ):
        button = f"#layer-table th[data-key={key}] button"
        head = tab.find_element("css selector", f"#layer-table th[data-key={key}]")
        click(tab, button)
        assert values(tab, order) == first, key
        assert head.get_attribute("aria-sort") == state
        click(tab, button)
        assert values(tab, order) == first[::-1], key
        assert shown(tab, "#layer-table th[aria-sort=none]") == 8


def test_the_table_searches_and_the_chart_follows(tab: Any) -> None:
    type_into(tab, "layer-search", "FUSER conv")
    assert shown(tab, "#layer-table tbody tr") == 20
    assert shown(tab, "#layer-chart .dot:not(.faint)") == 20
    click(tab, "#layer-low")
    assert shown(tab, "#layer-table tbody tr") == 0
    choose(tab, "layer-search", "")
    assert shown(tab, "#layer-table tbody tr") == LAYERS - 67
    click(tab, "#layer-worst")
    first = tab.find_element("css selector", "#layer-table tbody tr:not([hidden])")
    assert first.get_attribute("id") == f"layer-{LAYERS - 1}"


def test_steps_in_integers_sort_worst_first_and_show_what_is_off(tab: Any) -> None:
    first = "document.querySelector('#integer-table tbody tr').id"
    assert values(tab, first) == "integer-0"
    click(tab, "#integer-worst")
    assert values(tab, first) == f"integer-{LAYERS}"
    click(tab, "#integer-low")
    assert shown(tab, "#integer-table tbody tr") == 1
    assert "±3" in tab.find_element("css selector", f"#integer-{LAYERS} .name").text
    assert tab.find_element("id", "integer-shown").text == f"1 of {LAYERS + 2} operations"
    click(tab, "#integer-low")
    type_into(tab, "integer-search", "softmax")
    assert shown(tab, "#integer-table tbody tr") == 1
    assert shown(tab, "#layer-table tbody tr") == LAYERS  # the other table keeps its rows


def test_every_figure_of_a_step_fits_a_wide_page(tab: Any) -> None:
    table = "document.querySelector('#integer-table').closest('.scroll')"
    assert values(tab, f"{table}.scrollWidth - {table}.clientWidth") == 0


def test_the_search_among_decisions_leaves_the_integer_lists_alone(tab: Any) -> None:
    click(tab, "#list-islands summary")
    type_into(tab, "decision-search", "a.bn")
    assert values(tab, "document.querySelector('#list-islands').open") is True
    assert tab.find_element("css selector", "#list-islands .count").text == "1"


def test_the_chart_reads_layers_by_keyboard_and_opens_their_row(tab: Any) -> None:
    values(tab, "document.querySelector('#layer-chart svg').focus()")
    press(tab, "\ue010")  # End
    chart = tab.find_element("css selector", "#layer-chart svg")
    assert "layer79.conv: 16.3 dB" in chart.get_attribute("aria-valuetext")
    press(tab, "\ue007")  # Enter
    top = "document.querySelector('.scroll').scrollTop"
    assert values(tab, top) > 500
    assert values(tab, "document.querySelector('.picked').id") == "layer-79"


def test_tabs_and_maps_by_keyboard(tab: Any) -> None:
    values(tab, "document.querySelector('#tab-0').focus()")
    press(tab, "\ue014")  # right
    assert shown(tab, "[role=tabpanel]") == 1
    wait(tab, "document.querySelector('#stage-1 canvas').width === 30")
    values(tab, "document.querySelector('#stage-1 .maps').focus()")
    press(tab, "\ue015", "\ue014")  # down, right
    text = tab.find_element("id", "readout-1").text
    assert text.startswith("x 2.0 m, y −2.0 m: float 0.")
    assert "difference" in text


def test_switches_and_score_choose_the_boxes(tab: Any) -> None:
    visible = """[...document.querySelectorAll('.birds-eye .box')]
        .filter(b => b.style.display !== 'none').map(b => b.classList[1]).sort()"""
    assert len(values(tab, visible)) == 6
    click(tab, "[data-boxes=label]")
    assert set(values(tab, visible)) == {"float", "quantized"}
    choose(tab, "score", "0.5")
    assert values(tab, visible) == ["float", "quantized"]
    rows = "[...document.querySelectorAll('#scene .classes tbody tr')]"
    cells = f"{rows}.map(r => r.innerText.split('\\t'))"
    counts = {name: rest for name, *rest in values(tab, cells)}
    assert counts == {"car": ["1"] * 3, "bus": ["1", "–", "–"], EVIL: ["–"] * 3}


def test_a_picture_can_be_enlarged_and_made_small_again(tab: Any) -> None:
    width = "document.querySelector('.cameras figure').clientWidth"
    small = values(tab, width)
    click(tab, ".cameras button")
    assert values(tab, width) > 2.9 * small
    click(tab, ".cameras button")
    assert values(tab, width) == small


def test_decisions_open_where_the_search_finds_something(tab: Any) -> None:
    assert values(tab, "document.querySelector('#list-fused').open") is False
    type_into(tab, "decision-search", "a.bn")
    opened = "[...document.querySelectorAll('.decision[open]')].map(d => d.id)"
    assert values(tab, opened) == ["list-fused"]
    tab.find_element("id", "decision-search").send_keys("\ue003" * 4)
    assert "list-fused" not in values(tab, opened)


def test_dark_by_system_and_by_hand(drawn: Callable[..., Any]) -> None:
    background = "getComputedStyle(document.body).backgroundColor"
    browser = drawn(scheme="dark")
    assert values(browser, background) == "rgb(16, 20, 26)"
    pixel = f"({COLOURS.replace('.size', '')})(document.querySelector('#stage-0 canvas'))"
    dark = values(browser, f"[...{pixel}].slice(0, 3)")
    click(browser, "#theme [value=light]")
    assert values(browser, background) == "rgb(251, 251, 249)"
    assert values(browser, f"[...{pixel}].slice(0, 3)") != dark
    browser.execute_script("location.reload()")
    wait(browser, "document.querySelector('#theme [value=light]:checked')")


def test_a_phone_needs_no_sideways_scrolling(drawn: Callable[..., Any]) -> None:
    browser = drawn(360)
    assert values(browser, "document.documentElement.scrollWidth") == 360
    for tab_id in ("tab-0", "tab-1"):
        values(browser, f"document.getElementById('{tab_id}').click()")
        assert values(browser, "document.documentElement.scrollWidth") == 360
    wide = """[...document.querySelectorAll('main *')].filter(e => !e.closest('.scroll, svg') &&
        getComputedStyle(e).overflowX === 'visible' && e.checkVisibility() &&
        e.getBoundingClientRect().right > 361).map(e => e.outerHTML.slice(0, 80))"""
    assert values(browser, wide) == []


def test_the_keyboard_reaches_everything_and_gets_out_again(tab: Any) -> None:
    many = "document.querySelectorAll('.card, #layer-table tbody tr')"
    values(tab, f"{many}.forEach(e => e.remove())")
    name = """(e => e === document.body ? 'body' : e.id || e.getAttribute('class') ||
        e.getAttribute('role') || e.tagName)(document.activeElement)"""
    reached: list[str] = []
    while len(reached) < 80 and (not reached or reached[-1] != "body"):
        press(tab, "\ue004")
        reached.append(values(tab, name))
    assert reached[0] == "skip"
    assert reached[-1] == "body", reached
    wanted = {
        "score", "tab-0", "maps wide", "slider", "layer-search", "layer-part", "layer-low",
        "layer-worst", "scroll", "decision-search", "quantizer-search", "quantizer-sort",
    }  # fmt: skip
    assert wanted <= set(reached)


def test_focus_can_be_seen(tab: Any) -> None:
    for _ in range(3):
        press(tab, "\ue004")
        style = "(s => [s.outlineStyle, s.outlineWidth])(getComputedStyle(document.activeElement))"
        assert values(tab, style) == ["solid", "2px"]


def test_every_control_and_picture_has_a_name(tab: Any) -> None:
    tree = tab.execute_cdp_cmd("Accessibility.getFullAXTree", {})["nodes"]
    named = {"button", "checkbox", "radio", "searchbox", "slider", "combobox", "link", "tab",
             "image", "img", "tabpanel", "region", "columnheader", "rowheader"}  # fmt: skip
    roles = [(n["role"]["value"], n.get("name", {}).get("value", "")) for n in tree if "role" in n]
    found = {role for role, _ in roles}
    assert {"button", "checkbox", "radio", "slider", "tab", "rowheader"} <= found
    assert [role for role, name in roles if role in named and not name.strip()] == []


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_text_stands_out_from_its_ground(drawn: Callable[..., Any], scheme: str) -> None:
    browser = drawn(scheme=scheme)
    ratios = values(browser, CONTRAST)
    assert ratios
    assert [(text, ratio) for text, ratio in ratios if ratio < 4.5] == []


# WCAG 2.2, 1.4.3: contrast of every text element against the nearest ground below it.
CONTRAST = """(() => {
  const canvas = Object.assign(document.createElement('canvas'), {width: 1, height: 1});
  const paint = canvas.getContext('2d', {willReadFrequently: true});
  const rgba = c => { paint.clearRect(0, 0, 1, 1); paint.fillStyle = c;
    paint.fillRect(0, 0, 1, 1); return [...paint.getImageData(0, 0, 1, 1).data]; };
  const light = ([r, g, b]) => [r, g, b].map(v => v / 255)
    .map(v => v <= 0.04045 ? v / 12.92 : ((v + 0.055) / 1.055) ** 2.4)
    .reduce((sum, v, i) => sum + v * [0.2126, 0.7152, 0.0722][i], 0);
  const ground = e => { for (; e; e = e.parentElement) {
    const c = rgba(getComputedStyle(e).backgroundColor); if (c[3] > 200) return c; }
    return rgba('white'); };
  const seen = new Map();
  for (const e of document.querySelectorAll('body *')) {
    const text = [...e.childNodes].some(n => n.nodeType === 3 && n.data.trim());
    if (!text || e.closest('script, style, noscript, svg') || !e.checkVisibility()) continue;
    const [a, b] = [light(rgba(getComputedStyle(e).color)), light(ground(e))];
    seen.set(e.tagName + '.' + e.className, (Math.max(a, b) + 0.05) / (Math.min(a, b) + 0.05));
  }
  return [...seen];
})()"""


def test_paper_shows_everything(tab: Any) -> None:
    pdf = tab.execute_cdp_cmd("Page.printToPDF", {"printBackground": True})
    assert base64.b64decode(pdf["data"]).startswith(b"%PDF")
    assert values(tab, "document.querySelectorAll('.histogram .counts').length") == 2 * LAYERS
    wait(tab, "document.querySelector('#stage-1 canvas').width === 30")
    assert tab.get_log("browser") == []
