"""The three losses of a TransFusion head, each a sum over its elements."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

__all__ = ["focal_loss", "gaussian_focal_loss", "l1_loss"]

ALPHA = 0.25


def gaussian_focal_loss(logits: Tensor, target: Tensor) -> Tensor:
    """Penalty-reduced focal loss of a heatmap, summed.

    −(1 − p)² ln p where the target y is 1, −p² (1 − y)⁴ ln(1 − p) elsewhere, p = σ(logit).
    CornerNet (Law and Deng 2018, equation 1), CenterNet (Zhou et al. 2019, equation 1). The
    logarithms are taken of the logits, so that p = 0 and p = 1 lose nothing; mit-bevfusion bounds p
    to [10⁻⁴, 1 − 10⁻⁴] instead.

    Args:
        logits: float, any shape.
        target: Same shape, from 0 to 1.

    Example:
        >>> import torch
        >>> loss = gaussian_focal_loss(torch.tensor([0.0, 0.0]), torch.tensor([1.0, 0.5]))
        >>> round(float(loss), 4)  # 0.25 ln 2 + 0.25 · 0.0625 ln 2
        0.1841
    """
    p = logits.sigmoid()
    positive = -((1 - p) ** 2) * F.logsigmoid(logits)
    negative = -(p**2) * (1 - target) ** 4 * F.logsigmoid(-logits)
    return torch.where(target == 1, positive, negative).sum()


def focal_loss(logits: Tensor, target: Tensor) -> Tensor:
    """Focal loss of independent classes, summed.

    −α (1 − p)² ln p where the target is 1, −(1 − α) p² ln(1 − p) where it is 0, p = σ(logit) and
    α = 0.25. RetinaNet (Lin et al. 2017, equation 5 with γ = 2).

    Args:
        logits: float, any shape.
        target: Same shape, 0 or 1.

    Example:
        >>> import torch
        >>> loss = focal_loss(torch.tensor([0.0, 0.0]), torch.tensor([1.0, 0.0]))
        >>> round(float(loss), 4)  # 0.25 · 0.25 ln 2 + 0.75 · 0.25 ln 2
        0.1733
    """
    p = logits.sigmoid()
    positive = -ALPHA * (1 - p) ** 2 * F.logsigmoid(logits)
    negative = -(1 - ALPHA) * p**2 * F.logsigmoid(-logits)
    return torch.where(target == 1, positive, negative).sum()


def l1_loss(predicted: Tensor, target: Tensor, weights: Tensor) -> Tensor:
    """Σ weight · |predicted − target| over the targets that are known.

    Args:
        predicted: float [objects, values].
        target: Same shape; NaN where not known, which then counts nothing.
        weights: float [values].

    Example:
        >>> import torch
        >>> nan = float("nan")
        >>> l1_loss(torch.zeros(1, 2), torch.tensor([[3.0, nan]]), torch.tensor([2.0, 1.0])).item()
        6.0
    """
    known = ~target.isnan()
    distance = (predicted - target.nan_to_num()).abs() * known
    return (distance * weights).sum()
