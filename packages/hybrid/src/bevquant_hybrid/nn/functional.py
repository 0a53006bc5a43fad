"""The same functions under their other documented path."""

from __future__ import annotations

from bevquant_hybrid.functional import argmax, filter

__all__ = ["argmax", "filter"]
