"""Modules of several quantized steps: QAT parts that convert one by one."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Self

import torch
from torch import Tensor, nn
from torch.ao.quantization import QConfig

from bevquant_hybrid import _integer_ops as ops
from bevquant_hybrid._fake_quant._fake_quantize import CalibFakeQuantize, FakeQuantize
from bevquant_hybrid._observers import FixedScaleObserver
from bevquant_hybrid.dtype import qint16
from bevquant_hybrid.nn._functions import Exp, InverseNorm, Reciprocal, showing
from bevquant_hybrid.nn._functions import FloatFunctional as FloatArithmetic
from bevquant_hybrid.nn._functions import LayerNorm as AnyAxesLayerNorm
from bevquant_hybrid.nn._functions import Normalize as FloatNormalize
from bevquant_hybrid.nn.qat._base import (
    LayerNorm,
    float_layer,
    module_path,
    name_place,
    quantized_input,
    remember_qconfig,
    scaling_qconfig,
    take_over,
)
from bevquant_hybrid.nn.qat.conv2d import Conv2d
from bevquant_hybrid.nn.qat.functional_modules import FloatFunctional
from bevquant_hybrid.nn.qat.segment_lut import SegmentLUT
from bevquant_hybrid.qtensor import QTensor, payload


class Composed(nn.Module):
    """Base of modules whose forward calls QAT parts."""

    # Conversion replaces the parts by fixed-point ones. The forward stays the same, since both
    # kinds of parts exchange quantized tensors.

    float_class: type[nn.Module]
    settings: tuple[str, ...] = ()  # attributes copied from the float module
    # Whether files have one operator for it: its parts round to 16 bits, which files do not
    # support
    one_operator = False
    qconfig: Any
    qualified_name: str
    optional: dict[str, str]  # parts that not every call needs, and what a call needs them for
    _float_source: tuple[nn.Module]  # in a tuple: no part of the model

    if TYPE_CHECKING:

        def __getattr__(self, name: str) -> Any:
            """A part."""

    @classmethod
    def from_float(cls, source: nn.Module, qconfig: Any = None) -> Self:
        """Take over a float module."""
        qconfig = qconfig or getattr(source, "qconfig", None)
        source, path = float_layer(source, cls.float_class), module_path(source)
        if qconfig is None:
            raise ValueError(f"{path} ({type(source).__name__}): no qconfig; set one for it")
        self = cls.__new__(cls)
        nn.Module.__init__(self)
        self._float_source = (source,)
        self.qualified_name = path
        self.optional = {}
        self.training = source.training
        remember_qconfig(self, source, qconfig)
        for name in cls.settings:
            setattr(self, name, getattr(source, name))
        self.make_parts(source)
        return self

    def make_parts(self, source: Any) -> None:
        """Add the parts for a float module."""
        raise NotImplementedError

    def part(
        self, name: str, kind: Any, source: nn.Module, needed_for: str = "", qconfig: Any = None
    ) -> None:
        """Add the QAT form of a float part."""
        if needed_for:
            self.optional[name] = needed_for
        source.train(self.training)
        name_place(source, f"{self.qualified_name}.{name}")
        self.add_module(name, kind.from_float(source, qconfig or self.qconfig))

    def drop_unused(self) -> None:
        """Drop optional parts without observations: they have no scale to convert."""
        for name in self.optional:
            part = self._modules[name]
            fake_quant: Any = getattr(part, "activation_post_process", None)
            if fake_quant is not None and not fake_quant.observed:
                self._modules[name] = None

    def needed(self, name: str) -> Any:
        """Return an optional part."""
        part = getattr(self, name)  # of arithmetic, a tracer notes the access
        if part is None:
            raise ValueError(
                f"{self.qualified_name} ({type(self).__name__}): called with "
                f"{self.optional[name]}, which no call before it was converted had, so that its "
                "values have no scale; calibrate or train with it too"
            )
        return part

    def to_float(self) -> nn.Module:
        """Return the float module."""
        made: nn.Module = self.float_source()
        return made

    def float_source(self) -> Any:
        """A copy of the float module, with the user's current qconfig."""
        source = self._float_source[0]
        made = take_over(type(source), source)
        # Copies of the children too: what is set on them is not set on the user's model.
        for name, child in made._modules.items():
            made._modules[name] = None if child is None else take_over(type(child), child)
        prepared = self.__dict__["_prepared_with"][0]
        if self.qconfig is not prepared:
            made.qconfig = self.qconfig
        made.training = self.training
        return made


