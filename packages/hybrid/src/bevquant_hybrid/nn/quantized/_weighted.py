"""Base class and shared functions of fixed-point modules, and layers with a weight."""

from __future__ import annotations

from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from bevquant_hybrid import _integer_ops as ops
from bevquant_hybrid._scale_keeping import clamped
from bevquant_hybrid.dtype import QuantDType, as_quant_dtype, qinfo
from bevquant_hybrid.march import HAS_QINT4, get_march
from bevquant_hybrid.nn.qat import _weighted as qat
from bevquant_hybrid.nn.qat._base import module_path
from bevquant_hybrid.qtensor import QTensor, along


def integers(module: nn.Module, x: Any, what: str = "input") -> QTensor:
    """Return a tensor that holds integers of 8 or 16 bits."""
    if isinstance(x, QTensor) and x.dtype != "qint32":
        if x.holds_integers:
            return x
        # Float values of a known scale, from `QTensor(values, scale, dtype)`.
        axis, bits = x.q_per_channel_axis(), x.dtype.bits
        values = ops.quantize(x.dequantize(), x.scale, axis, bits, x.rounding)
        return QTensor(values, x.scale, x.dtype, axis, rounding=x.rounding)
    came = f"a QTensor of {x.dtype}" if isinstance(x, QTensor) else type(x).__name__
    raise TypeError(
        f"{module_path(module)} ({type(module).__name__}): its {what} must be a quantized tensor "
        f"of 8 or 16 bits, got {came}; a QuantStub was missing when the model was prepared"
    )


class FixedPoint(nn.Module):
    """Base: output scale, output type and rounding.

    Attributes:
        scale: Value of one output step, ``[1]``.
        dtype: Output type.
        rounding: ``"half_up"`` or ``"half_even"``.
        settings: Attributes copied from its QAT form.
        doubles: Parameters of it, kept in float64; None where it has none.
    """

    settings: ClassVar[tuple[str, ...]] = ()
    doubles: ClassVar[tuple[str, ...]] = ()
    scale: Tensor

    def __init__(self, source: Any, rounding: str) -> None:
        super().__init__()
        self.rounding = rounding
        self.qualified_name = module_path(source)
        fake_quant: Any = getattr(source, "activation_post_process", None)
        self.dtype: QuantDType | None = None
        if fake_quant is not None:
            self.dtype = as_quant_dtype(fake_quant.dtype)
            self.register_buffer("scale", fake_quant.current_scale().clone())
            self.register_buffer("zero_point", torch.zeros_like(self.scale, dtype=torch.long))
        for name in self.settings:
            setattr(self, name, getattr(source, name))
        for name in self.doubles:
            value = getattr(source, name)
            self.register_buffer(name, None if value is None else value.detach().double())
        self.training = False

    @property
    def bits(self) -> int:
        """Bits of the output."""
        return self.dtype.bits if self.dtype is not None else 32

    def output(self, q: Tensor) -> QTensor:
        """Give integers this module's scale."""
        assert self.dtype is not None
        return QTensor(q, self.scale, self.dtype, rounding=self.rounding)

    def quantized(self, values: Tensor) -> QTensor:
        """Quantize real values of float64."""
        return self.output(ops.quantize(values, self.scale, -1, self.bits, self.rounding))

    def requantized(self, acc: Tensor, scale: Tensor, axis: int = -1) -> QTensor:
        """Requantize accumulators to the output's scale."""
        assert self.dtype is not None
        info = qinfo(self.dtype)
        multiplier = scale.double() / self.scale.double()
        limits = self.bits, info.min, info.max, self.rounding, self.qualified_name
        return self.output(ops.requantize(acc, multiplier, axis, *limits))

    def extra_repr(self) -> str:
        """Print scale and type."""
        return f"scale={self.scale}, dtype={self.dtype}" if self.dtype is not None else ""


def real(x: QTensor) -> Tensor:
    """The values of a fixed-point tensor in float64."""
    return x.int_repr().double() * along(x.scale.double(), x.dim(), x.q_per_channel_axis())


