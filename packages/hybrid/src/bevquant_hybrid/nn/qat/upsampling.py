"""QAT forms of torch's upsampling modules."""

from __future__ import annotations

from torch import nn

from bevquant_hybrid.nn.qat._base import KeepsScale, derived

Upsample, UpsamplingBilinear2d, UpsamplingNearest2d = (
    derived(KeepsScale, kind, __name__)
    for kind in (nn.Upsample, nn.UpsamplingBilinear2d, nn.UpsamplingNearest2d)
)
