"""Descriptors and functions, under the names of ``pytorch_quantization.tensor_quant``."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd import Function

from ._descriptor import QuantDescriptor, ScaledQuantDescriptor
from ._fake_quant import fake_quantize
from ._format import NumBits, format_of
from ._steps import SMALLEST_AMAX

__all__ = [
    "QUANT_DESC_8BIT_CONV1D_WEIGHT_PER_CHANNEL",
    "QUANT_DESC_8BIT_CONV2D_WEIGHT_PER_CHANNEL",
    "QUANT_DESC_8BIT_CONV3D_WEIGHT_PER_CHANNEL",
    "QUANT_DESC_8BIT_CONVTRANSPOSE1D_WEIGHT_PER_CHANNEL",
    "QUANT_DESC_8BIT_CONVTRANSPOSE2D_WEIGHT_PER_CHANNEL",
    "QUANT_DESC_8BIT_CONVTRANSPOSE3D_WEIGHT_PER_CHANNEL",
    "QUANT_DESC_8BIT_LINEAR_WEIGHT_PER_ROW",
    "QUANT_DESC_8BIT_PER_TENSOR",
    "QUANT_DESC_UNSIGNED_8BIT_PER_TENSOR",
    "QuantDescriptor",
    "ScaledQuantDescriptor",
    "fake_affine_tensor_quant",
    "fake_tensor_quant",
    "legacy_fake_tensor_quant",
    "tensor_quant",
]

QUANT_DESC_8BIT_PER_TENSOR = QuantDescriptor(num_bits=8)
QUANT_DESC_UNSIGNED_8BIT_PER_TENSOR = QuantDescriptor(num_bits=8, unsigned=True)
QUANT_DESC_8BIT_CONV1D_WEIGHT_PER_CHANNEL = QuantDescriptor(num_bits=8, axis=0)
QUANT_DESC_8BIT_CONV2D_WEIGHT_PER_CHANNEL = QuantDescriptor(num_bits=8, axis=0)
QUANT_DESC_8BIT_CONV3D_WEIGHT_PER_CHANNEL = QuantDescriptor(num_bits=8, axis=0)
QUANT_DESC_8BIT_LINEAR_WEIGHT_PER_ROW = QuantDescriptor(num_bits=8, axis=0)

# Axis 0 is what upstream says here; the output channels of a transposed convolution are axis 1.
QUANT_DESC_8BIT_CONVTRANSPOSE1D_WEIGHT_PER_CHANNEL = QuantDescriptor(num_bits=8, axis=0)
QUANT_DESC_8BIT_CONVTRANSPOSE2D_WEIGHT_PER_CHANNEL = QuantDescriptor(num_bits=8, axis=0)
QUANT_DESC_8BIT_CONVTRANSPOSE3D_WEIGHT_PER_CHANNEL = QuantDescriptor(num_bits=8, axis=0)


def fake_tensor_quant(
    inputs: Tensor,
    amax: Tensor,
    num_bits: NumBits = 8,
    unsigned: bool = False,
    narrow_range: bool = True,
) -> Tensor:
    """Fake-quantize under upstream's name: `tensor_quant` divided by its scale, in one step.

    bfloat16 is computed in float32: its own eight bits would move values by more than a step.

    Args:
        inputs: Values, any shape, float.
        amax: Range, a tensor that broadcasts to `inputs`.
        num_bits: Bits of the integer, sign included; (4, 3) or (5, 2) for FP8.
        unsigned: Use 0…2^num_bits − 1; a negative input is then an error.
        narrow_range: Leave out the most negative integer.

    Returns:
        A tensor shaped and typed as `inputs`; see `bevquant_quantizers.fake_quantize`.

    Examples:
        >>> import torch
        >>> fake_tensor_quant(torch.tensor([0.3, 9.0]), torch.tensor(1.27))
        tensor([0.3000, 1.2700])
    """
    if inputs.dtype == torch.bfloat16:
        wide = fake_quantize(inputs.float(), amax.float(), num_bits, unsigned, narrow_range)
        return wide.to(torch.bfloat16)
    return fake_quantize(inputs, amax, num_bits, unsigned, narrow_range)


legacy_fake_tensor_quant = fake_tensor_quant


def tensor_quant(
    inputs: Tensor,
    amax: Tensor,
    num_bits: NumBits = 8,
    unsigned: bool = False,
    narrow_range: bool = True,
) -> tuple[Tensor, Tensor]:
    r"""Quantize to integers and give the scale that leads back.

    .. math:: q = \operatorname{clamp}(\operatorname{round}(x s), q_\min, q_\max),
              \quad s = q_\max / \text{amax}

    As ``pytorch_quantization.tensor_quant.tensor_quant`` 2.1.3. Rounding is half to even, before
    the clamp to −127…127 (−128…127 with ``narrow_range=False``, 0…255 unsigned) for eight bits.
    float16 is computed in float32; so is bfloat16. The gradient passes where \|x\| ≤ amax.

    Args:
        inputs: Values, any shape, float.
        amax: Range, a tensor that broadcasts to `inputs`.
        num_bits: Bits of the integer, sign included; (4, 3) or (5, 2) for FP8.
        unsigned: Use 0…2^num_bits − 1; a negative input is then an error.
        narrow_range: Leave out the most negative integer.

    Returns:
        The integers (of FP8 its numbers) in the dtype of `inputs`, and the scale: q / scale is the
        value. The scale is 1 where amax is at most 2⁻²⁴; the integers are 0 there.

    Raises:
        TypeError: A negative input while unsigned.
        ValueError: A negative amax, or a scale that float16 cannot hold.

    Examples:
        >>> import torch
        >>> q, scale = tensor_quant(torch.tensor([0.5, -2.0]), torch.tensor(1.27))
        >>> q.tolist(), round(scale.item())
        ([50.0, -127.0], 100)
    """
    outputs: tuple[Tensor, Tensor] = _TensorQuant.apply(
        inputs, amax, num_bits, unsigned, narrow_range
    )
    return outputs


def fake_affine_tensor_quant(
    inputs: Tensor, min_range: Tensor, max_range: Tensor, num_bits: int = 8
) -> Tensor:
    """Fake-quantize between `min_range` and `max_range` with a zero point, per tensor.

    Scale and shift of gemmlowp, as upstream: step = (max − min) / (2^num_bits − 1), integers
    −2^(num_bits−1) … 2^(num_bits−1) − 1, rounding half to even. The gradient passes inside
    [min_range, max_range].

    Args:
        inputs: Values, any shape, float.
        min_range: Lower end, one value.
        max_range: Upper end, one value, above `min_range`.
        num_bits: Bits of the integer.

    Returns:
        A tensor shaped as `inputs`.

    Examples:
        >>> import torch
        >>> x = torch.tensor([0.0, 0.4, 9.0])
        >>> fake_affine_tensor_quant(x, torch.tensor(0.0), torch.tensor(2.55)).mul(100).round()
        tensor([  0.,  40., 255.])
    """
    outputs: Tensor = _FakeAffine.apply(inputs, min_range, max_range, num_bits)
    return outputs


class _TensorQuant(Function):
    @staticmethod
    def forward(
        ctx: Any, x: Tensor, amax: Tensor, num_bits: NumBits, unsigned: bool, narrow_range: bool
    ) -> tuple[Tensor, Tensor]:
        if unsigned and x.numel() and bool(x.min() < 0):
            raise TypeError("Negative values encountered in unsigned quantization.")
        if bool((amax < 0).any()):
            raise ValueError("Negative values in amax")
        ctx.save_for_backward(x.abs() <= amax)
        half = x.dtype in (torch.float16, torch.bfloat16)
        wide = x.float() if half else x
        amax = amax.float() if amax.dtype in (torch.float16, torch.bfloat16) else amax
        form = format_of(num_bits, unsigned, narrow_range)
        # A tensor over a tensor: a Python number over one is a reciprocal times the number.
        scale = torch.full((), form.high, dtype=torch.float32, device=amax.device) / amax
        dead = amax <= SMALLEST_AMAX
        q = form.rounded(wide * scale.masked_fill(dead, 0.0))
        scale = scale.masked_fill(dead, 1.0)
        if x.dtype == torch.float16 and scale.numel() and bool(scale.max() > 65504):
            raise ValueError(f"scale is too large for FP16 with amax={amax}")
        return q.to(x.dtype), scale.to(x.dtype)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        (inside,) = ctx.saved_tensors
        return torch.where(inside, grads[0], 0.0), None, None, None, None


class _FakeAffine(Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, min_range: Tensor, max_range: Tensor, num_bits: int) -> Tensor:
        ctx.save_for_backward((x <= max_range) & (x >= min_range))
        step = (max_range - min_range) / (2.0**num_bits - 1)
        low = -(2.0 ** (num_bits - 1))
        zero = torch.round(min_range / step) - low
        q = torch.clamp(torch.round(x / step) - zero, low, -low - 1)
        return (q + zero) * step

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        (inside,) = ctx.saved_tensors
        return torch.where(inside, grads[0], 0.0), None, None, None
