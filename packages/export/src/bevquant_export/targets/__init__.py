"""Engines that files are for: one module each, looked up by name."""

from __future__ import annotations

from bevquant_export.targets._registry import (
    find_target,
    register_target,
    target_names,
    targets,
)
from bevquant_export.targets._target import LintFile, Target

__all__ = [
    "LintFile",
    "Target",
    "find_target",
    "register_target",
    "target_names",
    "targets",
]
