"""Which fixed-point module stands for which QAT one."""

from __future__ import annotations

from typing import Any

from torch import nn

from bevquant_hybrid._fake_quant._fake_quantize import FakeQuantize, _WrappedCalibFakeQuantize
from bevquant_hybrid.nn import qat
from bevquant_hybrid.nn.qat._base import KeepsScale, take_over
from bevquant_hybrid.nn.quantized._others import FORMS
from bevquant_hybrid.nn.quantized._weighted import Conv2d, Conv3d, ConvTranspose2d, Linear
from bevquant_hybrid.nn.quantized.avg_pool2d import AdaptiveAvgPool2d, AvgPool2d
from bevquant_hybrid.nn.quantized.functional_modules import QFunctional
from bevquant_hybrid.nn.quantized.interpolate import Interpolate
from bevquant_hybrid.nn.quantized.quantize import DeQuantize, Quantize
from bevquant_hybrid.nn.quantized.relu import ReLU, ReLU6
from bevquant_hybrid.nn.quantized.segment_lut import SegmentLUT
from bevquant_hybrid.nn.quantized.upsampling import (
    Upsample,
    UpsamplingBilinear2d,
    UpsamplingNearest2d,
)

__all__ = ["fixed_point_form"]

_FORMS: tuple[tuple[type[nn.Module], Any], ...] = (
    (qat.ConvTranspose2d, ConvTranspose2d),
    (qat.Conv3d, Conv3d),
    (qat.Conv2d, Conv2d),
    (qat.Linear, Linear),
    (qat.QuantStub, Quantize),
    (qat.FloatFunctional, QFunctional),
    (qat.AvgPool2d, AvgPool2d),
    (qat.AdaptiveAvgPool2d, AdaptiveAvgPool2d),
    (qat.SegmentLUT, SegmentLUT),
    *FORMS.items(),
)

_KEEPING: dict[type[nn.Module], type[nn.Module]] = {
    qat.ReLU: ReLU,
    qat.ReLU6: ReLU6,
    qat.Interpolate: Interpolate,
    qat.Upsample: Upsample,
    qat.UpsamplingBilinear2d: UpsamplingBilinear2d,
    qat.UpsamplingNearest2d: UpsamplingNearest2d,
}


class _Boundary(nn.Module):
    """A fake quantizer between CPU and BPU, as the owner of itself."""

    def __init__(self, fake_quant: nn.Module, path: str) -> None:
        super().__init__()
        self.activation_post_process = fake_quant
        self.qualified_name = path


def fixed_point_form(module: nn.Module, path: str, rounding: str) -> nn.Module | None:
    """Return the fixed-point form of a QAT module, or None where it has none.

    Raises:
        ValueError: It has settings that a BPU does not execute.
    """
    if isinstance(module, _WrappedCalibFakeQuantize):
        module = module.activation_post_process
    if isinstance(module, FakeQuantize):
        return Quantize(_Boundary(module, path), rounding)
    if isinstance(module, qat.DeQuantStub) and not isinstance(module, DeQuantize):
        return DeQuantize()
    if isinstance(module, KeepsScale):
        return take_over(_KEEPING[type(module)], module.to_float())
    for kind, form in _FORMS:
        if isinstance(module, kind):
            made: nn.Module = form(module, rounding)
            return made
    return None
