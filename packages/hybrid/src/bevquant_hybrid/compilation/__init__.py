"""Shared parts of functions on BPU models: argument checks, calls, the program."""

from __future__ import annotations

from bevquant_hybrid.compilation._arguments import (
    OPTIONS,
    bpu_calls,
    check_options,
    check_path,
    converted_model,
    forward_arguments,
    march_of,
    model_name,
    require_module,
)
from bevquant_hybrid.compilation._program_of import program_of, record_results, with_layouts

__all__ = [
    "OPTIONS",
    "bpu_calls",
    "check_options",
    "check_path",
    "converted_model",
    "forward_arguments",
    "march_of",
    "model_name",
    "program_of",
    "record_results",
    "require_module",
    "with_layouts",
]
