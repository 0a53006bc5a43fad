"""The sections of a run's page, one module each.

A section is a module here with its position, `ORDER`, and `section(content)`, which returns its
data, or None if the run has none; and a template with the name of its key. No other code names it.
"""

from __future__ import annotations

from functools import cache
from importlib import import_module
from pkgutil import iter_modules
from typing import Any

from bevfusion_quant.pages._content import ReportContent
from bevfusion_quant.pages._page import Section

__all__ = ["run_sections"]


def run_sections(content: ReportContent) -> list[Section]:
    """All sections with data, in the order of the page."""
    made = (module.section(content) for module in _modules())
    return [section for section in made if section is not None]


@cache
def _modules() -> tuple[Any, ...]:
    modules = [import_module(f"{__name__}.{found.name}") for found in iter_modules(__path__)]
    return tuple(sorted(modules, key=lambda module: module.ORDER))
