r"""Fake quantization with a scale and a zero point, in ONNX's arithmetic.

.. math:: y = \bigl(\operatorname{clamp}(\operatorname{round}(x/s) + z, q_\min, q_\max) - z\bigr)\,s
              = \operatorname{clamp}(\operatorname{round}(x/s), q_\min - z, q_\max - z)\,s

The second form has no zero point: the integers q − z are symmetric ones with other bounds. Of FP8,
y = FP8(x/s)·s, as ONNX has it with ``saturate=1``.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ._descriptor import QuantDescriptor
from ._format import format_of
from .nn import TensorQuantizer


@torch.library.custom_op("bevquant_quantizers::fake_quantize_affine", mutates_args=())
def _operator(x: Tensor, step: Tensor, low: Tensor, high: Tensor, exponent_bits: int = 0) -> Tensor:
    """``clamp(round(x / step), low, high) · step``, half to even, in float32; or FP8 numbers."""
    if exponent_bits:
        return format_of((exponent_bits, 7 - exponent_bits)).rounded(x / step).mul_(step)
    return torch.clamp((x / step).round_(), low, high).mul_(step)


@_operator.register_fake
def _(x: Tensor, step: Tensor, low: Tensor, high: Tensor, exponent_bits: int = 0) -> Tensor:
    return torch.empty_like(x)


class AffineQuantizer(TensorQuantizer):
    """A `TensorQuantizer` of a fixed scale and zero point: ONNX's Quantize- and DequantizeLinear.

    y = (clamp(round(x/s) + z, q_min, q_max) − z)·s in float32, round half to even. The range cannot
    be calibrated or trained; there is no gradient.

    Args:
        scale: s, a number or a tensor that broadcasts to the tensor to quantize, as [C, 1, 1] for
            the channels of a map.
        zero_point: z, likewise.
        qmin: Smallest stored integer: −128 of int8, 0 of uint8.
        qmax: Largest stored integer.
        float_bits: (4, 3) for FP8 E4M3 or (5, 2) for E5M2, in place of integers and zero point.

    Attributes:
        step: s as float32.
        low: q_min − z.
        high: q_max − z.

    Raises:
        ValueError: A scale is not positive and finite, or a zero point is no stored integer.

    Example:
        >>> quantizer = AffineQuantizer(0.5, zero_point=3, qmin=0, qmax=255)
        >>> quantizer(torch.tensor([-9.0, 0.3, 200.0]))
        tensor([ -1.5000,   0.5000, 126.0000])
    """

    step: Tensor
    low: Tensor
    high: Tensor

    def __init__(
        self,
        scale: Tensor | float,
        zero_point: Tensor | int = 0,
        qmin: int = -128,
        qmax: int = 127,
        float_bits: tuple[int, int] | None = None,
    ) -> None:
        if float_bits is not None:
            qmax = int(format_of(float_bits).high)
            qmin = -qmax
        step = torch.as_tensor(scale, dtype=torch.float32).clone()
        zero = torch.as_tensor(zero_point, dtype=torch.float32).expand_as(step)
        tiny = torch.finfo(torch.float32).tiny
        if not bool(((step >= tiny) & step.isfinite()).all()):
            raise ValueError(
                f"AffineQuantizer: scale {step.flatten().tolist()[:4]}: expected normal, positive "
                "and finite numbers; calibrate the range again"
            )
        if not bool(((zero >= qmin) & (zero <= qmax)).all()):
            raise ValueError(f"AffineQuantizer: zero points must be within {qmin}…{qmax}")
        if step.numel() == 1:
            step, zero = step.reshape(()), zero.reshape(())
        axis = tuple(i - step.dim() for i, n in enumerate(step.shape) if n != 1) or None
        low, high = qmin - zero, qmax - zero
        # One bit more where a zero point makes the bounds lopsided: 0…255 are nine signed bits.
        most = int(torch.maximum(-low - 1, high).max())
        bits = max(2, 1 + most.bit_length())
        super().__init__(QuantDescriptor(num_bits=8, axis=axis, calib_method=None))
        self._num_bits, self._narrow_range = float_bits or bits, False
        for name, value in {"step": step, "low": low, "high": high}.items():
            self.register_buffer(name, value)
        self.register_buffer("_amax", step * torch.maximum(-low, high))

    def _store_range(self, amax: Tensor) -> None:
        raise ValueError(f"{self._who()}: an AffineQuantizer's scale is fixed; make another one")

    def _quant_forward(self, inputs: Tensor) -> Tensor:
        exponent = self._num_bits[0] if isinstance(self._num_bits, tuple) else 0
        made: Tensor = _operator(inputs, self.step, self.low, self.high, exponent)
        return made

    def extra_repr(self) -> str:
        """Scale and bounds."""
        if self._disabled:
            return "disabled"
        low, high = int(self.low.min()), int(self.high.max())
        kind = "integers" if isinstance(self._num_bits, int) else format_of(self._num_bits).name
        return f"scale={self._short(self.step)} {kind}={low}…{high}"

    @staticmethod
    def _short(step: Tensor) -> str:
        if step.numel() == 1:
            return f"{float(step):.4g}"
        return f"[{float(step.min()):.4g}, {float(step.max()):.4g}]({step.numel()})"
