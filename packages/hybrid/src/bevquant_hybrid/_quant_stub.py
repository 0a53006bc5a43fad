"""Where quantized parts of a model begin and end."""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn
from torch.ao.quantization import DeQuantStub

__all__ = ["DeQuantStub", "QuantStub"]


class QuantStub(nn.Module):
    """Mark where float values become quantized ones; the identity in a float model.

    Args:
        scale: Value of one step, fixed (1/128 for pictures in [−1, 1)); None to observe it.
        zero_point: 0 or None.
        qconfig: Quantization settings of this stub alone.

    Raises:
        ValueError: A scale that is not positive, or another zero point.

    Example:
        >>> QuantStub(scale=1 / 128)
        QuantStub(scale=0.0078125)
    """

    def __init__(
        self, scale: float | None = None, zero_point: int | None = None, qconfig: Any = None
    ) -> None:
        super().__init__()
        if (scale is not None and not scale > 0) or zero_point:
            raise ValueError(
                f"QuantStub(scale={scale}, zero_point={zero_point}): expected a positive scale and "
                "zero point 0"
            )
        self.scale = scale
        self.zero_point = zero_point
        if qconfig is not None:
            self.qconfig = qconfig

    def forward(self, x: Tensor) -> Tensor:
        """Return the tensor."""
        return x

    def extra_repr(self) -> str:
        return "" if self.scale is None else f"scale={self.scale}"
