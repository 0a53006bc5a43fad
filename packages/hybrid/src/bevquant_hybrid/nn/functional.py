"""Functions under their other documented path."""

from __future__ import annotations

from bevquant_hybrid.functional import argmax, filter
from bevquant_hybrid.nn._pillars import point_pillars_preprocess
from bevquant_hybrid.nn.bgr_to_yuv444 import bgr_to_yuv444

__all__ = ["argmax", "bgr_to_yuv444", "filter", "point_pillars_preprocess"]
