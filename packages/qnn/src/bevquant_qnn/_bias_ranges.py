"""Weight ranges wide enough for the bias, which integers add to the accumulator in its steps.

Folding a batch norm leaves channels whose weights are next to nothing and whose bias is not, as the
dead filters of many a trained ResNet's first layer. Such a bias may be more than 2³¹ steps s_x·s_w.
"""

from __future__ import annotations

from typing import Any

import torch

from bevquant_quantizers import TensorQuantizer

_MOST_STEPS = 2.0**30  # half of int32: the other half is for the products
_SMALLEST = 2.0**-24  # a range that is no larger counts as zero


class FitsBias:
    """Mixin of quantized layers: the method that `bevquant_quantizers.calibrate` calls."""

    bias: Any
    _input_quantizer: TensorQuantizer
    _weight_quantizer: TensorQuantizer

    def settle_ranges(self) -> None:
        r"""Widen the weight's range, channel by channel, until the bias is at most 2³⁰ steps.

        .. math:: a_w \leftarrow a_w \max\left(1, \frac{|b|}{2^{30} s_x s_w}\right)

        What such a channel's weights lose is, for each product, less than 127²/2³⁰ = 1.5·10⁻⁵ of
        its bias. Channels of zeros keep their range, and so does a layer without a bias, in FP8 or
        blocks (which add the bias in float), or one of whose ranges is off, learned, not known yet,
        or not of output channels.

        Example:
            >>> from bevquant_qnn import QuantLinear
            >>> layer = QuantLinear(1, 2)
            >>> layer.bias.data[:] = 1
            >>> layer.input_quantizer.amax = 1.27
            >>> layer.weight_quantizer.amax = [[127e-6], [127e-9]]  # 10⁸ and 10¹¹ steps
            >>> layer.settle_ranges()
            >>> [f"{float(amax):.4g}" for amax in layer.weight_quantizer.amax]
            ['0.000127', '1.183e-05']
        """
        read, weight = self._input_quantizer, self._weight_quantizer
        if self.bias is None or not isinstance(weight.num_bits, int):
            return
        if not (_has_range(read) and _has_range(weight)):
            return
        amax: Any = weight.amax
        size = self.bias.detach().double().abs()
        if amax.numel() not in (1, size.numel()):
            return  # not of output channels
        size = size.amax() if amax.numel() == 1 else size.reshape(amax.shape)
        steps = size / (_step(read) * _step(weight))
        wide = (steps > _MOST_STEPS) & (amax > _SMALLEST)
        if bool(wide.any()):
            weight.amax = torch.where(wide, amax.double() * (steps / _MOST_STEPS), amax)


def _has_range(quantizer: TensorQuantizer) -> bool:
    amax = None if quantizer._disabled or quantizer._learn_amax else quantizer.amax
    return amax is not None and bool((amax > _SMALLEST).any())


def _step(quantizer: TensorQuantizer) -> Any:
    step: Any = quantizer.step_size
    return step.detach().double()
