"""Descriptors that quantized modules use when the caller gives none: upstream's defaults.

8 bit, symmetric, a per-tensor range for the input and one range per output channel for the
weight, both collected by a `MaxCalibrator` until a `QuantConfig` says otherwise.
"""

from __future__ import annotations

from typing import Any

from torch import nn

from bevquant_qnn._takeover import attach_quantizer
from bevquant_quantizers import QuantDescriptor, TensorQuantizer

Axis = int | tuple[int, ...] | None


def check_fake_quant(descriptor: QuantDescriptor, owner: str, argument: str) -> QuantDescriptor:
    """Refuse a descriptor of integer output: the modules compute in float."""
    if not isinstance(descriptor, QuantDescriptor):
        msg = f"{owner}: {argument} must be a QuantDescriptor, got {type(descriptor).__name__}."
        raise TypeError(msg)
    if not descriptor.fake_quant:
        msg = (
            f"{owner}: {argument} has fake_quant=False, but the module computes in float on "
            "fake-quantized values. Use QuantDescriptor(fake_quant=True)."
        )
        raise ValueError(msg)
    return descriptor


class InputDefault:
    """Mixin: the input's quantizer, and its default descriptor.

    Each class has a default. As in pytorch-quantization, a descriptor set on a class holds for its
    subclasses too, for modules that are built afterwards. `quantize_model` uses its `QuantConfig`
    alone.
    """

    # ``None`` for 8 bit per tensor.
    default_quant_desc_input: QuantDescriptor | None = None
    _input_quantizer: TensorQuantizer

    @property
    def input_quantizer(self) -> TensorQuantizer:
        """The quantizer of every tensor that comes in, as upstream names it."""
        return self._input_quantizer

    @classmethod
    def set_default_quant_desc_input(cls, value: QuantDescriptor) -> None:
        """Use `value` for inputs from now on."""
        owner = f"{cls.__name__}.set_default_quant_desc_input"
        cls.default_quant_desc_input = check_fake_quant(value, owner, "value")

    def _input_descriptor(self, given: QuantDescriptor | None) -> QuantDescriptor:
        chosen = given or self.default_quant_desc_input or QuantDescriptor(num_bits=8)
        return check_fake_quant(chosen, type(self).__name__, "quant_desc_input")


class WeightDefault(InputDefault):
    """Mixin: the same for the weight, and the two quantizers."""

    # ``None`` for 8 bit per output channel.
    default_quant_desc_weight: QuantDescriptor | None = None
    _weight_quantizer: TensorQuantizer

    @property
    def weight_quantizer(self) -> TensorQuantizer:
        """The quantizer of the weight, as upstream names it."""
        return self._weight_quantizer

    @classmethod
    def set_default_quant_desc_weight(cls, value: QuantDescriptor) -> None:
        """Use `value` for weights from now on; errors as for the input."""
        owner = f"{cls.__name__}.set_default_quant_desc_weight"
        cls.default_quant_desc_weight = check_fake_quant(value, owner, "value")

    @classmethod
    def weight_axis(cls, module: nn.Module) -> Axis:
        """Axis (or axes) of the weight that number the output channels."""
        return 0

    def _add_quantizers(
        self: Any, read: QuantDescriptor | None, weight: QuantDescriptor | None
    ) -> None:
        read = self._input_descriptor(read)
        weight = weight or self.default_quant_desc_weight
        weight = weight or QuantDescriptor(num_bits=8, axis=self.weight_axis(self))
        weight = check_fake_quant(weight, type(self).__name__, "quant_desc_weight")
        attach_quantizer(self, "_input_quantizer", TensorQuantizer(read))
        attach_quantizer(self, "_weight_quantizer", TensorQuantizer(weight))
