"""What each part of the page consists of."""

from __future__ import annotations

from typing import Any, NamedTuple

from bevfusion_quant.report._html import Html, tag

__all__ = ["Section", "field", "heading", "select"]


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


def field(label: str, control: Html, **attributes: str | None) -> Html:
    """A control with its label before it."""
    return tag("label", tag("span", label), control, class_="field", **attributes)


def select(name: str, options: dict[str, str]) -> Html:
    """A drop-down of value → text."""
    return tag("select", *(tag("option", t, value=v) for v, t in options.items()), id=name)
