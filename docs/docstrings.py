"""Docstrings as the documentation shows them: an extension of griffe.

Sources are written for a terminal. Here an example becomes a block of code, a formula one line of
plain signs (a page loads no script to set it), and two brackets in a row no link.
"""

from __future__ import annotations

import re
from typing import Any

import griffe

_SIGNS = {
    r"\cdot": "·", r"\le": "≤", r"\ge": "≥", r"\in": "∈", r"\sum": "Σ", r"\approx": "≈",
    r"\quad": " ", r"\qquad": "  ", r"\log": "log", r"\min": "min", r"\max": "max", r"\pm": "±",
    r"\lfloor": "⌊", r"\rfloor": "⌋", r"\tfrac12": "½", r"\infty": "∞", r"\times": "×",
    r"\sqrt": "√", r"\left": "", r"\right": "", r"\,": " ", r"\;": " ", r"\ ": " ", r"\\": "\n",
    r"\lambda": "λ", r"\sigma": "σ", r"\mu": "μ", r"\gamma": "γ", r"\beta": "β", r"\epsilon": "ε",
    r"\varepsilon": "ε", r"\Delta": "Δ", r"\alpha": "α", r"\lVert": "‖", r"\rVert": "‖",
    r"\lceil": "⌈", r"\rceil": "⌉", r"\to": "→", r"\ldots": "…", r"\dots": "…", r"\neq": "≠",
    r"\ne": "≠", r"\partial": "∂", r"\theta": "θ", r"\pi": "π", r"\delta": "δ", r"\exp": "exp",
    r"\cos": "cos", r"\sin": "sin", r"\tan": "tan", r"\mathrm": "", r"\text": "",
    r"\operatorname": "", r"\bigl": "", r"\bigr": "", r"\Bigl": "", r"\Bigr": "",
    r"\textstyle": "", r"\hat": "", r"\tfrac": "", r"\odot": "⊙", r"\ast": "∗",
    r"\{": "{", r"\}": "}",
}  # fmt: skip


def plain(formula: str) -> str:
    """LaTeX as plain text."""
    part = r"\{((?:[^{}]|\{(?:[^{}]|\{[^{}]*\})*\})*)\}"
    for _ in range(4):
        formula = re.sub(r"\\[td]?frac\s*" + part + r"\s*" + part, r"(\1) / (\2)", formula)
    formula = re.sub(r"\\(operatorname|mathrm|text|mathit|mathbf)" + part, r"\2", formula)
    formula = re.sub(r"\\tilde\{?(\w)\}?", "\\1\u0303", formula)
    formula = re.sub(r"\\(hat|bar)\{?(\w)\}?", r"\2", formula)
    known = sorted(_SIGNS, key=len, reverse=True)
    signs = "|".join(re.escape(s) + (r"(?![a-zA-Z])" if s[-1].isalpha() else "") for s in known)
    formula = re.sub(signs, lambda found: _SIGNS[found[0]], formula)
    formula = re.sub(r"([_^])\{(\w+)\}", r"\1\2", formula).replace("&", "")
    return re.sub(r"([_^])\{([^{}]*)\}", r"\1(\2)", formula).strip()


def shown(text: str) -> str:
    """A docstring in Markdown."""
    text = re.sub(r"^(\s*)Example:$", r"\1Examples:", text, flags=re.MULTILINE)
    text = re.sub(r":math:`([^`]*)`", lambda m: f"`{plain(m[1])}`", text)
    text = re.sub(r":\w+:`~?([^`]*)`", r"`\1`", text)

    def block(found: re.Match[str]) -> str:
        lines = [line.strip() for line in plain(found[2]).splitlines() if line.strip()]
        return "\n".join(f"{found[1]}{line}" for line in ["```text", *lines, "```"]) + "\n"

    text = re.sub(
        r"^( *)\.\. math::(.*(?:\n\1 +\S.*|\n(?=\n?\1 +\S))*)\n?", block, text, flags=re.M
    )
    lines = text.split("\n")
    code = False
    for place, line in enumerate(lines):
        code = line.lstrip().startswith(">>>") or (code and bool(line.strip()))
        if not code and "`" not in line:
            lines[place] = re.sub(r"\](\s*)\[", r"]\1\\[", line)
    return "\n".join(lines)


class Docstrings(griffe.Extension):
    """Rewrites every docstring before it is parsed."""

    def on_object(self, *, obj: griffe.Object, **kwargs: Any) -> None:
        """Called for everything that was loaded."""
        if obj.docstring:
            obj.docstring.value = shown(obj.docstring.value)
