"""Quantized layers over a weight that another module holds.

A forward of the author's may apply a parameter without calling the layer that holds it, or be that
layer: a convolution that pads its input by itself (``"same"`` as TensorFlow's), one that hands its
result on to a norm and an activation, an attention that is one function of ``qkv.weight``. Such a
product goes through a quantized layer that reads the parameter where it is, so that names in the
state dict, parameter objects and optimizers are as before.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from operator import attrgetter
from typing import Any, NamedTuple, Self

import torch.nn.functional as F
from torch import nn

from bevquant_qnn._conv import QuantConv1d, QuantConv2d, QuantConv3d, QuantLinear, QuantWeighted
from bevquant_qnn._takeover import take_over
from bevquant_quantizers import QuantDescriptor

_CONV = inspect.signature(
    lambda input, weight, bias=None, stride=1, padding=0, dilation=1, groups=1: None
)
_LINEAR = inspect.signature(lambda input, weight, bias=None: None)


class Product(NamedTuple):
    """A product of a forward, ``function(x, weight.reshape(shape), bias, **settings)``."""

    function: Any
    x: Any
    weight: Any
    bias: Any
    settings: dict[str, Any]
    shape: tuple[int, ...]

    def names_in(self, module: nn.Module) -> tuple[str, str | None] | None:
        """Paths below `module` of the parameters that are weight and bias.

        None if the weight is computed, a buffer, or another module's.
        """
        weight = _name_of(self.weight, module)
        bias = None if self.bias is None else _name_of(self.bias, module)
        if weight is None or (bias is None and self.bias is not None):
            return None
        return weight, bias


def product_of(function: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Product:
    """The product that a call of one of `PRODUCT_CALLS` is."""
    signature = _LINEAR if function is F.linear else _CONV
    bound = signature.bind(*args, **kwargs)
    bound.apply_defaults()
    x, weight, bias = (bound.arguments.pop(name) for name in ("input", "weight", "bias"))
    rank, shape = weight.dim() - 2, tuple(weight.shape)
    settings = {n: v if n == "groups" else _spread(v, rank) for n, v in bound.arguments.items()}
    # A deformable convolution multiplies by its weight in another shape.
    whole = weight._base
    if whole is not None and whole.numel() == weight.numel() and weight.is_contiguous():
        weight = whole if whole.is_contiguous() and whole.shape[0] == shape[0] else weight
    return Product(function, x, weight, bias, settings, shape)


def holds_weight(module: nn.Module) -> bool:
    """Whether the module has a parameter of its own that may be the weight of a product."""
    return any(p is not None and p.dim() > 1 for p in module._parameters.values())


def held_layers(model: nn.Module) -> Iterator[str]:
    """Paths of the modules whose weight a `HeldWeight` applies."""
    for path, module in model.named_modules():
        if isinstance(module, HeldWeight):
            owner, holder = path.rpartition(".")[0], module._names[0].rpartition(".")[0]
            yield f"{owner}.{holder}".strip(".")


def _name_of(value: object, module: nn.Module) -> str | None:
    names: Iterator[tuple[str, nn.Parameter]] = module.named_parameters()
    return next((name for name, parameter in names if parameter is value), None)


def _spread(value: Any, rank: int) -> Any:
    """A setting of a convolution for each of its axes; ``"same"`` as it is."""
    if isinstance(value, str):
        return value
    return (
        tuple(value)
        if isinstance(value, list | tuple) and len(value) == rank
        else (value if isinstance(value, int) else value[0],) * rank
    )


class HeldWeight(QuantWeighted):
    """Mixin: weight and bias are parameters of another module, which this layer only reads.

    Made by `of`, as a child of the module whose forward computes the product.
    """

    _names: tuple[str, str | None]
    _shape: tuple[int, ...]

    @classmethod
    def of(
        cls,
        owner: nn.Module,
        product: Product,
        names: tuple[str, str | None],
        *,
        quant_desc_input: QuantDescriptor,
        quant_desc_weight: QuantDescriptor,
    ) -> Self:
        """The quantized layer of a product whose weight and bias have these paths below `owner`."""
        made = take_over(cls.__new__(cls), _stock_layer(product))
        # The owner's parameters keep their names in its state dict.
        made._parameters.clear()
        made.__dict__["_owner"] = owner  # no child: the owner is the parent
        made._names, made._shape = names, product.shape
        made._add_quantizers(quant_desc_input, quant_desc_weight)
        return made.to(made.weight.device)

    def _held(self, name: str | None) -> Any:
        return None if name is None else attrgetter(name)(self.__dict__["_owner"])

    weight: Any = property(lambda self: _shaped(self._held(self._names[0]), self._shape))
    bias: Any = property(lambda self: self._held(self._names[1]))

    @property
    def held(self) -> tuple[Any, Any]:
        """The other module's weight and bias."""
        return self._held(self._names[0]), self._held(self._names[1])

    def is_layer_of(self, product: Product) -> bool:
        """Whether a call computes what this layer does."""
        own = {name: getattr(self, name) for name in product.settings}
        same = all(a is b for a, b in zip(self.held, product[2:4], strict=True))
        return same and (own, self._shape) == (product.settings, product.shape)


def _shaped(weight: Any, shape: tuple[int, ...]) -> Any:
    return weight if weight.shape == shape else weight.view(shape)


class QuantHeldLinear(HeldWeight, QuantLinear):
    """`QuantLinear` whose weight and bias are another module's."""

    float_class = nn.Linear


class QuantHeldConv1d(HeldWeight, QuantConv1d):
    """`QuantConv1d` whose weight and bias are another module's."""

    float_class = nn.Conv1d


class QuantHeldConv2d(HeldWeight, QuantConv2d):
    """`QuantConv2d` whose weight and bias are another module's."""

    float_class = nn.Conv2d


class QuantHeldConv3d(HeldWeight, QuantConv3d):
    """`QuantConv3d` whose weight and bias are another module's."""

    float_class = nn.Conv3d


PRODUCT_CALLS: dict[Any, type[HeldWeight]] = {
    F.linear: QuantHeldLinear,
    F.conv1d: QuantHeldConv1d,
    F.conv2d: QuantHeldConv2d,
    F.conv3d: QuantHeldConv3d,
}
"""Functions of torch to the quantized layer that computes them."""


def _stock_layer(product: Product) -> nn.Module:
    """A layer of torch's with the sizes and settings of a product."""
    outputs, inputs, *size = product.shape
    bias, device = product.bias is not None, "meta"
    if product.function is F.linear:
        return nn.Linear(inputs, outputs, bias, device=device)
    kind: Any = PRODUCT_CALLS[product.function].float_class
    inputs *= product.settings["groups"]
    made: nn.Module = kind(
        inputs, outputs, tuple(size), bias=bias, device=device, **product.settings
    )
    return made
