"""What each part of the page consists of, and the same read back from a page."""

from __future__ import annotations

import json
import re
from html import unescape
from typing import Any, NamedTuple

from bevfusion_quant.report._html import Html, tag

__all__ = ["PAGE_FORM", "Section", "field", "heading", "read_sections", "select"]

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
    values = json.loads(data[1])
    return {
        key: Section(key, unescape(title), Html(html), values.get(key))
        for key, title, html in _SECTION.findall(page)
    }


def field(label: str, control: Html, **attributes: str | None) -> Html:
    """A control with its label before it."""
    return tag("label", tag("span", label), control, class_="field", **attributes)


def select(name: str, options: dict[str, str]) -> Html:
    """A drop-down of value → text."""
    return tag("select", *(tag("option", t, value=v) for v, t in options.items()), id=name)
