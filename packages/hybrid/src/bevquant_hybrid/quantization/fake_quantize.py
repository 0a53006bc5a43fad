"""Fake quantizers, and switching between calibration, training and validation."""

from __future__ import annotations

from enum import Enum

from torch import nn
from torch.ao.quantization import FakeQuantizeBase

from bevquant_graph import check_kind
from bevquant_hybrid._fake_quant._fake_quantize import (
    CalibFakeQuantize,
    FakeQuantize,
    LSQFakeQuantize,
    PACTFakeQuantize,
    _WrappedCalibFakeQuantize,
)
from bevquant_hybrid._fake_quant._function import fake_quantize

__all__ = [
    "CalibFakeQuantize",
    "FakeQuantState",
    "FakeQuantize",
    "LSQFakeQuantize",
    "PACTFakeQuantize",
    "_WrappedCalibFakeQuantize",
    "fake_quantize",
    "set_fake_quantize",
]


class FakeQuantState(Enum):
    """Modes of a model's fake quantizers."""

    QAT = "qat"  # observe and round
    CALIBRATION = "calibration"  # observe; values pass unchanged
    VALIDATION = "validation"  # round with the current scales; observe nothing


_SWITCHES = {  # observer, fake quantizer
    FakeQuantState.QAT: (True, True),
    FakeQuantState.CALIBRATION: (True, False),
    FakeQuantState.VALIDATION: (False, True),
}


def set_fake_quantize(model: nn.Module, state: FakeQuantState | str) -> None:
    """Switch every fake quantizer of a model.

    Args:
        model: A prepared model.
        state: A `FakeQuantState` or its value.

    Raises:
        ValueError: No such state.

    Example:
        >>> model = nn.Sequential(FakeQuantize())
        >>> set_fake_quantize(model, FakeQuantState.VALIDATION)
        >>> model[0].observer_enabled
        tensor([0], dtype=torch.uint8)
    """
    check_kind(model, nn.Module, "a torch module")
    observe, round_values = _SWITCHES[FakeQuantState(state)]
    for module in model.modules():
        if isinstance(module, FakeQuantizeBase):
            module.enable_observer(observe)
            module.enable_fake_quant(round_values)