class _Weighted(FixedPoint):
    r"""acc = op(x, w) + round(b/(s_x·s_w)) in int32, then to the output's scale.

    A second input is requantized to the accumulator's scale and added, and ReLU clamps, before one
    rounding: :math:`q = \operatorname{clamp}(\operatorname{round}(acc\,s_x s_w / s_y))`. Without an
        output scale the result is the accumulators, with a scale per channel.
    """

    weight: Tensor
    weight_scale: Tensor
    bias: Tensor | None

    def __init__(self, source: qat.Weighted, rounding: str) -> None:
        super().__init__(source, rounding)
        quantized, scale, bias = source.fixed_weight()
        march = get_march() or ""
        if quantized.dtype not in ("qint8", "qint4") or (
            quantized.dtype == "qint4" and march not in HAS_QINT4
        ):
            raise ValueError(
                f"{self.qualified_name}: weights of {quantized.dtype}: a BPU computes with weights "
                "of qint8, and of qint4 on Journey 6 (March.NASH_E, NASH_M, NASH_P)"
            )
        self.register_buffer("weight", quantized.int_repr())
        self.register_buffer("weight_scale", scale.detach().clone())
        self.per_channel = scale.numel() > 1
        self.register_buffer("bias", None if bias is None else bias.clone())
        self.adds, self.activation = source.adds, source.activation
        self.channel_axis = source.output_channel_axis
        self._count_steps_of_6()

    def _count_steps_of_6(self) -> None:
        # A number, not a tensor: tracing records it. It follows the scale, also one that is loaded.
        self.steps_of_6 = 0
        if self.dtype is not None:
            self.steps_of_6 = int((6.0 / self.scale.double() + 0.5).floor())

    def _load_from_state_dict(self, *args: Any, **kwargs: Any) -> None:
        super()._load_from_state_dict(*args, **kwargs)
        self._count_steps_of_6()

    def accumulators(self, x: Tensor, bias: Tensor | None) -> Tensor:
        """Compute the layer itself."""
        raise NotImplementedError

    def forward(self, x: QTensor, other: QTensor | None = None) -> QTensor:
        """Compute on integers."""
        x = integers(self, x)
        name = self.qualified_name
        bias = self.bias
        if bias is not None:
            bias = ops.quantize_bias(bias, x.scale, self.weight_scale, name)
        acc = self.accumulators(x.int_repr(), bias)
        axis = self.channel_axis % acc.dim()
        step = x.scale.double() * self.weight_scale.double()
        if other is not None:
            other = integers(self, other, "second input")
            factor = other.scale.double() / step
            q = other.int_repr()
            acc = ops.accumulate(acc, q, factor, axis, self.rounding, name)
        if self.dtype is None:
            return self._accumulated(acc, step, axis)
        info = qinfo(self.dtype)
        low, high = (0 if self.activation else info.min), info.max
        if self.activation == "relu6":
            high = min(high, self.steps_of_6)
        limits = self.bits, low, high, self.rounding, name
        return self.output(ops.requantize(acc, step / self.scale.double(), axis, *limits))

    def _accumulated(self, acc: Tensor, step: Tensor, axis: int) -> QTensor:
        scaled_axis = axis if self.per_channel else -1
        result = QTensor(acc, step.float(), "qint32", scaled_axis, rounding=self.rounding)
        if self.activation is None:
            return result
        return clamped(result, 0.0, 6.0 if self.activation == "relu6" else None)

    def add(self, x: QTensor, other: QTensor) -> QTensor:
        """Compute with an addition: the call that it replaces was ``.add(x, other)``."""
        result: QTensor = self(x, other)
        return result

    def extra_repr(self) -> str:
        """Print shape, fused operations, scale and type."""
        shape = "×".join(map(str, self.weight.shape))
        behind = [text for text in ("add" if self.adds else "", self.activation or "") if text]
        parts = [f"weight={shape}", *behind, FixedPoint.extra_repr(self)]
        return ", ".join(part for part in parts if part)


class Conv2d(_Weighted):
    """Fixed-point convolution in two dimensions."""

    def __init__(self, source: qat.Weighted, rounding: str) -> None:
        super().__init__(source, rounding)
        rank = self.weight.dim() - 2
        self.transposed = isinstance(source, qat.ConvTranspose2d)
        settings: Any = source  # of torch's convolution beside `Weighted`
        self.stride = list(settings.stride)
        self.padding = _sides(source, rank)
        self.dilation = list(settings.dilation)
        self.groups = int(settings.groups)
        self.output_padding = list(settings.output_padding)

    def accumulators(self, x: Tensor, bias: Tensor | None) -> Tensor:
        """Convolve."""
        window = self.stride, self.padding, self.dilation, self.groups
        kind = self.transposed, self.output_padding, self.qualified_name
        return ops.conv(x, self.weight, bias, *window, *kind)


class Conv3d(Conv2d):
    """Fixed-point convolution in three dimensions."""


class ConvTranspose2d(Conv2d):
    """Fixed-point transposed convolution."""


class Linear(_Weighted):
    """Fixed-point linear layer."""

    def accumulators(self, x: Tensor, bias: Tensor | None) -> Tensor:
        """Multiply."""
        return ops.linear(x, self.weight, bias, self.qualified_name)


def _sides(source: Any, rank: int) -> list[int]:
    padding = source.padding
    if not isinstance(padding, str):
        return list(padding)
    if padding == "valid":
        return [0] * rank
    reach = [d * (k - 1) for d, k in zip(source.dilation, source.kernel_size, strict=True)]
    if any(total % 2 for total in reach):
        raise ValueError(
            f"{getattr(source, 'qualified_name', 'Conv2d')}: padding='same' with an even kernel "
            "pads unequally, which a BPU does not; pad with a module before it"
        )
    return [total // 2 for total in reach]


def depthwise(x: Tensor, factor: Tensor, channels: int, offset: Tensor | None, name: str) -> Tensor:
    """int32 accumulators of one factor and offset per channel."""
    weight = factor.reshape(-1, 1, 1, 1)
    two, none = [1, 1], [0, 0]
    return ops.conv(x, weight, offset, two, none, two, channels, False, none, name)
