"""Engines with their files: one module each, found by name."""

from __future__ import annotations

from bevquant_export._cpu import CPUS, cpu_at_hand
from bevquant_export._target import (
    LintFile,
    Target,
    find_target,
    register_target,
    target_names,
    targets,
)

__all__ = [
    "CPUS",
    "LintFile",
    "Target",
    "cpu_at_hand",
    "find_target",
    "register_target",
    "target_names",
    "targets",
]
