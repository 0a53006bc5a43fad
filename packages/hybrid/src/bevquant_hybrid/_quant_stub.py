"""Start of a model's quantized part."""

from __future__ import annotations

from math import inf
from typing import Any

from torch import Tensor, nn
from torch.ao.quantization import DeQuantStub

__all__ = ["DeQuantStub", "QuantStub"]


class QuantStub(nn.Module):
    """Mark where float values are quantized; the identity in a float model.

    Args:
        scale: Value of one step, fixed (1/128 for pictures in [−1, 1)); None to observe it.
        zero_point: 0 or None.
        qconfig: Quantization settings of this stub alone.

    Raises:
        TypeError: The scale is not a number.
        ValueError: The scale is not positive, or the zero point is not 0.

    Example:
        >>> QuantStub(scale=1 / 128)
        QuantStub(scale=0.0078125)
    """

    def __init__(
        self, scale: float | None = None, zero_point: int | None = None, qconfig: Any = None
    ) -> None:
        super().__init__()
        self.scale = None if scale is None else self._number(scale)
        if (self.scale is not None and not 0 < self.scale < inf) or (zero_point not in (None, 0)):
            raise ValueError(
                f"QuantStub(scale={scale}, zero_point={zero_point}): expected a positive, finite "
                "scale and zero point 0"
            )
        self.zero_point = zero_point
        if qconfig is not None:
            self.qconfig = qconfig

    @staticmethod
    def _number(scale: Any) -> float:
        single = not isinstance(scale, str | bool)
        if isinstance(scale, Tensor):
            single = scale.numel() == 1
        try:
            if single:
                return float(scale)
        except (TypeError, ValueError):
            pass
        raise TypeError(
            f"QuantStub(scale={scale!r}): expected one number, such as 1 / 128, or None to have it "
            "observed; inputs of other scales need QuantStubs of their own"
        )

    def forward(self, x: Tensor) -> Tensor:
        """Return the tensor."""
        return x

    def extra_repr(self) -> str:
        return "" if self.scale is None else f"scale={self.scale}"
