r"""Layers whose input channels may have ranges of their own, folded into the weight.

With factors f of the input's channels, powers of two that the input's quantizer holds,

.. math:: y_o = b_o + \sum_c fq(x_c f_c) \, fq(w_{o,c} / f_c)

where kernel and groups change nothing: c is the channel that a weight meets. In float the factors
cancel to the last bit. Integers, scales and files are those of a layer with the weight w/f that
reads x·f, the product of float numbers by a constant vector.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor

from bevquant_quantizers import TensorQuantizer


class InputChannels:
    """Mixin: x·f, w/f, and the two methods by which `bevquant_quantizers.calibrate` finds f."""

    _input_quantizer: TensorQuantizer
    weight: Any

    def channels_of(self, input: Any) -> Tensor:
        """Return an input as [rows, channels, places]."""
        raise NotImplementedError

    def weight_by_channel(self) -> Tensor:
        """Return the weight as [groups, out/groups, in/groups, kernel], not divided by f."""
        raise NotImplementedError

    def _by_weight(self, factors: Tensor) -> Tensor:
        """Return f [in] in a shape that broadcasts to the stored weight."""
        raise NotImplementedError

    def times_factors(self, value: Tensor) -> Tensor:
        """Return x·f, where the input's channels have factors; x itself where they have none."""
        factors = self._input_quantizer.channel_factors
        if factors is None:
            return value
        return value * factors.to(value).reshape(-1, *[1] * self._axes_after())

    def quantized_input(self, value: Tensor) -> Tensor:
        """Return fq(x·f), for a sparse convolution of the features x."""
        result: Tensor = self._input_quantizer(self.times_factors(value))
        return result

    def _axes_after(self) -> int:
        """Axes of an input behind its channels."""
        return 0

    def weight_factors(self) -> Tensor | None:
        """Return f in a shape that broadcasts to the stored weight; None without factors."""
        factors = self._input_quantizer.channel_factors
        return None if factors is None else self._by_weight(factors.to(self.weight))
