"""Common parts of dense quantized modules with a weight: two quantizers and `from_float`."""

from __future__ import annotations

from typing import Any, Self

from torch import Tensor, nn

from bevquant_graph import layer_class
from bevquant_qnn._bias_ranges import FitsBias
from bevquant_qnn._descriptors import Axis, WeightDefault
from bevquant_qnn._input_channels import InputChannels
from bevquant_qnn._takeover import attach_quantizer, no_source, take_over
from bevquant_quantizers import QuantDescriptor, TensorQuantizer


class QuantWeighted(WeightDefault, FitsBias, InputChannels, nn.Module):
    """Mixin: `_input_quantizer`, `_weight_quantizer` and `from_float`.

    A class that uses it is also a subclass of its float torch class, named by `float_class`.

    Args:
        *args: As that class of torch.
        quant_desc_input: Descriptor of the input quantizer.
        quant_desc_weight: Descriptor of the weight quantizer.
        **kwargs: As that class of torch.
    """

    float_class: type[nn.Module]
    weight: Tensor

    def __init__(
        self,
        *args: Any,
        quant_desc_input: QuantDescriptor | None = None,
        quant_desc_weight: QuantDescriptor | None = None,
        **kwargs: Any,
    ) -> None:
        super().__init__(*args, **kwargs)
        self._add_quantizers(quant_desc_input, quant_desc_weight)

    @classmethod
    def weight_axis(cls, module: nn.Module) -> Axis:
        """Axis (or axes) of the weight that number the output channels."""
        return 0

    @classmethod
    def from_float(
        cls,
        module: nn.Module,
        *,
        quant_desc_input: QuantDescriptor | None = None,
        quant_desc_weight: QuantDescriptor | None = None,
    ) -> Self:
        """Return the quantized form of a float module, holding the float module's own parameters.

        Args:
            module: An instance of `float_class`. Its parameters, buffers, hooks, device, dtype
                and training flag are taken over; the parameters stay the same objects.
            quant_desc_input: Descriptor of the input quantizer; 8 bit per tensor by default.
            quant_desc_weight: Descriptor of the weight quantizer; 8 bit per output channel by
                default.

        Raises:
            TypeError: If `module` is of another class, or has a forward of its own.
        """
        if layer_class(module, cls.float_class) is None:
            raise no_source(cls, module)
        quantized = take_over(cls.__new__(cls), module)
        quantized._add_quantizers(quant_desc_input, quant_desc_weight)
        return quantized

    def _add_quantizers(
        self, quant_desc_input: QuantDescriptor | None, quant_desc_weight: QuantDescriptor | None
    ) -> None:
        read = self._input_descriptor(quant_desc_input)
        weight = self._weight_descriptor(quant_desc_weight, self.weight_axis(self))
        attach_quantizer(self, "_input_quantizer", TensorQuantizer(read))
        attach_quantizer(self, "_weight_quantizer", TensorQuantizer(weight))

    def weight_to_quantize(self) -> Tensor:
        """Return the weight in the shape in which its quantizer's axes number output channels.

        Divided by the factors of the input's channels, where these have ranges of their own.
        """
        factors = self.weight_factors()
        return self.weight if factors is None else self.weight / factors

    def quantized_weight(self) -> Tensor:
        """Return the fake-quantized weight that the forward multiplies by."""
        result: Tensor = self._weight_quantizer(self.weight_to_quantize())
        return result.reshape(self.weight.shape)

    def channels_of(self, input: Tensor) -> Tensor:
        """Return an input as [rows, channels, places]."""
        after = self._axes_after()
        if not after:
            return input.reshape(-1, input.shape[-1], 1)
        return (input if input.dim() == after + 2 else input[None]).flatten(2)

    def weight_by_channel(self) -> Tensor:
        """Return the weight as [groups, out/groups, in/groups, kernel], not divided by f."""
        groups = getattr(self, "groups", 1)
        outputs, inputs = self.weight.shape[:2]
        return self.weight.reshape(groups, outputs // groups, inputs, -1)

    def _axes_after(self) -> int:
        return self.weight.dim() - 2

    def _by_weight(self, factors: Tensor) -> Tensor:
        groups, shape = getattr(self, "groups", 1), self.weight.shape
        each = factors.reshape(groups, 1, shape[1]).expand(-1, shape[0] // groups, -1)
        return each.reshape(shape[0], shape[1], *[1] * self._axes_after())
