"""QAT ReLUs; after a convolution they are fused into it."""

from __future__ import annotations

from torch import nn

from bevquant_hybrid.nn.qat._base import KeepsScale, derived

ReLU, ReLU6 = (derived(KeepsScale, kind, __name__) for kind in (nn.ReLU, nn.ReLU6))
