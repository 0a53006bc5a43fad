"""Fixed-point modules without a weight, batch norms, and the mapping from QAT modules."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from bevquant_hybrid import _integer_ops as ops
from bevquant_hybrid._fake_quant._fake_quantize import FakeQuantize, _WrappedCalibFakeQuantize
from bevquant_hybrid._sampling import roi_align_real
from bevquant_hybrid.nn import qat
from bevquant_hybrid.nn._correlation import channels_of, correlate_integers
from bevquant_hybrid.nn._functions import last_axes, normalized
from bevquant_hybrid.nn.qat import _base
from bevquant_hybrid.nn.qat._base import KeepsScale, take_over
from bevquant_hybrid.nn.qat.batchnorm import channel_affine
from bevquant_hybrid.qtensor import QTensor

from ._weighted import (
    Conv2d,
    Conv3d,
    ConvTranspose2d,
    FixedPoint,
    Linear,
    depthwise,
    integers,
    real,
)
from .avg_pool2d import AdaptiveAvgPool2d, AvgPool2d
from .functional_modules import QFunctional
from .interpolate import Interpolate
from .quantize import DeQuantize, Quantize
from .relu import ReLU, ReLU6
from .segment_lut import SegmentLUT
from .upsampling import Upsample, UpsamplingBilinear2d, UpsamplingNearest2d


class BatchNorm2d(FixedPoint):
    """A depthwise 1×1 convolution: one weight of 8 bits and one bias per channel."""

    factor: Tensor
    factor_scale: Tensor
    offset: Tensor

    def __init__(self, source: Any, rounding: str) -> None:
        super().__init__(source, rounding)
        factor, offset = (t.detach() for t in channel_affine(source))
        fake_quant = source.weight_fake_quant
        kernel = fake_quant.fake_quantize(factor.reshape(-1, 1, 1, 1))
        quantized = QTensor(kernel, fake_quant.current_scale(), "qint8", fake_quant.ch_axis)
        self.register_buffer("factor", quantized.int_repr().reshape(-1))
        self.channels = factor.numel()  # a number, which sizes are not while torch.jit traces
        self.register_buffer("factor_scale", quantized.scale.clone())
        self.register_buffer("offset", offset.clone())

    def forward(self, x: QTensor) -> QTensor:
        """Scale and shift integers."""
        x = integers(self, x)
        name = self.qualified_name
        bias = ops.quantize_bias(self.offset, x.scale, self.factor_scale, name)
        values = x.int_repr()
        if values.dim() == 4:
            acc = depthwise(values, self.factor, self.channels, bias, name)
        else:  # a volume is a picture of one column
            column = values.reshape(*values.shape[:2], -1, 1)
            acc = depthwise(column, self.factor, self.channels, bias, name).reshape(values.shape)
        return self.requantized(acc, x.scale.double() * self.factor_scale.double(), 1)


class Div(FixedPoint):
    """round(x·s_x / (y·s_y) / s); x/0 is the largest integer of x's sign, 0/0 is 0."""

    def forward(self, x: QTensor, y: QTensor) -> QTensor:
        """Divide integers."""
        x, y = integers(self, x), integers(self, y, "second input")
        return self.quantized(ops.divide(x.int_repr(), y.int_repr(), x.scale, y.scale))


class Where(FixedPoint):
    """X or y at the result's scale, each rounded once."""

    def forward(self, condition: Tensor, x: QTensor | float, y: QTensor | float) -> QTensor:
        """Select integers."""
        left, right = self._at_scale(x, condition), self._at_scale(y, condition)
        return self.output(torch.where(condition, left, right))

    def _at_scale(self, value: QTensor | float, like: Tensor) -> Tensor:
        if isinstance(value, Tensor):
            x = integers(self, value)
            return self.requantized(x.int_repr().int(), x.scale).int_repr()
        real_value = torch.full((1,), float(value), dtype=torch.float64, device=like.device)
        return self.quantized(real_value).int_repr()


class GLU(FixedPoint):
    """a·σ(b) of the halves of the input, in float64 and rounded once."""

    settings = ("dim",)
    dim: int

    def forward(self, x: QTensor) -> QTensor:
        """Gate integers."""
        x = integers(self, x)
        return self.quantized(ops.gate(x.int_repr(), x.scale, self.dim))


