"""Outputs of a layer from its accumulators: int32, requantized integers, or float32."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from bevquant_int8sim._quantize import check_arithmetic, dequantize, requantize
from bevquant_int8sim._rounding import check_rounding, fixed_point_multiplier
from bevquant_int8sim._scales import (
    along_axis,
    check_integer_tensor,
    checked_scale,
    integer_range,
    single_scale,
)

if TYPE_CHECKING:
    from bevquant_int8sim._tile_output import Requantization

_BITS = {torch.int8: 8, torch.int16: 16, torch.int32: 32}


@dataclass(frozen=True, eq=False)
class Output:
    """Checked settings of a layer's output; without a multiplier the accumulators themselves.

    With a residual the output is requantized, the residual added, and the sum requantized by
    `sum_multiplier`; the ReLU is behind the sum. With an addend the sum is rounded once:
    ``acc·multiplier + addend·addend_multiplier``.
    """

    multiplier: Tensor | None
    out_dtype: torch.dtype
    narrow_range: bool
    relu: bool
    rounding: str
    arithmetic: str
    name: str
    residual: Tensor | None = None
    sum_multiplier: float = 0.0
    addend: Tensor | None = None
    addend_multiplier: float = 0.0

    def finish(self, acc: Tensor, channel_axis: int = -1) -> Tensor:
        """Apply to int32 accumulators whose channels run along `channel_axis`."""
        if self.multiplier is None:
            return acc.clamp_(min=0) if self.relu else acc
        if self.out_dtype == torch.float32:
            values = dequantize(acc, self.multiplier, axis=channel_axis)
            return values.clamp_(min=0) if self.relu else values
        if self.addend is not None:
            factors = along_axis(self.multiplier, acc, channel_axis, self.name)
            total = acc.double() * factors + self.addend.double() * self.addend_multiplier
            low, high = integer_range(8, self.narrow_range)
            return total.round_().clamp_(0 if self.relu else low, high).to(torch.int8)
        if self.residual is None:
            return self._requantize(acc, self.multiplier, channel_axis, self.relu)
        q = self._requantize(acc, self.multiplier, channel_axis, False)
        total = q.to(torch.int32) + self.residual
        return self._requantize(total, self.sum_multiplier, channel_axis, self.relu)

    def _requantize(
        self, acc: Tensor, multiplier: Tensor | float, channel_axis: int, relu: bool
    ) -> Tensor:
        return requantize(
            acc,
            multiplier,
            axis=channel_axis,
            rounding=self.rounding,
            arithmetic=self.arithmetic,
            bits=_BITS[self.out_dtype],
            narrow_range=self.narrow_range,
            relu=relu,
            name=self.name,
        )

    def fused(self, padded_outputs: int) -> Requantization | None:
        """The same as the kernels apply it, where they can: int8, float64, half to even."""
        plain = (self.rounding, self.arithmetic) == ("half_even", "float64")
        if self.multiplier is None or self.out_dtype != torch.int8 or not plain:
            return None
        from bevquant_int8sim._tile_output import Requantization, Residual, full_rows

        factors = np.ones(padded_outputs)
        values = self.multiplier.cpu().numpy()
        factors[: values.size if values.ndim else padded_outputs] = values
        low, high = integer_range(8, self.narrow_range)
        start = 0 if self.relu else low
        if self.residual is None:
            return Requantization(factors, start, high)
        rows = full_rows(self.residual, padded_outputs)
        added = Residual(rows, self.sum_multiplier, start, high)
        return Requantization(factors, low, high, added)


def make_output(
    multiplier: Tensor | float | None,
    channels: int,
    /,
    *,
    out_dtype: torch.dtype = torch.int8,
    narrow_range: bool = False,
    relu: bool = False,
    rounding: str = "half_even",
    arithmetic: str = "float64",
    name: str,
    **unknown: Any,
) -> Output:
    """Check the settings of a layer with that many output channels."""
    if unknown:
        raise TypeError(f"{name}: unknown arguments {', '.join(sorted(unknown))}")
    check_rounding(rounding, f"{name}: rounding")
    check_arithmetic(arithmetic, f"{name}: arithmetic")
    if out_dtype not in (*_BITS, torch.float32):
        raise ValueError(
            f"{name}: out_dtype={out_dtype}: expected torch.int8, int16, int32 or float32"
        )
    factors = None
    if multiplier is not None:
        factors = checked_scale(multiplier, f"{name}: multiplier")
        if factors.dim() and factors.shape[0] != channels:
            raise ValueError(
                f"{name}: {factors.shape[0]} multipliers for {channels} output channels; give one "
                "per channel, or a single number"
            )
        if arithmetic == "fixed_point" and out_dtype != torch.float32:
            # Refuses what no mantissa and right shift express.
            fixed_point_multiplier(factors, name=name)
    return Output(factors, out_dtype, narrow_range, relu, rounding, arithmetic, name)


def with_addend(
    output: Output, addend: Tensor, multiplier: float, shape: tuple[int, ...], device: torch.device
) -> Output:
    """The same output with a tensor added before it is rounded."""
    name = output.name
    check_integer_tensor(name, "addend", addend, (torch.int8,))
    if tuple(addend.shape) != shape or addend.device != device:
        raise ValueError(
            f"{name}: expected an addend {list(shape)} on {device}, got {list(addend.shape)} on "
            f"{addend.device}"
        )
    plain = (output.rounding, output.arithmetic) == ("half_even", "float64")
    if output.multiplier is None or output.out_dtype != torch.int8 or not plain:
        raise ValueError(
            f"{name}: an addend needs a multiplier, out_dtype torch.int8, rounding 'half_even' and "
            "arithmetic 'float64'"
        )
    factor = single_scale(multiplier, f"{name}: addend_multiplier")
    return replace(output, addend=addend, addend_multiplier=factor)
