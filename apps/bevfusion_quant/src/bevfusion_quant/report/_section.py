"""What each part of the page consists of, and the same read back from a page."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from html import unescape
from html.parser import HTMLParser
from pathlib import Path
from typing import Annotated, Any, NamedTuple

import msgspec

from bevfusion_quant.report._html import VOID, Html, join, tag
from bevquant_quantizers.documents import DocumentError, parse_json, read_json

__all__ = [
    "PAGE_DATA",
    "PAGE_FORM",
    "Section",
    "field",
    "heading",
    "page_data",
    "read_page_data",
    "read_sections",
    "select",
]

PAGE_FORM = 1
"""Of sections, their classes, ids and data. Raise it with a change after which sections of earlier
pages would no longer look or work right among new styles and scripts."""

_FORM = re.compile(r'<meta name="bevfusion-quant-page" content="(\d+)">')
_DATA = re.compile(r'<script type="application/json" id="data">(.*?)</script>', re.DOTALL)
# What `heading` writes. Text is escaped, and no section holds another one.
_SECTION = re.compile(
    r'<section id="([\w-]+)" aria-labelledby="\1-title"><h2 id="\1-title">([^<]*)</h2>'
    r"(.*?)</section>",
    re.DOTALL,
)


class Section(NamedTuple):
    """One part of the page.

    Attributes:
        key: Its id, and the key of its data.
        title: Its name in the navigation.
        html: Its markup without the heading.
        data: What its script draws from; None for nothing.
    """

    key: str
    title: str
    html: Html
    data: Any = None


def heading(section: Section) -> Html:
    """The section with its heading, as it stands on the page."""
    return tag(
        "section",
        tag("h2", section.title, id=f"{section.key}-title"),
        section.html,
        id=section.key,
        aria_labelledby=f"{section.key}-title",
    )


def read_sections(page: str) -> dict[str, Section]:
    """The sections of a page that `write_page` made, by key, in their order.

    Raises:
        ValueError: It is no such page, or one of another form.
    """
    form, data = _FORM.search(page), _DATA.search(page)
    if form is None or data is None:
        raise ValueError("it is no page of bevfusion-quant, or one from before pages could be read")
    if int(form[1]) != PAGE_FORM:
        raise ValueError(f"the page has form {form[1]}, this program reads form {PAGE_FORM}")
    values = parse_json(data[1], dict[str, Any], where="the page's data")
    return {
        key: Section(key, unescape(title), Html(html), values.get(key))
        for key, title, html in _SECTION.findall(page)
    }


PAGE_DATA = "page.json"
"""Beside a page, its sections as data: elements, texts and what scripts draw from."""

# Elements that `tag` makes here, and their attributes; anything else is refused.
_ELEMENTS = frozenset(
    "a button caption circle code dd details div dl dt em fieldset figcaption figure g h3 h4 img "
    "input label legend li line ol option p path polygon rect section select small span strong "
    "sub summary sup svg table tbody td text textarea tfoot th thead title tr ul wbr canvas "
    "output polyline br b i defs marker time colgroup col abbr pre template tspan "
    "desc ellipse".split()
)
_ATTRIBUTE = re.compile(r"(?!on)[a-z][a-z0-9-]*")
_CASED = {"viewbox": "viewBox", "preserveaspectratio": "preserveAspectRatio"}
_LINKS = {"href": ("#", "https://"), "src": ("data:image/",), "xlink-href": ("#",)}
Node = str | list[Any]


class _Parser(HTMLParser):
    """The elements of markup that was made here, as nested lists [name, attributes, content]."""

    def __init__(self) -> None:
        super().__init__(convert_charrefs=True)
        self.top: list[Node] = []
        self._open: list[list[Node]] = [self.top]

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        content: list[Node] = []
        self._open[-1].append([tag, dict(attrs), content])
        if tag not in VOID | {"br", "col", "rect"}:
            self._open.append(content)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self._open[-1].append([tag, dict(attrs), []])

    def handle_endtag(self, tag: str) -> None:
        if len(self._open) > 1 and tag not in VOID | {"br", "col", "rect"}:
            self._open.pop()

    def handle_data(self, data: str) -> None:
        self._open[-1].append(data)


def page_data(sections: Sequence[Section]) -> str:
    """The sections of a page as JSON: no markup, so that a page made of it holds none but ours."""
    parts = []
    for section in sections:
        parser = _Parser()
        parser.feed(section.html)
        parser.close()
        parts.append(
            {"key": section.key, "title": section.title, "content": parser.top,
             "data": section.data}
        )  # fmt: skip
    head = {"format": "bevfusion-quant page", "version": PAGE_FORM}
    return json.dumps({**head, "sections": parts}, allow_nan=False, separators=(",", ":")) + "\n"


class _SectionData(msgspec.Struct):
    key: Annotated[str, msgspec.Meta(pattern=r"^[\w-]+$")]
    title: str
    content: list[Any]
    data: Any = None


class _PageData(msgspec.Struct):
    sections: list[_SectionData]


def read_page_data(path: Path) -> dict[str, Section]:
    """The sections that `page_data` wrote, by key, in their order.

    Raises:
        DocumentError: It is no such file, or it says what no section says, such as a script.
    """
    head = {"format": "bevfusion-quant page", "version": PAGE_FORM}
    found: _PageData = read_json(path, _PageData, what="page's data", head=head)
    return {
        part.key: Section(part.key, part.title, join(*(_html(path, n) for n in part.content)),
                          part.data)
        for part in found.sections
    }  # fmt: skip


def _html(path: Path, node: Any) -> Html | str:
    if isinstance(node, str):
        return node
    fits = isinstance(node, list) and len(node) == 3 and isinstance(node[1], dict)
    if fits and node[0] == "style" and not node[1]:
        # The one raw text on a page: without a "<" it cannot end.
        if isinstance(node[2], list) and all(isinstance(t, str) and "<" not in t for t in node[2]):
            return Html("<style>" + "".join(node[2]) + "</style>")
    if not fits or node[0] not in _ELEMENTS or not isinstance(node[2], list):
        raise DocumentError(f"{path}: {str(node)[:60]} is no element of a page")
    attributes: dict[str, str | bool] = {}
    for name, value in node[1].items():
        fine = _ATTRIBUTE.fullmatch(name) and (value is None or isinstance(value, str))
        if fine and name in _LINKS and value is not None:
            fine = value.startswith(_LINKS[name])
        if not fine:
            raise DocumentError(f"{path}: {name}={str(value)[:60]!r} is no attribute of a page")
        attributes[_CASED.get(name, name)] = True if value is None else value
    return tag(node[0], *(_html(path, part) for part in node[2]), **attributes)


def field(label: str, control: Html, **attributes: str | None) -> Html:
    """A control with its label before it."""
    return tag("label", tag("span", label), control, class_="field", **attributes)


def select(name: str, options: dict[str, str]) -> Html:
    """A drop-down of value → text."""
    return tag("select", *(tag("option", t, value=v) for v, t in options.items()), id=name)