class MultiScaleRoIAlign(FixedPoint):
    """Means of values sampled between integers, in float64 and rounded once."""

    def __init__(self, source: Any, rounding: str) -> None:
        super().__init__(source, rounding)
        self.layout = source.to_float()
        self.layout.training = False

    def forward(self, featmaps: Sequence[QTensor], boxes: Sequence[Tensor]) -> QTensor:
        """Align integers."""
        maps = [real(integers(self, x, f"feature map {i}")) for i, x in enumerate(featmaps)]
        placed, sample = self.layout.placed(maps, boxes)
        values = roi_align_real(maps, placed.double(), sample, *self.layout.settings())
        return self.quantized(values)


class LayerNorm(FixedPoint):
    """(x − mean)/√(variance + ε)·weight + bias in float64, rounded once."""

    weight: Tensor | None
    bias: Tensor | None

    settings, doubles = ("axes", "normalized_shape", "eps"), ("weight", "bias")
    axes: list[int]
    eps: float

    def forward(self, x: QTensor) -> QTensor:
        """Normalize integers."""
        values = real(integers(self, x))
        return self.quantized(normalized(values, self.axes, self.eps, self.weight, self.bias))


class RMSNorm(FixedPoint):
    """x/√(mean of squares + ε)·weight in float64, rounded once."""

    weight: Tensor | None
    doubles = ("weight",)

    def __init__(self, source: Any, rounding: str) -> None:
        super().__init__(source, rounding)
        self.axes = last_axes(source)
        # torch's default is the epsilon of the input's type, and float32 was trained with.
        self.eps = torch.finfo(torch.float32).eps if source.eps is None else source.eps

    def forward(self, x: QTensor) -> QTensor:
        """Normalize integers."""
        values = real(integers(self, x))
        result = values * torch.rsqrt(values.square().mean(self.axes, keepdim=True) + self.eps)
        return self.quantized(result if self.weight is None else result * self.weight)


class Correlation(FixedPoint):
    """round(Σxy·s_x·s_y / (K²·C·s)) of exact sums, which must fit int32."""

    settings = ("window", "kernel_size", "max_displacement", "stride1", "stride2", "pad_size")
    window: tuple[int, int, int, int, int]
    kernel_size: int

    def forward(self, data1: QTensor, data2: QTensor) -> QTensor:
        """Compare integers."""
        x, y = integers(self, data1), integers(self, data2, "second input")
        channels = channels_of(f"{self.qualified_name} (Correlation)", x, y)
        acc = correlate_integers(x.int_repr(), y.int_repr(), *self.window)
        size = self.kernel_size**2 * channels
        return self.requantized(acc, x.scale.double() * y.scale.double() / size)


# QAT class to fixed-point class; the first that fits counts.
FORMS: dict[type[nn.Module], Any] = {
    qat.ConvTranspose2d: ConvTranspose2d,
    qat.Conv3d: Conv3d,
    qat.Conv2d: Conv2d,
    qat.Linear: Linear,
    qat.QuantStub: Quantize,
    qat.FloatFunctional: QFunctional,
    **dict.fromkeys((qat.BatchNorm2d, qat.BatchNorm3d, qat.SyncBatchNorm), BatchNorm2d),
    qat.AdaptiveAvgPool2d: AdaptiveAvgPool2d,
    qat.AvgPool2d: AvgPool2d,
    qat.SegmentLUT: SegmentLUT,
    **{
        getattr(_base, form.__name__): form
        for form in (Correlation, Div, GLU, LayerNorm, MultiScaleRoIAlign, RMSNorm, Where)
    },
}
# Of what keeps the scale of its input.
_KEEPING = (ReLU, ReLU6, Interpolate, Upsample, UpsamplingBilinear2d, UpsamplingNearest2d)


class _Boundary(nn.Module):
    """A fake quantizer between CPU and BPU, with itself as owner."""

    def __init__(self, fake_quant: nn.Module, path: str) -> None:
        super().__init__()
        self.activation_post_process = fake_quant
        self.qualified_name = path


def fixed_point_form(module: nn.Module, path: str, rounding: str) -> nn.Module | None:
    """Return the fixed-point form of a QAT module, or None.

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
        kinds = {kind.__name__: kind for kind in _KEEPING}
        kept: nn.Module = take_over(kinds[type(module).__name__], module.to_float())
        return kept
    for kind, form in FORMS.items():
        if isinstance(module, kind):
            converted: nn.Module = form(module, rounding)
            return converted
    return None