def linear_of(weight: Any, bias: Any) -> nn.Linear:
    """A linear layer with these parameters."""
    made = nn.Linear(weight.shape[1], weight.shape[0], bias is not None, device="meta")
    made.weight, made.bias = weight, bias
    return made


def of_16_bits(qconfig: Any) -> QConfig:
    """Settings of an inner step: those of the result, in 16 bits and without a fixed scale."""
    if qconfig.activation is None:
        raise ValueError(
            "its steps need scales, but its qconfig has no activation; set one "
            "(get_default_qat_qconfig), since only layers with a weight have a 32-bit output"
        )
    made = qconfig.activation()
    # A fixed scale is the result's; what an inner step makes has another range.
    wide: Any = FakeQuantize.with_args(dtype=qint16)
    if not isinstance(made.activation_post_process, FixedScaleObserver):

        def wide() -> nn.Module:
            step: nn.Module = qconfig.activation(dtype=qint16)
            return step

    return QConfig(activation=wide, weight=None)


_EXP_SCALE = 1 / 32767.5  # of values in (0, 1], in 16 bits


class Softmax(Composed):
    r"""`torch.nn.Softmax` in the documented steps, for QAT and conversion.

    :math:`y = e \cdot (1/\sum e)` with :math:`e = \exp(x - \max x)`: difference, exponential, sum
    and reciprocal in 16 bits, the exponential with the scale 1/32767.5; the product has the type
    and the scale of the module's qconfig.
    """

    float_class = nn.Softmax
    settings = ("dim",)
    one_operator = True
    dim: int | None

    def make_parts(self, source: Any) -> None:
        """Difference, exponential, sum, reciprocal and product."""
        qconfig = scaling_qconfig(source, self.qconfig)
        inner = of_16_bits(qconfig)
        self.part("sub", FloatFunctional, FloatArithmetic(), qconfig=inner)
        self.part("exp", SegmentLUT, Exp(), qconfig=_of_exponential(qconfig))
        self.part("sum", FloatFunctional, FloatArithmetic(), qconfig=inner)
        self.part("reciprocal", SegmentLUT, Reciprocal(), qconfig=inner)
        self.part("mul", FloatFunctional, FloatArithmetic())

    def forward(self, x: Tensor, excluded: Tensor | None = None) -> Tensor:
        """Normalize.

        Args:
            x: Quantized.
            excluded: Where True, a value counts as −∞; a row of excluded values returns zeros.
        """
        dim = self.dim
        if dim is None:  # torch's own choice
            dim = 0 if x.dim() in (0, 1, 3) else 1
        drawn = torch.onnx.is_in_onnx_export()  # as one operator of 8 bits
        if not isinstance(x, QTensor) or (drawn and not x.holds_integers):
            return self._at_once(quantized_input(self, x), excluded, dim)
        # A row that is excluded altogether keeps its values here, so that its sum is not 0; the
        # last line makes it zeros.
        if excluded is not None:
            x = _filled(x, excluded, lowest=True, dim=dim)
        # No exponential of x − max is above 1: one fixed scale holds them all.
        shifted = self.sub.sub(x, x.max(dim, keepdim=True)[0])
        exponential = self.exp(shifted)
        if excluded is not None:
            exponential = _filled(exponential, excluded, lowest=False, dim=dim)
        inverse = self.reciprocal(self.sum.sum(exponential, dim=dim, keepdim=True))
        result: QTensor = self.mul.mul(exponential, inverse)
        return result if excluded is None else _filled(result, excluded, lowest=False)

    def _at_once(self, values: Tensor, excluded: Tensor | None, dim: int) -> Tensor:
        if excluded is not None:
            values = values.masked_fill(excluded, -torch.inf)
        shares = values.softmax(dim)
        # A row of −∞ alone gives NaN.
        if excluded is not None:
            shares = shares.masked_fill(excluded, 0.0)
        quantized: Tensor = self.mul.activation_post_process(shares)
        return quantized

    extra_repr = showing("dim")  # as in torch


