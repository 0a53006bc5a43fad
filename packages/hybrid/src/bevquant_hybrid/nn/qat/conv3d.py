"""Three-dimensional convolutions that train quantized."""

from __future__ import annotations

from torch import Tensor, nn

from bevquant_hybrid.nn.qat._weighted import Weighted

__all__ = [
    "Conv3d",
    "ConvAdd3d",
    "ConvAddReLU3d",
    "ConvAddReLU63d",
    "ConvReLU3d",
    "ConvReLU63d",
]


class Conv3d(Weighted, nn.Conv3d):
    """Convolution with a quantized weight and output."""

    def operate(self, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        """Convolve."""
        result: Tensor = self._conv_forward(x, weight, bias)
        return result


class ConvReLU3d(Conv3d, activation="relu"):
    """Convolution, ReLU."""


class ConvReLU63d(Conv3d, activation="relu6"):
    """Convolution, ReLU6."""


class ConvAdd3d(Conv3d, adds=True):
    """Convolution, addition of a second input."""


class ConvAddReLU3d(ConvAdd3d, activation="relu"):
    """Convolution, addition, ReLU."""


class ConvAddReLU63d(ConvAdd3d, activation="relu6"):
    """Convolution, addition, ReLU6."""
