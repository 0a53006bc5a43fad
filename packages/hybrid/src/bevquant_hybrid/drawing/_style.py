"""Colours and type, for light and dark backgrounds; and words made safe for XML."""

from __future__ import annotations

import re
import unicodedata
from html import escape

__all__ = ["CHARACTER", "STYLE", "columns", "fit", "number", "safe"]

CHARACTER = 0.602  # width of a monospaced letter over the size of the type

STYLE = """
svg { --page:#ffffff; --ink:#1d2733; --soft:#5b6876; --line:#64717f; --card:#ffffff;
  --bpu:#2f6fb3; --bpu-area:#dfebf8; --bpu-rim:#aecbe9;
  --cpu:#b4690e; --cpu-area:#fdecd4; --cpu-rim:#f1cd97;
  --plain:#8894a1; --quantize:#17795a; --dequantize:#7b4ba6; --on:#ffffff; }
@media (prefers-color-scheme: dark) { svg { --page:#12161b; --ink:#e8edf2; --soft:#a3afbb;
  --line:#8f9ba8; --card:#1b2128;
  --bpu:#6ea8e6; --bpu-area:#152b42; --bpu-rim:#2a4f78;
  --cpu:#e5a14b; --cpu-area:#3a2a12; --cpu-rim:#6b4d1f;
  --plain:#76828f; --quantize:#23845f; --dequantize:#8b5cb8; --on:#ffffff; } }
.page { fill:var(--page) }
text { font-family:ui-monospace,"SF Mono",Menlo,Consolas,"DejaVu Sans Mono",monospace;
  fill:var(--ink) }
.title { font-size:16px; font-weight:600 }
.name { font-size:12px; font-weight:600 }
.what { font-size:10.5px; fill:var(--soft) }
.key { font-size:11px; fill:var(--soft) }
.sign { font-size:11px; fill:var(--on) } .sign tspan { font-weight:700 }
.card { fill:var(--card); stroke-width:1.25 }
.card.BPU { stroke:var(--bpu) } .card.CPU { stroke:var(--cpu) } .card.plain { stroke:var(--plain) }
.bar.BPU { fill:var(--bpu) } .bar.CPU { fill:var(--cpu) }
.rim.BPU { fill:var(--bpu-rim) } .rim.CPU { fill:var(--cpu-rim) }
.area.BPU { fill:var(--bpu-area) } .area.CPU { fill:var(--cpu-area) }
.quantize { fill:var(--quantize) } .dequantize { fill:var(--dequantize) }
.edge { fill:none; stroke:var(--line); stroke-width:1.4; stroke-linejoin:round }
.edge.float { stroke-dasharray:5 3.5 }
.head { fill:var(--line) }
""".strip()

_NOT_XML = re.compile("[^\t\n\r\u0020-\ud7ff\ue000-\ufffd\U00010000-\U0010ffff]")


def safe(text: str) -> str:
    """``text`` for XML: markup escaped, and what no XML file may hold shown as a box."""
    return escape(_NOT_XML.sub("\ufffd", text), quote=True)


def columns(text: str) -> int:
    """Width of ``text`` in letters: characters of East Asian scripts take two."""
    return sum(2 if unicodedata.east_asian_width(c) in "WF" else 1 for c in text)


def fit(text: str, letters: int) -> str:
    """``text`` in at most so many letters: the middle goes, since names differ at their ends.

    Example:
        >>> fit("backbone.layer4.2.downsample.0", 20)
        'backbone.…wnsample.0'
    """
    text = " ".join(text.split())
    if columns(text) <= letters:
        return text
    head, tail = text[: len(text) // 2], text[len(text) // 2 :]
    while columns(head) > (letters - 1) // 2:
        head = head[:-1]
    while columns(tail) > letters - 1 - columns(head):
        tail = tail[1:]
    return head + "…" + tail


def number(value: float) -> str:
    """A coordinate without needless digits."""
    return f"{value:.2f}".rstrip("0").rstrip(".")
