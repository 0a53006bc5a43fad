"""The section "BPU and CPU" as a file: whole, escaped, its figures those of the outcome."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
from bpu_outcome import LAYERS, outcome

from bevfusion_quant.pages import (
    ReportContent,
    by_page_scheme,
    partition_picture,
    read_sections,
    write_report,
)

EVIL = '</script><script>hurt()</script><b title="x">'


def page(tmp_path: Path, **content: Any) -> str:
    made = ReportContent("run", **content)
    return write_report(tmp_path / "report.html", made).read_text(encoding="utf-8")


def test_without_a_bpu_nothing_of_it_is_on_the_page(tmp_path: Path) -> None:
    text = page(tmp_path)
    for word in ("bpu", "partition", "BPU", ".flow"):
        assert word not in text, word


def test_the_section_holds_picture_boundaries_reasons_layers_and_estimate(tmp_path: Path) -> None:
    text = page(tmp_path, bpu=outcome())
    section = text[text.index('<section id="bpu"') : text.index("</section>")]
    assert f"{LAYERS} operators run on the BPU" in section
    bytes_in, bytes_out = 6 * 16 * 48 * 128, 6 * 16 * 48 * 128
    assert f"{bytes_in + bytes_out:,} bytes" in section
    assert section.count("<template shadowrootmode") == 1
    assert section.count('class="card BPU"') == LAYERS
    assert 'id="list-cpu"' in section
    layers = section[section.index('id="bpu-layers"') :]
    assert layers[: layers.index("</table>")].count("<tr>") == LAYERS + 1
    estimate = section[section.index('id="estimate-camera"') :]
    assert estimate[: estimate.index("</table>")].count("<td>2.0</td>") == LAYERS
    assert f"{LAYERS * 2e-6 * 1e3:.2f} ms" in section
    assert "not a measurement" in section
    assert section.count(">source</a>") == 3
    assert "documented" in section
    assert '<a href="#bpu">BPU and CPU</a>' in text
    assert "Between BPU and CPU" in text[: text.index("<section")]


def test_names_and_reasons_are_escaped(tmp_path: Path) -> None:
    text = page(tmp_path, bpu=outcome(EVIL))
    assert EVIL not in text
    assert "<script>hurt()" not in text


def test_what_the_march_does_not_allow_is_said_first(tmp_path: Path) -> None:
    told = "fuser.0 (torch.nn.Conv2d) on BERNOULLI2: in_channels is 9999"
    text = page(tmp_path, bpu=outcome(violations=(told,)))
    assert re.search(rf'<p class="low">{re.escape(told)}</p>', text)
    assert text.index(told) < text.index('class="flow"')


def test_the_picture_takes_both_schemes_from_the_page() -> None:
    made = outcome()
    svg = made.picture
    light, dark = (
        dict(re.findall(r"(--[\w-]+):(#\w+)", part))
        for part in svg.split("@media (prefers-color-scheme: dark)")
    )
    text = partition_picture(made.plan.to_json())
    assert "prefers-color-scheme" not in text
    for name, colour in light.items():
        assert f"{name}:light-dark({colour},{dark.get(name, colour)})" in text
    assert len(light) > 10
    assert svg.split("</style>")[1] in text


def test_a_picture_without_a_dark_scheme_stays_as_it_is() -> None:
    svg = "<svg><style>rect { --x:#fff }</style></svg>"
    assert by_page_scheme(svg) == svg


def test_nothing_in_the_section_asks_the_network(tmp_path: Path) -> None:
    text = page(tmp_path, bpu=outcome())
    assert not re.findall(r'(?:src|srcset|data|action)="https?:', text)


def test_data_that_leads_elsewhere_is_refused(tmp_path: Path) -> None:
    page(tmp_path, bpu=outcome())
    data = tmp_path / "page.json"
    found = json.loads(data.read_text(encoding="utf-8"))
    figure = found["sections"][0]["data"]["figures"]["cores"]
    figure["source"] = "javascript:hurt()"
    data.write_text(json.dumps(found), encoding="utf-8")
    with pytest.raises(ValueError, match="'javascript:hurt\\(\\)' is no https:// address"):
        read_sections(data)
