"""Which QAT module stands for which float one, and back."""

from __future__ import annotations

from typing import Any

from torch import nn
from torch.ao.nn import quantized as torch_quantized
from torch.ao.quantization import DeQuantStub as TorchDeQuantStub
from torch.ao.quantization import QuantStub as TorchQuantStub

from bevquant_graph import layer_class
from bevquant_hybrid._quant_stub import QuantStub
from bevquant_hybrid.nn._functions import ElementwiseFunction, Interpolate, Pow
from bevquant_hybrid.nn._layer_norm import LayerNorm, Normalize, RMSNorm
from bevquant_hybrid.nn.intrinsic import Fused
from bevquant_hybrid.nn.qat import (
    attention,
    avg_pool2d,
    batchnorm,
    conv2d,
    conv3d,
    conv_transpose2d,
    correlation,
    functional_modules,
    interpolate,
    linear,
    normalization,
    recurrent,
    relu,
    several_inputs,
    softmax,
    stubs,
    upsampling,
)
from bevquant_hybrid.nn.qat._base import errors_that_name, name_place, take_over
from bevquant_hybrid.nn.qat._weighted import Weighted, anchor_of, with_batch_norm
from bevquant_hybrid.nn.qat.segment_lut import SegmentLUT

ELEMENTWISE: tuple[type[nn.Module], ...] = (
    ElementwiseFunction,
    Pow,
    nn.CELU,
    nn.ELU,
    nn.GELU,
    nn.Hardsigmoid,
    nn.Hardswish,
    nn.LeakyReLU,
    nn.LogSigmoid,
    nn.Mish,
    nn.PReLU,
    nn.SELU,
    nn.SiLU,
    nn.Sigmoid,
    nn.Softplus,
    nn.Tanh,
)
_WEIGHTED: dict[tuple[type[nn.Module], bool, str | None], type[Weighted]] = {
    (base, cls.adds, cls.activation): cls
    for base, module in (
        (nn.Conv2d, conv2d),
        (nn.Conv3d, conv3d),
        (nn.ConvTranspose2d, conv_transpose2d),
        (nn.Linear, linear),
    )
    for cls in (getattr(module, name) for name in module.__all__)
}
# Of several tensors: each class stands for the float one that it is derived from last.
_SEVERAL_INPUTS: dict[type[nn.Module], Any] = {
    cls.__bases__[-1]: cls
    for module in (several_inputs, correlation)
    for cls in (getattr(module, name) for name in module.__all__)
}
_OTHERS: dict[type[nn.Module], Any] = {
    **_SEVERAL_INPUTS,
    QuantStub: stubs.QuantStub,
    TorchQuantStub: stubs.QuantStub,
    TorchDeQuantStub: stubs.DeQuantStub,
    nn.AdaptiveAvgPool2d: avg_pool2d.AdaptiveAvgPool2d,
    nn.AvgPool2d: avg_pool2d.AvgPool2d,
    nn.BatchNorm2d: batchnorm.BatchNorm2d,
    nn.BatchNorm3d: batchnorm.BatchNorm3d,
    nn.SyncBatchNorm: batchnorm.SyncBatchNorm,
    nn.LayerNorm: normalization.LayerNorm,
    LayerNorm: normalization.LayerNorm,
    nn.GroupNorm: normalization.GroupNorm,
    nn.RMSNorm: normalization.RMSNorm,
    RMSNorm: normalization.RMSNorm,
    Normalize: normalization.Normalize,
    nn.Softmax: softmax.Softmax,
    nn.ReLU: relu.ReLU,
    nn.ReLU6: relu.ReLU6,
    nn.Upsample: upsampling.Upsample,
    nn.UpsamplingBilinear2d: upsampling.UpsamplingBilinear2d,
    nn.UpsamplingNearest2d: upsampling.UpsamplingNearest2d,
    Interpolate: interpolate.Interpolate,
    nn.MultiheadAttention: attention.MultiheadAttention,
    nn.LSTMCell: recurrent.LSTMCell,
}
_ACTIVATIONS: dict[type[nn.Module], str] = {nn.ReLU: "relu", nn.ReLU6: "relu6"}


def is_elementwise(module: nn.Module) -> bool:
    """Whether a module is a function of single elements, which a table can hold."""
    return layer_class(module, *ELEMENTWISE) is not None


def _known(module: nn.Module) -> type[nn.Module]:
    return layer_class(module) or type(module)


def _class_of(module: nn.Module) -> Any:
    kind = layer_class(module)
    if kind is None:
        return None
    if isinstance(module, Fused):
        activation = module.part("relu")
        behind = _ACTIVATIONS[_known(activation)] if activation is not None else None
        plain = _WEIGHTED.get((_known(anchor_of(module)), module.adds, behind))
        if plain is None or module.part("bn") is None:
            return plain
        return with_batch_norm(plain, module)
    if isinstance(module, torch_quantized.FloatFunctional):
        return functional_modules.FloatFunctional
    if is_elementwise(module):
        return SegmentLUT
    return _WEIGHTED.get((kind, False, None)) or _OTHERS.get(kind)


def has_qat_form(module: nn.Module) -> bool:
    """Whether a float module has a QAT form, by the class whose function it computes."""
    return _class_of(module) is not None


def qat_form(module: nn.Module, qconfig: Any, path: str = "") -> nn.Module:
    """Return the QAT form of a float module, which shares its parameters.

    Args:
        module: Float module; it stays as it is.
        qconfig: How its weight and output are quantized.
        path: Where it stands in its model, for messages.

    Raises:
        TypeError: It has none, or its qconfig is made of what no fake quantizer takes.
        ValueError: The qconfig does not fit.
    """
    found = _class_of(module)
    if found is None:
        raise TypeError(f"{type(module).__name__} has no QAT form")
    if path:
        module = take_over(type(module), module)
        name_place(module, path)
    with errors_that_name(path):
        made: nn.Module = found.from_float(module, qconfig)
    if path:  # of a fused layer, which is made of its convolution
        name_place(made, path)
    return made


def float_form(module: nn.Module) -> nn.Module:
    """Return the float module that a QAT one was made of; another module as it is."""
    if not type(module).__module__.startswith(__name__.rpartition(".")[0]):
        return module
    qat: Any = module
    made: nn.Module = qat.to_float()
    return made
