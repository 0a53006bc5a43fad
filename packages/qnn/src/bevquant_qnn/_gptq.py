"""Rounding a weight matrix so that errors in one column are made up for by the next (GPTQ)."""

from __future__ import annotations

import torch
from torch import Tensor

__all__ = ["gptq"]

_DAMPING = 0.01


def gptq(weight: Tensor, hessian: Tensor, step: Tensor, low: int, high: int) -> Tensor:
    """Round to the grid step · {low…high} with a small output error, not a small weight error.

    Minimises tr((Q − W)·H·(Q − W)ᵀ), H = E[p·pᵀ] over the layer's patches p, greedily: columns in
    the order of falling H_ii are rounded half to even one after the other, and each one's error is
    spread over those to come, w_j −= (w_i − q_i)/U_ii · U_ij, U the upper Cholesky factor of H⁻¹
    (Frantar et al. 2022, arXiv 2210.17323, algorithm 1 and section 3; optimal brain surgeon).

    Args:
        weight: float64 [out, in].
        hessian: float64 [in, in], symmetric, not negative.
        step: float64 [out, 1], the grid's step; 0 for a row of zeros.
        low: Least integer.
        high: Largest integer.

    Returns:
        Weights on the grid, float64 [out, in].
    """
    count = len(hessian)
    diagonal = hessian.diagonal()
    dead = diagonal <= 0
    spread = torch.diag(torch.where(dead, 1.0, 0.0) + _DAMPING * diagonal.mean().clamp(min=1e-30))
    order = diagonal.argsort(descending=True)
    damped = (hessian + spread)[order][:, order]
    inverse = torch.cholesky_inverse(torch.linalg.cholesky(damped))
    upper = torch.linalg.cholesky((inverse + inverse.T) / 2, upper=True)
    left, safe = weight[:, order].clone(), torch.where(step > 0, step, 1.0)
    rounded = torch.zeros_like(left)
    for i in range(count):
        column = left[:, i : i + 1]
        rounded[:, i : i + 1] = (column / safe).round().clamp(low, high) * step
        error = (column - rounded[:, i : i + 1]) / upper[i, i]
        left[:, i:] -= error * upper[i, i:]
    return rounded[:, order.argsort()]
