"""Normalizations that torch has as functions, or over the last axes alone."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn


def normalized(
    x: Tensor, axes: list[int], eps: float, weight: Tensor | None, bias: Tensor | None
) -> Tensor:
    """(x − mean)/√(variance + ε)·weight + bias, both statistics over `axes`."""
    deviation = x - x.mean(axes, keepdim=True)
    variance = deviation.square().mean(axes, keepdim=True)
    result = deviation * torch.rsqrt(variance + eps)
    if weight is not None:
        result = result * weight
    return result if bias is None else result + bias


class LayerNorm(nn.LayerNorm):
    """`torch.nn.LayerNorm` that can normalize other axes than the last ones.

    Args:
        normalized_shape: Shape of weight and bias, which broadcast against the input from the
            right: ``[channels, 1, 1]`` for ``dim=1`` of ``[N, channels, height, width]``.
        eps: Added to the variance.
        elementwise_affine: Whether there are weight and bias.
        device: As in torch, like `dtype`.
        dtype: As in torch.
        dim: Axis or axes of the statistics; None for the last ones, as many as
            `normalized_shape` has, which is torch's layer norm.

    Example:
        >>> x = torch.arange(6.0).reshape(1, 3, 1, 2)
        >>> LayerNorm([3, 1, 1], dim=1)(x)[0, :, 0, 0].sum().abs().item() < 1e-5
        True
    """

    dim: int | tuple[int, ...] | None = None  # of torch's own, which has no such attribute

    def __init__(
        self,
        normalized_shape: int | Sequence[int],
        eps: float = 1e-5,
        elementwise_affine: bool = True,
        device: Any = None,
        dtype: Any = None,
        dim: int | Sequence[int] | None = None,
    ) -> None:
        shape = normalized_shape if isinstance(normalized_shape, int) else list(normalized_shape)
        super().__init__(shape, eps, elementwise_affine, device=device, dtype=dtype)
        self.dim = dim if dim is None or isinstance(dim, int) else tuple(dim)

    @property
    def axes(self) -> list[int]:
        """Axes of the statistics."""
        if self.dim is None:
            return [-1 - i for i in range(len(self.normalized_shape))]
        return [self.dim] if isinstance(self.dim, int) else list(self.dim)

    def forward(self, x: Tensor) -> Tensor:
        """Normalize."""
        if self.dim is None:
            return super().forward(x)
        return normalized(x, self.axes, self.eps, self.weight, self.bias)

    def extra_repr(self) -> str:
        given = super().extra_repr()
        return given if self.dim is None else f"{given}, dim={self.dim}"


class InverseNorm(nn.Module):
    r"""The function :math:`1 / \max(\sqrt{x}, \epsilon)` of a sum of squares."""

    def __init__(self, eps: float) -> None:
        super().__init__()
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        """Apply it to every element."""
        return x.clamp(min=0.0).sqrt().clamp(min=self.eps).reciprocal()


class Normalize(nn.Module):
    r"""`torch.nn.functional.normalize` with p = 2: :math:`x / \max(\lVert x \rVert_2, \epsilon)`.

    Args:
        dim: Axis or axes of the norm.
        eps: Smallest norm that is divided by.

    Example:
        >>> Normalize()(torch.tensor([[3.0, 4.0]]))
        tensor([[0.6000, 0.8000]])
    """

    def __init__(self, dim: int | Sequence[int] = 1, eps: float = 1e-12) -> None:
        super().__init__()
        self.dim, self.eps = dim, eps

    def forward(self, x: Tensor) -> Tensor:
        """Normalize."""
        dim: Any = self.dim
        return nn.functional.normalize(x, 2.0, dim, self.eps)

    def extra_repr(self) -> str:
        return f"dim={self.dim}, eps={self.eps}"


class RMSNorm(nn.RMSNorm):
    r"""`torch.nn.RMSNorm`: :math:`x / \sqrt{\overline{x^2} + \epsilon}\,w`.

    Example:
        >>> RMSNorm(2, eps=0.0)(torch.tensor([[3.0, 4.0]])).square().mean().round().item()
        1.0
    """
