"""Modules in place of functions, for models whose quantization goes by modules."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from bevquant_hybrid._sampling import sampling_places
from bevquant_hybrid.qtensor import as_float


class ElementwiseFunction(nn.Module):
    """Base of modules that apply one function to every element; quantized, a look-up table.

    Attributes:
        function: What is applied.
        jumps: Whether it jumps, so that its table must read what training reads, to the last bit.
    """

    function: ClassVar[Callable[..., Tensor]]
    jumps: ClassVar[bool] = False

    def __init_subclass__(
        cls, *, function: Callable[..., Tensor] | None = None, jumps: bool = False
    ) -> None:
        super().__init_subclass__()
        if function is not None:  # else it is inherited
            cls.function, cls.jumps = staticmethod(function), jumps

    def forward(self, x: Tensor) -> Tensor:
        """Apply the function."""
        return type(self).function(x)


class Acos(ElementwiseFunction, function=torch.acos):
    """Arc cosine, in radians."""


class Acosh(ElementwiseFunction, function=torch.acosh):
    """Inverse hyperbolic cosine."""


class Asin(ElementwiseFunction, function=torch.asin):
    """Arc sine, in radians."""


class Asinh(ElementwiseFunction, function=torch.asinh):
    """Inverse hyperbolic sine."""


class Atan(ElementwiseFunction, function=torch.atan):
    """Arc tangent, in radians."""


class Atanh(ElementwiseFunction, function=torch.atanh):
    """Inverse hyperbolic tangent."""


class Ceil(ElementwiseFunction, function=torch.ceil, jumps=True):
    """Smallest whole number not below."""


class Cos(ElementwiseFunction, function=torch.cos):
    """Cosine of radians."""


class Cosh(ElementwiseFunction, function=torch.cosh):
    """Hyperbolic cosine."""


class Erf(ElementwiseFunction, function=torch.erf):
    """Error function."""


class Exp(ElementwiseFunction, function=torch.exp):
    """Exponential.

    Example:
        >>> Exp()(torch.zeros(2))
        tensor([1., 1.])
    """


class Floor(ElementwiseFunction, function=torch.floor, jumps=True):
    """Largest whole number not above."""


class HardLog(ElementwiseFunction, function=torch.log):
    """Natural logarithm."""


class Reciprocal(ElementwiseFunction, function=torch.reciprocal):
    """1 / x."""


class Selu(ElementwiseFunction, function=F.selu):
    """Scaled exponential linear unit."""


class Sin(ElementwiseFunction, function=torch.sin):
    """Sine of radians."""


class Sinh(ElementwiseFunction, function=torch.sinh):
    """Hyperbolic sine."""


class Sqrt(ElementwiseFunction, function=torch.sqrt):
    """Square root."""


class Tan(ElementwiseFunction, function=torch.tan):
    """Tangent of radians."""


class Pow(nn.Module):
    """x to a constant exponent.

    Args:
        exponent: The exponent; None where each call gives it.

    Raises:
        ValueError: In a call, neither has one.
    """

    def __init__(self, exponent: float | None = None) -> None:
        super().__init__()
        self.exponent = exponent

    def forward(self, x: Tensor, exponent: float | None = None) -> Tensor:
        """Raise every element to the exponent."""
        power = self.exponent if exponent is None else exponent
        if power is None:
            raise ValueError("Pow: no exponent; give it to Pow(exponent) or to the call")
        return torch.pow(x, power)


class Interpolate(nn.Module):
    """`torch.nn.functional.interpolate` as a module.

    Args:
        size: Height and width of the output.
        scale_factor: Output size over input size, instead of `size`.
        mode: ``"nearest"`` or ``"bilinear"``.
        align_corners: As in torch.
        recompute_scale_factor: As in torch; a BPU needs True with a scale factor.

    Example:
        >>> Interpolate(scale_factor=2, recompute_scale_factor=True)(torch.ones(1, 1, 2, 2)).shape
        torch.Size([1, 1, 4, 4])
    """

    def __init__(
        self,
        size: Any = None,
        scale_factor: Any = None,
        mode: str = "nearest",
        align_corners: bool | None = None,
        recompute_scale_factor: bool | None = None,
    ) -> None:
        super().__init__()
        self.size = size
        self.scale_factor = scale_factor
        self.mode = mode
        self.align_corners = align_corners
        self.recompute_scale_factor = recompute_scale_factor

    def forward(self, x: Tensor) -> Tensor:
        """Resize."""
        return F.interpolate(
            x,
            self.size,
            self.scale_factor,
            self.mode,
            self.align_corners,
            self.recompute_scale_factor,
        )

    def extra_repr(self) -> str:
        given = f"size={self.size}" if self.size else f"scale_factor={self.scale_factor}"
        return f"{given}, mode={self.mode!r}"


class GridSample(nn.Module):
    r"""Read a map at places beside each point: :math:`y_{c,h,w} = x_{c,\,h + d_y,\,w + d_x}`.

    The grid holds displacements in pixels, (d_x, d_y) from each output point, where
    `torch.nn.functional.grid_sample` has places in [−1, 1]. Public documents do not say so; public
    client code subtracts each point's own coordinates and quantizes what is left to 16 bits.

    Args:
        mode: ``"bilinear"`` or ``"nearest"``.
        padding_mode: ``"zeros"`` or ``"border"``.

    Example:
        >>> x = torch.arange(4.0).reshape(1, 1, 1, 4)
        >>> to_the_right = torch.tensor([1.0, 0.0]).expand(1, 1, 4, 2)
        >>> GridSample()(x, to_the_right)
        tensor([[[[1., 2., 3., 0.]]]])
    """

    bpu_operator = "torch.nn.functional.grid_sample"

    def __init__(self, mode: str = "bilinear", padding_mode: str = "zeros") -> None:
        super().__init__()
        if mode not in ("bilinear", "nearest") or padding_mode not in ("zeros", "border"):
            raise ValueError(
                f"GridSample(mode={mode!r}, padding_mode={padding_mode!r}): expected 'bilinear' or "
                "'nearest', and 'zeros' or 'border'"
            )
        self.mode, self.padding_mode = mode, padding_mode

    def forward(self, x: Tensor, grid: Tensor) -> Tensor:
        """Sample ``[N, C, H, W]`` by displacements ``[N, H', W', 2]``."""
        places = sampling_places(as_float(grid), x.shape[2], x.shape[3])
        return F.grid_sample(x, places, self.mode, self.padding_mode, align_corners=False)

    def extra_repr(self) -> str:
        return f"mode={self.mode!r}, padding_mode={self.padding_mode!r}"
