"""Torch's upsampling modules in converted models: a quantized tensor keeps its scale."""

from __future__ import annotations

from torch import nn

from bevquant_hybrid.nn.qat._base import derived

Upsample, UpsamplingBilinear2d, UpsamplingNearest2d = (
    derived(kind, kind, __name__)
    for kind in (nn.Upsample, nn.UpsamplingBilinear2d, nn.UpsamplingNearest2d)
)
