"""The page: sections, style and scripts in one file that asks the network for nothing."""

from __future__ import annotations

import base64
import hashlib
from collections.abc import Iterator
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
from bevfusion_quant.report._html import join, tag
from bevfusion_quant.report._integers import integers_section
from bevfusion_quant.report._layers import finite_rows, layers_section
from bevfusion_quant.report._overview import head, reproduce
from bevfusion_quant.report._quantizers import quantizers_section
from bevfusion_quant.report._scene import scene_section
from bevfusion_quant.report._section import Section, heading
from bevfusion_quant.report._sensitivity import sensitivity_section
from bevfusion_quant.report._stages import stages_section
from bevquant_quantizers import write_whole

if TYPE_CHECKING:
    from bevfusion_quant.report._content import ReportContent

__all__ = ["write_report"]

PAGE = files("bevfusion_quant.report") / "page"
STYLES = ("base.css", "parts.css")
SCRIPTS = (
    "decode.js", "colour.js", "theme.js", "scene.js", "maps.js", "tabs.js", "chart.js", "table.js",
    "histograms.js", "lists.js", "start.js",
)  # fmt: skip


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
    return write_whole(path, _page(content))


def _page(content: ReportContent) -> str:
    content = replace(content, layers=finite_rows(content.layers))
    sections = list(_sections(content))
    links = [tag("li", tag("a", s.title, href=f"#{s.key}")) for s in sections]
    data = {s.key: s.data for s in sections if s.data is not None}
    style = "\n".join(_read(name) for name in _styles(content))
    scripts = SCRIPTS if content.bpu is None else (*SCRIPTS, "bpu.js")
    script = '"use strict";\n(() => {\n' + "\n".join(_read(name) for name in scripts) + "})();\n"
    digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode("ascii")
    return Template(_read("page.html")).substitute(
        title=join(content.title),
        policy=f"default-src 'none'; img-src data:; style-src 'unsafe-inline'; "
        f"script-src 'sha256-{digest}'; base-uri 'none'; form-action 'none'",
        links=join(*links),
        head=head(content),
        sections=join(*(heading(s) for s in sections)),
        style=style,
        data=script_json(data),
        script=script,
    )


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


def _styles(content: ReportContent) -> Iterator[str]:
    yield from STYLES
    if content.accuracy is not None:
        yield "accuracy.css"
    if content.bpu is not None:
        yield "bpu.css"
    if content.export is not None:
        yield "export.css"
    if content.sensitivity is not None:
        yield "sensitivity.css"
    yield "narrow.css"  # last, so that a small screen has the last word


def _read(name: str) -> str:
    return (PAGE / name).read_text(encoding="utf-8")
