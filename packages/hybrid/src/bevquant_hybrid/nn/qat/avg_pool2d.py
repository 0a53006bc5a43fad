"""QAT average pooling; max pooling keeps its input's scale."""

from __future__ import annotations

from torch import nn

from bevquant_hybrid.nn.qat._base import OutputQuantized, derived

AvgPool2d, AdaptiveAvgPool2d = (
    derived(OutputQuantized, kind, __name__) for kind in (nn.AvgPool2d, nn.AdaptiveAvgPool2d)
)
