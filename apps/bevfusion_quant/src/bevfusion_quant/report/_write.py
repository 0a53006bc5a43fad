"""The page: sections, style and scripts in one file that asks the network for nothing."""

from __future__ import annotations

import base64
import hashlib
from collections.abc import Iterator, Sequence
from dataclasses import replace
from importlib.resources import files
from pathlib import Path
from string import Template
from typing import TYPE_CHECKING

from bevfusion_quant.report._accuracy import accuracy_section
from bevfusion_quant.report._bpu import bpu_section
from bevfusion_quant.report._check import check
from bevfusion_quant.report._decisions import decisions_section
from bevfusion_quant.report._encode import script_json
from bevfusion_quant.report._export import export_section
from bevfusion_quant.report._html import Html, join, tag
from bevfusion_quant.report._integers import integers_section
from bevfusion_quant.report._layers import finite_rows, layers_section
from bevfusion_quant.report._overview import head, reproduce
from bevfusion_quant.report._quantizers import quantizers_section
from bevfusion_quant.report._scene import scene_section
from bevfusion_quant.report._section import (
    PAGE_DATA,
    PAGE_FORM,
    Section,
    heading,
    page_data,
)
from bevfusion_quant.report._sensitivity import sensitivity_section
from bevfusion_quant.report._stages import stages_section
from bevquant_quantizers import write_whole

if TYPE_CHECKING:
    from bevfusion_quant.report._content import ReportContent

__all__ = ["write_page", "write_report"]

PAGE = files("bevfusion_quant.report") / "page"
STYLES = ("base.css", "parts.css")
SCRIPTS = (
    "decode.js", "colour.js", "theme.js", "scene.js", "maps.js", "tabs.js", "chart.js", "table.js",
    "histograms.js", "lists.js", "start.js",
)  # fmt: skip
# Of single sections, by key.
STYLE_OF = {
    "accuracy": "accuracy.css",
    "bpu": "bpu.css",
    "comparison": "comparison.css",
    "export": "export.css",
    "sensitivity": "sensitivity.css",
    "verdict": "review.css",
}
SCRIPT_OF = {"bpu": "bpu.js"}


def write_report(path: Path | str, content: ReportContent) -> Path:
    """Write the page, whole or not at all; the same content gives the same bytes.

    The file holds its style, scripts, pictures and numbers; its content security policy forbids
    every request and every script but its own. Whatever the content names is escaped.

    Args:
        path: The file to write; a file already there is replaced.
        content: What to show.

    Returns:
        `path`.

    Raises:
        ValueError: Arrays of the wrong shape, maps of one stage that differ in shape, two stages of
            one name; nothing is written then.

    Examples:
        >>> import tempfile
        >>> from bevfusion_quant.report import ReportContent
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     page = write_report(Path(folder) / "report.html", ReportContent("demo"))
        ...     page.read_text(encoding="utf-8")[:15]
        '<!doctype html>'
    """
    check(content)
    content = replace(content, layers=finite_rows(content.layers))
    return write_page(path, content.title, head(content), list(_sections(content)))


def write_page(path: Path | str, title: str, top: Html, sections: Sequence[Section]) -> Path:
    """Write a page of these sections, as `write_report` does of a run's.

    Args:
        path: The file to write; a file already there is replaced.
        title: Of the browser's window.
        top: What stands above the sections.
        sections: In the order of the page, each key once.

    Returns:
        `path`; beside it lies page.json, the sections as data, which `report` reads.
    """
    links = [tag("li", tag("a", s.title, href=f"#{s.key}")) for s in sections]
    data = {s.key: s.data for s in sections if s.data is not None}
    style = "\n".join(_read(name) for name in _styles([s.key for s in sections]))
    more = [SCRIPT_OF[s.key] for s in sections if s.key in SCRIPT_OF]
    scripts = "\n".join(_read(name) for name in (*SCRIPTS, *more))
    script = '"use strict";\n(() => {\n' + scripts + "})();\n"
    digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode("ascii")
    page = Template(_read("page.html")).substitute(
        title=join(title),
        form=PAGE_FORM,
        policy=f"default-src 'none'; img-src data:; style-src 'unsafe-inline'; "
        f"script-src 'sha256-{digest}'; base-uri 'none'; form-action 'none'",
        links=join(*links),
        head=top,
        sections=join(*(heading(s) for s in sections)),
        style=style,
        data=script_json(data),
        script=script,
    )
    write_whole(Path(path).with_name(PAGE_DATA), page_data(sections))
    return write_whole(path, page)


def _sections(content: ReportContent) -> Iterator[Section]:
    if content.scene is not None:
        yield scene_section(content.scene)
    if content.accuracy is not None:
        yield accuracy_section(content.accuracy)
    if content.stages:
        cameras = [camera.name for camera in content.scene.cameras] if content.scene else []
        yield stages_section(content.stages, cameras)
    if content.layers:
        cards = {path: i for i, v in enumerate(content.quantizers) for path in v.paths}
        yield layers_section(content.layers, content.low_sqnr_db, cards)
    if content.integers is not None:
        yield integers_section(content.integers)
    if content.sensitivity is not None:
        yield sensitivity_section(content.sensitivity)
    if content.bpu is not None:
        yield bpu_section(content.bpu)
    if content.export is not None:
        yield export_section(content.export)
    decisions, again = decisions_section(content), reproduce(content)
    if decisions is not None:
        yield decisions
    if content.quantizers:
        yield quantizers_section(content.quantizers, content.calibration)
    if again is not None:
        yield again


def _styles(keys: Sequence[str]) -> Iterator[str]:
    yield from STYLES
    yield from (style for key, style in STYLE_OF.items() if key in keys)
    yield "narrow.css"  # last, so that a small screen has the last word


def _read(name: str) -> str:
    return (PAGE / name).read_text(encoding="utf-8")
