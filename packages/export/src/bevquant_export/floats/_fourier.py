"""Discrete Fourier transforms as products with matrices.

X[k] = s · Σₘ x[m] · exp(∓2πi · k·m / n) along one axis, one axis at a time; s by `norm`. ONNX's DFT
is of operator set 17, and TensorRT has none. n² products a line replace n · log₂ n: right for the
maps of a network. Transforms to or from real values hold the first n / 2 + 1 frequencies; the
inverse counts the others twice.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import partial
from types import MappingProxyType

import torch
from torch import Tensor

_LONGEST = 1024  # values of a line; the matrices have its square
_SHARES: dict[str, Callable[[int], float]] = {
    "backward": lambda n: 1.0, "ortho": lambda n: n**-0.5, "forward": lambda n: 1 / n,
}  # fmt: skip
_OPPOSITE = {"backward": "forward", "ortho": "ortho", "forward": "backward"}


def _transformed(
    inverse: bool,
    real: bool,
    every: int | Sequence[int] | None,
    x: Tensor,
    size: int | Sequence[int] | None = None,
    dim: int | Sequence[int] | None = None,
    norm: str | None = None,
) -> Tensor | None:
    """The transform along `dim`, or `every` axis where it is None."""
    sizes = [size] if isinstance(size, int) else size
    dim = every if dim is None else dim
    axes = [dim] if isinstance(dim, int) else list(dim or range(-len(sizes or x.shape), 0))
    lengths = [x.shape[axis] for axis in axes]
    if real and inverse:
        lengths[-1] = 2 * (lengths[-1] - 1)
    if sizes is not None:
        lengths = [n if given == -1 else given for n, given in zip(lengths, sizes, strict=True)]
    if max(lengths) > _LONGEST:
        return None
    norm = norm or "backward"
    share = _SHARES[_OPPOSITE[norm] if inverse else norm]
    parts = list(torch.view_as_real(x).unbind(-1)) if x.is_complex() else [x]
    lines = list(zip(axes, lengths, strict=True))
    for axis, n in lines if inverse else lines[::-1]:
        half = real and axis == axes[-1]
        parts = _along([p.movedim(axis % x.dim(), -1) for p in parts], n, share(n), inverse, half)
        parts = [part.movedim(-1, axis % x.dim()) for part in parts]
    return parts[0] if len(parts) == 1 else torch.view_as_complex(torch.stack(parts, -1))


def _along(parts: list[Tensor], n: int, share: float, inverse: bool, half: bool) -> list[Tensor]:
    """The last axis of real and imaginary parts; with `half`, values on one side are real."""
    kept = n // 2 + 1 if half else n
    rows = min(parts[0].shape[-1], kept if inverse else n)
    columns = range(n if inverse else kept)

    def matrix(wave: Callable[[float], float], sign: int) -> Tensor:
        twice = [2 if half and inverse and 0 < m < n - m else 1 for m in range(rows)]
        factors = [sign * share * count for count in twice]
        waves = [[wave(2 * math.pi * (k * m % n) / n) for k in columns] for m in range(rows)]
        return torch.tensor([[s * w for w in line] for s, line in zip(factors, waves, strict=True)])

    cos, sin = matrix(math.cos, 1), matrix(math.sin, 1 if inverse else -1)
    a, *imaginary = (part[..., :rows] for part in parts)
    if not imaginary:
        return [a @ cos, a @ sin]
    (b,) = imaginary
    made = a @ cos - b @ sin
    return [made] if half else [made, a @ sin + b @ cos]


FOURIER: MappingProxyType[str, Callable[..., Tensor | None]] = MappingProxyType(
    {
        f"fft_{'i' * inverse}{'r' * real}fft{suffix}": partial(_transformed, inverse, real, axes)
        for inverse in (False, True)
        for real in (False, True)
        for suffix, axes in (("", -1), ("2", (-2, -1)), ("n", None))
    }
)
"""Name of a function of torch → its form; None where a line is too long."""
