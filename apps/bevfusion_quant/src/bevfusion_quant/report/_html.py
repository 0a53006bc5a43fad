"""HTML that is escaped unless it was made here."""

from __future__ import annotations

import re
from html import escape

__all__ = ["Html", "join", "path_name", "tag"]

VOID = frozenset({"img", "input", "path", "polygon", "line", "circle", "wbr"})
# How many leading parts of a path name where in the model it is, not what it is.
STEMS = {"encoders": 3, "decoder": 2, "heads": 2}


class Html(str):
    """Text that is HTML already; any other text is escaped where it is put in."""

    __slots__ = ()


Content = Html | str | int | None


def tag(name: str, /, *content: Content, **attributes: str | float | bool | None) -> Html:
    """One element. `class_` is written class, `data_value` data-value; None and False are left out.

    Examples:
        >>> tag("p", "a < b", class_="note")
        '<p class="note">a &lt; b</p>'
        >>> tag("input", disabled=True, aria_label='"x"')
        '<input disabled aria-label="&quot;x&quot;"/>'
    """
    written = ""
    for key, value in attributes.items():
        if value is None or value is False:
            continue
        attribute = "viewBox" if key == "viewBox" else key.rstrip("_").replace("_", "-")
        written += f" {attribute}" if value is True else f' {attribute}="{escape(str(value))}"'
    if name in VOID:
        return Html(f"<{name}{written}/>")
    return Html(f"<{name}{written}>{join(*content)}</{name}>")


def join(*content: Content) -> Html:
    """Pieces one after the other, escaped where they are plain text; None is nothing."""
    return Html(
        "".join(
            piece if isinstance(piece, Html) else escape(str(piece))
            for piece in content
            if piece is not None
        )
    )


def path_name(path: str) -> Html:
    """A module path that may break after its dots, the layer stronger than the part it is in."""
    parts = path.split(".")
    cut = min(STEMS.get(parts[0], 0), len(parts) - 1)
    stem, leaf = parts[:cut], parts[cut:]
    pieces: list[Content] = []
    if stem:
        pieces.append(tag("span", _breakable(".".join(stem) + "."), class_="stem"))
        pieces.append(Html("<wbr>"))
    return join(*pieces, tag("span", _breakable(".".join(leaf)), class_="leaf"))


def _breakable(text: str) -> Html:
    return Html(re.sub(r"([._])(?=.)", r"\1<wbr>", escape(text)))
