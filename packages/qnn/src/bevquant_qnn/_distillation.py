"""The loss that pulls a quantized model's outputs to the float model's."""

from __future__ import annotations

from typing import Any, Literal, get_args

import torch.nn.functional as F
from torch import Tensor

from bevquant_qnn._snapshots import float_tensors

Kind = Literal["kl", "mse"]


def distillation_loss(
    student: Any, teacher: Any, *, kind: Kind = "mse", temperature: float = 1.0, axis: int = 1
) -> Tensor:
    """Return how far the student's outputs are from the teacher's.

    - ``"kl"``, for class scores: T²·mean Σ p·(log p − log q), p and q the softmax of teacher and
      student over `axis` after division by T (Hinton et al. 2015, arXiv 1503.02531, section 2).
    - ``"mse"``, for heat maps, boxes and features: Σ(q − f)²/Σf² of each tensor, the reciprocal of
      its signal-to-noise ratio, so that maps of any size and unit weigh alike.

    Tensors are taken from nested tuples, lists and dicts, of sparse tensors the features; the mean
    over all pairs is returned. The teacher gets no gradient.

    Args:
        student: Outputs of the model in training.
        teacher: Outputs of the float model, of the same structure.
        kind: What to compare.
        temperature: T of ``"kl"``.
        axis: Axis of the classes for ``"kl"``.

    Raises:
        ValueError: Outputs of different shapes or without values, or an unknown kind.

    Example:
        >>> import torch
        >>> distillation_loss(torch.tensor([[1.0, 1.0]]), torch.tensor([[1.0, 2.0]]))
        tensor(0.2000)
    """
    if kind not in get_args(Kind) or not temperature > 0:
        raise ValueError(
            f"distillation_loss: kind must be 'kl' or 'mse' and temperature positive, got {kind!r} "
            f"and {temperature}"
        )
    own, others = (float_tensors(v) for v in (student, teacher))
    if not own or [t.shape for t in own] != [t.shape for t in others]:
        raise ValueError(
            f"distillation_loss: the student gives {[tuple(t.shape) for t in own]}, the teacher "
            f"{[tuple(t.shape) for t in others]}; both must give the same tensors, at least one"
        )
    losses = []
    for q, f in zip(own, (t.detach() for t in others), strict=True):
        if kind == "mse":
            power = f.square().sum().clamp(min=1e-12)
            losses.append((q - f).square().sum() / power)
        else:
            log_p, log_q = (F.log_softmax(t / temperature, axis) for t in (f, q))
            rows = f.numel() // f.shape[axis]
            divergence = (log_p.exp() * (log_p - log_q)).sum() / rows
            losses.append(temperature**2 * divergence)
    total: Tensor = sum(losses[1:], losses[0]) / len(losses)
    return total
