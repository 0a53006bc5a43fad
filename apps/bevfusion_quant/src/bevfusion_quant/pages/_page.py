"""Pages: templates filled with plain data, in one file that makes no network request."""

from __future__ import annotations

import base64
import hashlib
import json
import re
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from importlib.resources import files
from pathlib import Path
from typing import Annotated, Any

import msgspec
from jinja2 import Environment, PackageLoader, StrictUndefined, Template, TemplateError
from jinja2.ext import Extension
from markupsafe import Markup

from bev_data.tables import or_dash, percent, plural
from bevfusion_quant.pages import _format
from bevquant_quantizers import write_whole
from bevquant_quantizers.documents import DocumentError, plain, read_json

PAGE_DATA = "page.json"
"""Beside a page, its sections as data: what their templates were filled with."""

PAGE_FORM = 2
"""Of sections' data. Raise it with a change after which earlier data no longer fills the templates.
Form 1 held the sections' markup as elements."""

_HEAD = {"format": "bevfusion-quant page", "version": PAGE_FORM}
_SCRIPTS = (
    "decode.js", "colour.js", "theme.js", "scene.js", "maps.js", "tabs.js", "chart.js", "table.js",
    "histograms.js", "lists.js", "start.js",
)  # fmt: skip
_SCRIPT_OF = {"bpu": "bpu.js"}  # of a single section
_FILTERS = (
    _format.breakable, _format.decibels, _format.partition_picture, _format.path_parts,
    _format.web_address, or_dash, percent, plural,
)  # fmt: skip
# What filling a template with data that does not fit it raises.
_UNFIT = (TemplateError, TypeError, ValueError, LookupError, AttributeError, ArithmeticError)


@dataclass(frozen=True)
class Section:
    """One part of a page: a template and its data.

    Attributes:
        key: Its id on the page; its template is "<key>.html", with a macro `section(data)`.
        title: Its name in the navigation.
        data: Data of the template, converted to strings, numbers, lists and mappings; NaN and
            infinities become None, as JSON has neither.
        script: Data of the page's script; None for none.
        source: On another run's page, the source folder and its frames, as text.
    """

    key: str
    title: str
    data: Any
    script: Any = None
    source: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        """Convert the data to plain types, so that saved and unsaved sections look the same."""
        object.__setattr__(self, "data", plain(self.data))
        object.__setattr__(self, "script", plain(self.script))

    @property
    def html(self) -> str:
        """Its markup without the heading; names are escaped."""
        macro: Any = _template(self.key).module
        return Markup(macro.section(self.data))


def write_page(path: Path | str, title: str, top: Section, sections: Sequence[Section]) -> Path:
    """Write a page of these sections, whole or not at all; the same data gives the same bytes.

    The file holds its style, scripts, pictures and numbers. Its content security policy forbids
    every request and every foreign script.

    Args:
        path: The file to write; an existing file is replaced.
        title: Title of the browser's window.
        top: Data above the sections.
        sections: In the order of the page, each key once.

    Returns:
        `path`. Beside it is page.json, the sections as data, for `read_sections`.
    """
    keys = [section.key for section in sections]
    code = "\n".join(map(_read, [*_SCRIPTS, *(_SCRIPT_OF[k] for k in keys if k in _SCRIPT_OF)]))
    script = '"use strict";\n(() => {\n' + code + "})();\n"
    page = _environment().get_template("base.html").render(
        title=title,
        top=top,
        sections=sections,
        style=Markup(_environment().get_template("style.css").render(keys=keys)),
        data=Markup(_script_json({s.key: s.script for s in sections if s.script is not None})),
        script=Markup(script),
        digest=base64.b64encode(hashlib.sha256(script.encode()).digest()).decode("ascii"),
    )  # fmt: skip
    text = json.dumps(
        {**_HEAD, "sections": [plain(s) for s in sections]}, allow_nan=False, separators=(",", ":")
    )
    write_whole(Path(path).with_name(PAGE_DATA), text + "\n")
    return write_whole(path, page + "\n")


class _SectionData(msgspec.Struct):
    key: Annotated[str, msgspec.Meta(pattern=r"^[\w-]+$")]
    title: str
    data: Any
    script: Any = None
    source: tuple[str, ...] = ()


class _PageData(msgspec.Struct):
    sections: list[_SectionData]


def read_sections(path: Path) -> dict[str, Section]:
    """Sections of a page by key, in their order, from the page.json beside it.

    Raises:
        DocumentError: The file is missing, of another form, or does not fill the templates.
    """
    found: _PageData = read_json(path, _PageData, what="page's data", head=_HEAD)
    sections = {}
    for part in found.sections:
        section = Section(part.key, part.title, part.data, part.script, part.source)
        try:
            str(section.html)  # filled here, so that whoever takes it finds that it fits
        except _UNFIT as error:
            raise DocumentError(
                f"{path}: its data of {part.key!r} do not fit that section's template: {error}"
            ) from error
        sections[part.key] = section
    return sections


def _script_json(value: Any) -> str:
    r"""JSON that may stand inside a script element: no `<`, no NaN, nothing that ends the element.

    Examples:
        >>> _script_json({"name": "</script>"})
        '{"name":"\\u003c/script\\u003e"}'
    """
    text = json.dumps(value, allow_nan=False, ensure_ascii=True, separators=(",", ":"))
    return text.replace("<", "\\u003c").replace(">", "\\u003e").replace("&", "\\u0026")


class _LinesJoined(Extension):
    """Removes the line breaks that only lay out the templates' source."""

    def preprocess(self, source: str, name: str | None, filename: str | None = None) -> str:
        if name is None or not name.endswith(".html"):
            return source
        # Beside an element or an expression, a break and its indentation vanish; within text they
        # become a space.
        joined = re.sub(r"(?<=[>}])\s*\n\s*|\s*\n\s*(?=[<{])", "", source.strip())
        return re.sub(r"\s*\n\s*", " ", joined)


@cache
def _environment() -> Environment:
    environment = Environment(
        loader=PackageLoader("bevfusion_quant.pages"),
        autoescape=True,
        undefined=StrictUndefined,
        extensions=[_LinesJoined],
    )
    environment.filters |= {one.__name__: one for one in _FILTERS}
    return environment


def _template(key: str) -> Template:
    return _environment().get_template(f"{key}.html")


def _read(name: str) -> str:
    return (files("bevfusion_quant.pages") / "templates" / name).read_text(encoding="utf-8")
