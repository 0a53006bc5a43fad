"""Pages from templates beside the modules that fill them."""

from __future__ import annotations

from importlib import resources
from typing import Any

import jinja2

_ENVIRONMENT = jinja2.Environment(
    autoescape=True,
    trim_blocks=True,
    lstrip_blocks=True,
    keep_trailing_newline=True,
    undefined=jinja2.StrictUndefined,
)


def render(package: str, name: str, **values: Any) -> str:
    """Fill the template of a package; what it gets is escaped."""
    text = (resources.files(package) / name).read_text(encoding="utf-8")
    return _ENVIRONMENT.from_string(text).render(values)