def _of_exponential(qconfig: Any) -> QConfig:
    kind: Any = FakeQuantize
    if isinstance(qconfig.activation(), CalibFakeQuantize):
        kind = CalibFakeQuantize
    fixed = kind.with_args(observer=FixedScaleObserver, scale=_EXP_SCALE, dtype=qint16)
    return QConfig(activation=fixed, weight=None)


def _filled(x: QTensor, excluded: Tensor, *, lowest: bool, dim: int | None = None) -> QTensor:
    """The tensor with its smallest value, or 0, where values are excluded."""
    if x.holds_integers:
        return x.like(ops.exclude(x.int_repr(), excluded, lowest, dim))
    return x.like(ops.filled(payload(x), excluded, lowest, dim))


class GroupNorm(Composed):
    """`torch.nn.GroupNorm` in two steps: a layer norm per group, then weight and bias.

    The second step is a depthwise 1×1 convolution with the float module's weight and bias.
    """

    float_class = nn.GroupNorm
    settings = ("num_groups", "num_channels")
    num_groups: int
    num_channels: int

    def make_parts(self, source: Any) -> None:
        """The norm of every group, and the convolution."""
        norm = AnyAxesLayerNorm(1, source.eps, elementwise_affine=False, dim=-1)
        self.part("norm", LayerNorm, norm)
        if source.weight is None:
            self.register_module("affine", None)
        else:
            channels = self.num_channels
            shift = source.bias is not None
            affine = nn.Conv2d(channels, channels, 1, groups=channels, bias=shift)
            affine.weight = nn.Parameter(source.weight.detach().reshape(-1, 1, 1, 1).clone())
            if source.bias is not None:
                affine.bias = nn.Parameter(source.bias.detach().clone())
            self.part("affine", Conv2d, affine)

    def to_float(self) -> nn.Module:
        """Return a float module with these parameters."""
        made: Any = self.float_source()
        if self.affine is not None:
            made.weight = nn.Parameter(self.affine.weight.detach().reshape(-1))
            if self.affine.bias is not None:
                made.bias = self.affine.bias
        found: nn.Module = made
        return found

    def forward(self, x: Tensor) -> Tensor:
        """Normalize ``[N, C, …]``."""
        shape = x.shape
        rows: Tensor = self.norm(x.reshape(shape[0], self.num_groups, -1))
        if self.affine is None:
            return rows.reshape(shape)
        result: Tensor = self.affine(rows.reshape(shape[0], self.num_channels, -1, 1))
        return result.reshape(shape)


class Normalize(Composed):
    """x·f(Σx²) with the table f = 1/max(√x, ε): squares, their sum and f in 16 bits."""

    float_class = FloatNormalize
    settings = ("dim",)
    one_operator = True
    dim: Any

    def make_parts(self, source: Any) -> None:
        """Squares, their sum, the table and the product."""
        inner = of_16_bits(self.qconfig)
        self.part("square", FloatFunctional, FloatArithmetic(), qconfig=inner)
        self.part("sum", FloatFunctional, FloatArithmetic(), qconfig=inner)
        self.part("inverse", SegmentLUT, InverseNorm(source.eps), qconfig=inner)
        self.part("mul", FloatFunctional, FloatArithmetic())

    def forward(self, x: Tensor) -> Tensor:
        """Normalize."""
        squares = self.square.mul(x, x)
        inverse = self.inverse(self.sum.sum(squares, dim=self.dim, keepdim=True))
        result: Tensor = self.mul.mul(x, inverse)
        return result
