"""Mapping between float and QAT modules."""

from __future__ import annotations

from typing import Any

from torch import nn
from torch.ao.nn import quantized as torch_quantized
from torch.ao.quantization import DeQuantStub as TorchDeQuantStub
from torch.ao.quantization import QuantStub as TorchQuantStub

from bevquant_graph import layer_class
from bevquant_hybrid._quant_stub import QuantStub
from bevquant_hybrid.nn import _functions
from bevquant_hybrid.nn._functions import ElementwiseFunction, Pow
from bevquant_hybrid.nn.intrinsic import ANCHORS, Fused, anchor_of, fused_name
from bevquant_hybrid.nn.qat import (
    _base,
    _weighted,
    avg_pool2d,
    batchnorm,
    conv2d,
    functional_modules,
    interpolate,
    relu,
    stubs,
    upsampling,
)
from bevquant_hybrid.nn.qat._attention import LSTMCell, MultiheadAttention
from bevquant_hybrid.nn.qat._base import OutputQuantized, errors_that_name, name_place, take_over
from bevquant_hybrid.nn.qat._composed import GroupNorm, Normalize, Softmax
from bevquant_hybrid.nn.qat._weighted import Weighted
from bevquant_hybrid.nn.qat.segment_lut import SegmentLUT

ELEMENTWISE: tuple[type[nn.Module], ...] = (
    *(ElementwiseFunction, Pow, nn.CELU, nn.ELU, nn.GELU, nn.Hardsigmoid, nn.Hardswish),
    *(nn.LeakyReLU, nn.LogSigmoid, nn.Mish, nn.PReLU, nn.SELU, nn.SiLU, nn.Sigmoid),
    *(nn.Softplus, nn.Tanh),
)
# Each class stands for the float one that it is derived from last.
_DERIVED = (
    *(k for k in vars(_base).values() if hasattr(k, "reads") and k is not OutputQuantized),
    *(relu.ReLU, relu.ReLU6, avg_pool2d.AvgPool2d, avg_pool2d.AdaptiveAvgPool2d),
    *(batchnorm.BatchNorm2d, batchnorm.BatchNorm3d, batchnorm.SyncBatchNorm),
    *(upsampling.Upsample, upsampling.UpsamplingBilinear2d, upsampling.UpsamplingNearest2d),
    interpolate.Interpolate,
)
_COMPOSED = (GroupNorm, LSTMCell, MultiheadAttention, Normalize, Softmax)
_OTHERS: dict[type[nn.Module], Any] = {
    **{kind.__bases__[-1]: kind for kind in _DERIVED},
    **{kind.float_class: kind for kind in _COMPOSED},
    QuantStub: stubs.QuantStub,
    TorchQuantStub: stubs.QuantStub,
    TorchDeQuantStub: stubs.DeQuantStub,
    nn.LayerNorm: _base.LayerNorm,
    _functions.RMSNorm: _base.RMSNorm,
}


def is_elementwise(module: nn.Module) -> bool:
    """Whether a module is an elementwise function, which a table can hold."""
    return layer_class(module, *ELEMENTWISE) is not None


def _known(module: nn.Module) -> type[nn.Module]:
    return layer_class(module) or type(module)


def _with_weight(
    anchor: type[nn.Module], adds: bool, activation: type[nn.Module] | None
) -> type[Weighted]:
    """The class of a layer with its fused operators."""
    home = conv2d if anchor is nn.Conv2d else _weighted
    found: type[Weighted] = getattr(home, fused_name(anchor, False, adds, activation))
    return found


def _class_of(module: nn.Module) -> Any:
    kind = layer_class(module)
    if kind is None:
        return None
    if isinstance(module, Fused):
        anchor, activation = _known(anchor_of(module)), module.part("relu")
        behind = None if activation is None else _known(activation)
        plain: Any = _with_weight(anchor, module.adds, behind)
        return _weighted.with_batch_norm(plain) if module.part("bn") is not None else plain
    if isinstance(module, torch_quantized.FloatFunctional):
        return functional_modules.FloatFunctional
    if is_elementwise(module):
        return SegmentLUT
    return _with_weight(kind, False, None) if kind in ANCHORS else _OTHERS.get(kind)


def has_qat_form(module: nn.Module) -> bool:
    """Whether a float module's forward belongs to a class with a QAT form."""
    return _class_of(module) is not None


def qat_form(module: nn.Module, qconfig: Any, path: str = "") -> nn.Module:
    """Return the QAT form of a float module, which shares its parameters.

    Args:
        module: Float module; not changed.
        qconfig: Settings of its weight and output.
        path: Its path in the model, for messages.

    Raises:
        TypeError: It has none, or its qconfig has an unknown fake quantizer.
        ValueError: The qconfig does not fit.
    """
    found = _class_of(module)
    if found is None:
        raise TypeError(f"{type(module).__name__} has no QAT form")
    if path:
        # A copy takes the name: the float model stays as it is.
        module = take_over(type(module), module)
        name_place(module, path)
    with errors_that_name(path):
        made: nn.Module = found.from_float(module, qconfig)
    if path:  # of a fused layer, which is made of its convolution
        name_place(made, path)
    return made


class QatForms:
    """QAT forms of a model's modules, each made once: a module under two names stays shared."""

    def __init__(self) -> None:
        self._made: dict[int, nn.Module] = {}

    def of(self, module: nn.Module, qconfig: Any, path: str) -> nn.Module:
        """The QAT form; the module itself without one, or without a qconfig (but DeQuantStubs)."""
        if not has_qat_form(module):
            return module
        if qconfig is None and not isinstance(module, TorchDeQuantStub):
            return module
        if id(module) not in self._made:
            self._made[id(module)] = qat_form(module, qconfig, path)
        return self._made[id(module)]


def is_qat(module: object) -> bool:
    """Whether a module is one of this package's QAT modules."""
    return type(module).__module__.startswith(f"{__package__}.")


def float_form(module: nn.Module) -> nn.Module:
    """Return a QAT module's float module; other modules unchanged."""
    if not is_qat(module):
        return module
    qat: Any = module
    made: nn.Module = qat.to_float()
    return made
