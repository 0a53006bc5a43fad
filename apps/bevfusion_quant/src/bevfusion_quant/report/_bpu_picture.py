"""The picture of the partition inside the page: its own styles, the page's light or dark."""

from __future__ import annotations

import re

from bevfusion_quant.report._html import Html, tag

__all__ = ["partition_picture"]

_DARK = re.compile(r"@media \(prefers-color-scheme: dark\) \{ svg \{(.*?)\} \}", re.DOTALL)
_COLOUR = re.compile(r"(--[\w-]+):(#[0-9a-fA-F]+)")
# Names and ids of the picture are those of the page too: a shadow tree keeps the two apart.
_STYLE = (
    "<style>:host{display:block}svg{display:block;margin:auto;"
    "width:var(--picture-width);height:auto;max-height:var(--picture-height)}</style>"
)


def partition_picture(svg: str) -> Html:
    """The picture at its own size, to be scrolled.

    Args:
        svg: From `bevquant_hybrid.partition.Plan.draw`.
    """
    tree = Html(f'<template shadowrootmode="open">{_STYLE}{_following_page(svg)}</template>')
    fit = tag(
        "button", "Fit to width", type="button", id="partition-fit", aria_pressed="false",
        hidden=True,
    )  # fmt: skip
    caption = "Point at a node to read why it is where it is. Solid lines carry integers, dashed "
    return tag(
        "figure",
        tag("figcaption", fit, caption + "ones floats.", class_="note"),
        tag(
            "div",
            tag("div", tree),
            class_="partition",
            tabindex=0,
            role="region",
            aria_label="Picture of the partition",
        ),
    )


def _following_page(svg: str) -> str:
    """Colours by the page's colour scheme, which a reader may choose, instead of the system's."""
    found = _DARK.search(svg)
    if found is None:
        return svg
    dark = dict(_COLOUR.findall(found[1]))

    def both(match: re.Match[str]) -> str:
        name, light = match[1], match[2]
        return f"{name}:light-dark({light},{dark.get(name, light)})"

    return _COLOUR.sub(both, svg[: found.start()]) + svg[found.end() :]
