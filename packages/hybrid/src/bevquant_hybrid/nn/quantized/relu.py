"""ReLUs of converted models: a quantized tensor keeps its scale in their forward."""

from __future__ import annotations

from torch import nn

from bevquant_hybrid.nn.qat._base import derived

ReLU, ReLU6 = (derived(kind, kind, __name__) for kind in (nn.ReLU, nn.ReLU6))
