"""Quantized sparse convolution that takes over any spconv-style module."""

from __future__ import annotations

from typing import Any, Self

from torch import Tensor, nn

from bevquant_qnn._bias_ranges import FitsBias
from bevquant_qnn._descriptors import WeightDefault
from bevquant_qnn._input_channels import InputChannels
from bevquant_qnn._takeover import take_over
from bevquant_quantizers import QuantDescriptor
from bevquant_sparse import WeightLayout, conv_forward, get_weight, is_sparse_conv, layout_of


class QuantSparseConvolution(WeightDefault, FitsBias, InputChannels, nn.Module):
    """A sparse convolution of fake-quantized features and a fake-quantized weight.

    y = act(conv(fq(x.features), fq(w)) + b) on the rulebook of the module it takes over, whatever
    its kind: submanifold, strided, transposed, inverse or 1×1, rank 1 to 4, spconv 2 or any class
    known to `bevquant_sparse.register_layout`. `indice_key`, stride, padding, dilation, output
    padding, the inverse role and a fused activation stay; the convolution runs through
    `bevquant_sparse.conv_forward`, on CPU and CUDA, forwards and backwards. The input tensor is
    never changed. The weight has one range per output channel: axis 0 of KRSC, the last axis of
    RSCK and VCK.

    The instance's class is made on the spot from this one and from the `SparseModule` class of
    the library that `module` comes from, so that this library's `SparseSequential` hands it
    sparse tensors. It prints its two quantizers only.

    Args:
        module: The float sparse convolution. Its parameters stay the same objects.
        quant_desc_input: Descriptor of the input quantizer; 8 bit per tensor by default.
        quant_desc_weight: Descriptor of the weight quantizer; 8 bit per output channel by default.

    Raises:
        TypeError: If `module` is no known sparse convolution.
        ValueError: If it has more than one group.
    """

    weight: Tensor
    bias: Tensor | None
    weight_layout: WeightLayout
    reads_as_matrix: bool

    def __new__(cls, module: nn.Module, **_: Any) -> Self:
        # spconv's containers pass sparse tensors to `SparseModule`s alone.
        base = next((b for b in type(module).__mro__ if b.__name__ == "SparseModule"), None)
        return super().__new__(cls if base is None else _joined(cls, base))

    def __reduce_ex__(self, protocol: Any) -> Any:
        """Copy and pickle by the two classes that the instance's class was made of."""
        made_of = getattr(type(self), "_made_of", (type(self), None))
        return _blank, made_of, self.__dict__

    def __init__(
        self,
        module: nn.Module,
        *,
        quant_desc_input: QuantDescriptor | None = None,
        quant_desc_weight: QuantDescriptor | None = None,
    ) -> None:
        name = type(self).__name__
        if not is_sparse_conv(module):
            msg = (
                f"{name} expects a sparse convolution, got {type(module).__qualname__}. "
                "Name an own class with bevquant_sparse.register_layout(cls, layout) first."
            )
            raise TypeError(msg)
        if getattr(module, "groups", 1) != 1:
            msg = f"{name}: sparse convolutions have one group, got groups={module.groups}."
            raise ValueError(msg)
        layout = layout_of(module)
        self.weight_axis(module)  # refuses a weight that is no tensor, while nothing is taken over
        # get_weight in the module's own layout is the parameter itself, except where spconv 2
        # reads the memory of a 1×1 kernel as [in, out].
        reads_as_matrix = get_weight(module, layout) is not module.weight
        take_over(self, module)
        self.weight_layout = layout
        self.reads_as_matrix = reads_as_matrix
        self._add_quantizers(quant_desc_input, quant_desc_weight)

    @classmethod
    def weight_axis(cls, module: nn.Module) -> int:
        """Axis of the output channels in `module`'s weight: KRSC 0, RSCK 4 (rank 3), VCK 2."""
        weight: Any = getattr(module, "weight", None)
        if not isinstance(weight, Tensor):
            msg = (
                f"{type(module).__name__}: expected a sparse convolution whose `weight` is a "
                f"tensor; got {type(weight).__name__}."
            )
            raise TypeError(msg)
        return layout_of(module).out_axis % weight.dim()

    @classmethod
    def from_float(
        cls,
        module: nn.Module,
        *,
        quant_desc_input: QuantDescriptor | None = None,
        quant_desc_weight: QuantDescriptor | None = None,
    ) -> Self:
        """Return the quantized form of `module`: the constructor, under the dense modules' name."""
        return cls(module, quant_desc_input=quant_desc_input, quant_desc_weight=quant_desc_weight)

    def weight_to_quantize(self) -> Tensor:
        """Return the weight in `weight_layout`, as the convolution reads it.

        Divided by the factors of the input's channels, where these have ranges of their own.
        """
        weight, factors = get_weight(self, self.weight_layout), self.weight_factors()
        return weight if factors is None else weight / factors

    def quantized_weight(self) -> Tensor:
        """Return the fake-quantized weight in `weight_layout`, which the forward multiplies by."""
        result: Tensor = self._weight_quantizer(self.weight_to_quantize())
        return result

    def channels_of(self, input: Any) -> Tensor:
        """Return the features as [voxels, channels, 1]."""
        features: Tensor = input.features
        return features[..., None]

    def weight_by_channel(self) -> Tensor:
        """Return the weight as [1, out, in, kernel], not divided by f."""
        return get_weight(self, WeightLayout.KCRS).flatten(2)[None]

    def _by_weight(self, factors: Tensor) -> Tensor:
        after = {WeightLayout.KRSC: 0, WeightLayout.KCRS: self.weight.dim() - 2}
        return factors.reshape(-1, *[1] * after.get(self.weight_layout, 1))

    def forward(self, input: Any, add_input: Any = None) -> Any:
        """Convolve a sparse tensor; `input` is left as it is.

        Args:
            input: The sparse tensor.
            add_input: A sparse tensor added in float before a fused activation, as in spconv.

        Raises:
            ValueError: If the channels or the rulebook do not fit; the message says which.
        """
        return conv_forward(
            self,
            input,
            features=self.quantized_input(input.features),
            weight=self.quantized_weight(),
            layout=self.weight_layout,
            bias=self.bias,
            add_input=add_input,
        )

    def extra_repr(self) -> str:
        """Print nothing besides the quantizers."""
        return ""


_classes: dict[tuple[type[Any], type[Any]], type[Any]] = {}


def _joined(cls: type[Any], base: type[Any]) -> type[Any]:
    """Return the class of both: one for each pair, so that types of equal modules are equal."""
    key = (cls, base)
    if key not in _classes:
        attributes = {
            "__module__": cls.__module__,
            "__qualname__": cls.__qualname__,
            "__doc__": cls.__doc__,
            "_made_of": key,
        }
        _classes[key] = type(cls.__name__, key, attributes)
    return _classes[key]


def _blank(cls: type[Any], base: type[Any] | None) -> Any:
    return object.__new__(cls if base is None else _joined(cls, base))
