r"""Fake quantization by blocks: MXFP8, MXFP4 and NVFP4, whose scales follow from the values.

Blocks of k consecutive values along one axis have a scale of their own. MX formats (OCP
Microscaling Formats specification 1.0, section 6.3) have k = 32 and powers of two:

.. math:: s = 2^{\lfloor \log_2 \max_i |x_i| \rfloor - e_\max}, \quad q_i = \mathrm{round}(x_i / s)

with e_max = 8 of E4M3 and 2 of E2M1, and s within 2⁻¹²⁷ … 2¹²⁷ (E8M0). NVFP4 has k = 16, a float32
scale t of the tensor and E4M3 scales of the blocks:

.. math:: t = \mathrm{amax} / (6 \cdot 448), \quad
          s = \mathrm{E4M3}\bigl(\max_i |x_i| / (6 t)\bigr) \text{ within } 2^{-9} \ldots 448, \quad
          q_i = \mathrm{round}(x_i / (s t))

Rounding is half to even in float32; beyond the largest number stands the largest number.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from ._format import format_of

_SMALLEST_SCALE = 2.0**-9  # of NVFP4: the smallest number of E4M3
_E8M0_BIAS = 127


@dataclass(frozen=True)
class Blocks:
    """A tensor as numbers of a format and scales.

    Attributes:
        numbers: float32, in the shape of the tensor.
        scales: Scales of the blocks, float32; ⌈n / k⌉ along the axis of the blocks.
        tensor_scale: t of NVFP4, float32 ``[]``; 1 of MX formats.
        axis: Axis of the blocks.
        block: k, values in a block; the last block may be shorter.
    """

    numbers: Tensor
    scales: Tensor
    tensor_scale: Tensor
    axis: int
    block: int

    def values(self) -> Tensor:
        """The floats: q · (s · t), float32."""
        steps = (self.scales * self.tensor_scale).repeat_interleave(self.block, self.axis)
        return self.numbers * steps.narrow(self.axis, 0, self.numbers.shape[self.axis])


def quantize_blocks(x: Tensor, num_bits: str, amax: Tensor | None = None, axis: int = -1) -> Blocks:
    """Numbers and scales of a tensor in a block format.

    A NaN makes its whole block NaN. An infinity becomes amax of NVFP4; of MX formats it has the
    largest scale, which leaves 0 of the block's other values.

    Args:
        x: Values, any shape, float; computed in float32.
        num_bits: ``"mxfp8"``, ``"mxfp4"`` or ``"nvfp4"``.
        amax: Largest absolute value of NVFP4, whose maximum counts; None for that of `x`. MX
            formats need none.
        axis: Axis of the blocks: that over which a product sums.

    Raises:
        TypeError: `x` is no tensor of floats.
        ValueError: Another format.

    Example:
        >>> made = quantize_blocks(torch.tensor([[0.3, -7.0, 100.0, 1e-3]]), "mxfp8")
        >>> made.scales.item(), made.numbers.tolist()
        (0.25, [[1.25, -28.0, 384.0, 0.00390625]])
    """
    if not isinstance(x, Tensor) or not x.is_floating_point():
        came = x.dtype if isinstance(x, Tensor) else type(x).__name__
        raise TypeError(f"quantize_blocks: expected a floating-point tensor, got {came}")
    form = format_of(num_bits)
    if not form.block:
        raise ValueError(f"num_bits={num_bits!r}: expected 'mxfp8', 'mxfp4' or 'nvfp4'")
    moved = x.detach().float().movedim(axis, -1)
    size = moved.shape[-1]
    parts = functional.pad(moved, (0, -size % form.block)).unflatten(-1, (-1, form.block))
    largest = parts.abs().amax(-1, keepdim=True)
    whole = torch.ones((), device=x.device)
    if form.scale == "e8m0":
        scales = _power_of_two(largest, int(torch.tensor(form.high).log2()))
    else:
        top = x.detach().abs().amax() if amax is None else amax.detach().amax()
        whole = top.float() / (form.high * torch.finfo(torch.float8_e4m3fn).max)
        whole = torch.where(whole > 0, whole, torch.ones_like(whole))
        wanted = largest / (form.high * whole)
        wanted = torch.where(wanted == 0, torch.ones_like(wanted), wanted)
        scales = format_of((4, 3)).rounded(wanted.clamp(min=_SMALLEST_SCALE))
    numbers = form.rounded(parts / (scales * whole)).flatten(-2)[..., :size]
    return Blocks(
        numbers.movedim(-1, axis), scales.squeeze(-1).movedim(-1, axis), whole, axis, form.block
    )


def _power_of_two(largest: Tensor, exponent: int) -> Tensor:
    """2^(⌊log₂ largest⌋ − exponent) as E8M0 has it; NaN of NaN."""
    power = torch.frexp(largest)[1] - 1
    power = torch.where(largest.isinf(), 128, power)
    power = torch.where(largest == 0, -_E8M0_BIAS, power - exponent)
    codes = power.clamp(-_E8M0_BIAS, _E8M0_BIAS) + _E8M0_BIAS
    codes = torch.where(largest.isnan(), 255, codes).to(torch.uint8)
    return codes.view(torch.float8_e8m0fnu).float()


def fake_quantize_blocks(
    x: Tensor, num_bits: str, amax: Tensor | None = None, axis: int = -1
) -> Tensor:
    r"""Round to the numbers of a block format and return to floating point.

    The gradient passes straight through; of NVFP4 where \|x\| ≤ amax.

    Args:
        x: As of `quantize_blocks`, like the other arguments.
        num_bits: The format.
        amax: Largest absolute value of NVFP4.
        axis: Axis of the blocks.

    Returns:
        A tensor shaped and typed as `x`.

    Raises:
        ValueError: Another format.

    Example:
        >>> fake_quantize_blocks(torch.tensor([0.3, -9.0, 100.0]), "mxfp4")
        tensor([ 0., -8., 96.])
    """
    if isinstance(x, Tensor) and amax is None:
        amax = x.detach().abs().amax()
    made: Tensor = _operator(x, amax, num_bits, axis)
    return made


@torch.library.custom_op("bevquant_quantizers::fake_quantize_blocks", mutates_args=())
def _operator(x: Tensor, amax: Tensor, num_bits: str, axis: int) -> Tensor:
    return quantize_blocks(x, num_bits, amax, axis).values().to(x.dtype).contiguous()


@_operator.register_fake
def _(x: Tensor, amax: Tensor, num_bits: str, axis: int) -> Tensor:
    return torch.empty_like(x, memory_format=torch.contiguous_format)


def _save(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    x, amax, num_bits, _ = inputs
    ctx.inside = None if format_of(num_bits).scale == "e8m0" else x.abs() <= amax.amax()


def _straight_through(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
    return (grad if ctx.inside is None else torch.where(ctx.inside, grad, 0.0)), None, None, None


_operator.register_autograd(_straight_through, setup_context=_save)
