"""Modules under the path that pytorch-quantization gives them, ``pytorch_quantization.nn``."""

from __future__ import annotations

from ._clip import Clip
from ._tensor_quantizer import TensorQuantizer

__all__ = ["Clip", "TensorQuantizer"]
