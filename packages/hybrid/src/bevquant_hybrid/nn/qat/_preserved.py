"""QAT modules that stay what they are among fixed-point ones."""

from __future__ import annotations

import functools
from typing import Any

from torch import nn
from torch.ao.quantization import FakeQuantizeBase

from bevquant_hybrid.nn.qat._base import OutputQuantized
from bevquant_hybrid.nn.qat._weighted import Weighted
from bevquant_hybrid.nn.qat.stubs import QuantStub
from bevquant_hybrid.qtensor import QTensor

__all__ = ["preserved_form"]


def preserved_form(module: nn.Module, rounding: str) -> nn.Module | None:
    """Let a QAT module compute as it trained, on integers that come in, and hand integers on.

    It observes nothing any more.

    Args:
        module: Changed in place.
        rounding: Of the fixed-point modules that read its result.

    Returns:
        The module; None where it is no QAT module with a scale.
    """
    if not isinstance(module, Weighted | OutputQuantized | QuantStub):
        return None
    for part in module.modules():
        if isinstance(part, FakeQuantizeBase):
            part.enable_observer(False)
    fake_quant: Any = module.activation_post_process
    if fake_quant is not None:
        fake_quant.register_forward_hook(functools.partial(_as_integers, rounding))
    return module


def _as_integers(rounding: str, module: nn.Module, args: Any, result: QTensor) -> QTensor:
    axis = result.q_per_channel_axis()
    return QTensor(result.int_repr(), result.scale, result.dtype, axis, rounding=rounding)
