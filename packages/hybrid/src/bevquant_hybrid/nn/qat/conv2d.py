"""Two-dimensional convolutions that train quantized."""

from __future__ import annotations

from torch import Tensor, nn

from bevquant_hybrid.nn.qat._weighted import Weighted

__all__ = [
    "Conv2d",
    "ConvAdd2d",
    "ConvAddReLU2d",
    "ConvAddReLU62d",
    "ConvReLU2d",
    "ConvReLU62d",
]


class Conv2d(Weighted, nn.Conv2d):
    """Convolution with a quantized weight and output."""

    def operate(self, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        """Convolve."""
        result: Tensor = self._conv_forward(x, weight, bias)
        return result


class ConvReLU2d(Conv2d, activation="relu"):
    """Convolution, ReLU."""


class ConvReLU62d(Conv2d, activation="relu6"):
    """Convolution, ReLU6."""


class ConvAdd2d(Conv2d, adds=True):
    """Convolution, addition of a second input."""


class ConvAddReLU2d(ConvAdd2d, activation="relu"):
    """Convolution, addition, ReLU."""


class ConvAddReLU62d(ConvAdd2d, activation="relu6"):
    """Convolution, addition, ReLU6."""
