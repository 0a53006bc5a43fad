"""A clip whose ends can learn."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.autograd import Function

Bound = float | Tensor | np.ndarray[Any, Any] | np.floating[Any]


def clip(inputs: Tensor, clip_value_min: Tensor, clip_value_max: Tensor) -> Tensor:
    """Clip to [min, max]; the ends get the gradients of what they cut off.

    The gradient of PACT (arXiv 1805.06085): values strictly inside pass theirs on, values at or
    above the upper end give theirs to it, values at or below the lower end to that one.
    """
    outputs: Tensor = _Clip.apply(inputs, clip_value_min, clip_value_max)
    return outputs


class Clip(nn.Module):
    """`clip` with its two ends as parameters or constants, as ``pytorch_quantization.nn.Clip``.

    Args:
        clip_value_min: Lower end.
        clip_value_max: Upper end.
        learn_min: Make the lower end a parameter; it must be one value.
        learn_max: Make the upper end a parameter; it must be one value.

    Raises:
        ValueError: A learned end of more than one value.

    Examples:
        >>> import torch
        >>> Clip(-1.0, 1.0, learn_max=True)(torch.tensor([0.5, 3.0])).tolist()
        [0.5, 1.0]
    """

    def __init__(
        self,
        clip_value_min: Bound,
        clip_value_max: Bound,
        learn_min: bool = False,
        learn_max: bool = False,
    ) -> None:
        super().__init__()
        self.clip_value_min = _end(clip_value_min, learn_min)
        self.clip_value_max = _end(clip_value_max, learn_max)

    def forward(self, inputs: Tensor) -> Tensor:
        """Clip `inputs`."""
        low, high = (
            end if isinstance(end, Tensor) else torch.tensor(end, device=inputs.device)
            for end in (self.clip_value_min, self.clip_value_max)
        )
        return clip(inputs, low, high)


def _end(value: Bound, learn: bool) -> Any:
    if not learn:
        return value
    tensor = torch.as_tensor(value, dtype=torch.float32).detach().clone()
    if tensor.numel() != 1:
        raise ValueError(f"a learned clip end must be one value, got shape {tuple(tensor.shape)}")
    return nn.Parameter(tensor)


class _Clip(Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, low: Tensor, high: Tensor) -> Tensor:
        ctx.save_for_backward(x, low, high)
        return torch.max(torch.min(x, high), low)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        grad = grads[0]
        x, low, high = ctx.saved_tensors
        if (ctx.needs_input_grad[1] and low.numel() != 1) or (
            ctx.needs_input_grad[2] and high.numel() != 1
        ):
            raise ValueError(
                "learned clip ends must be one value each, got shapes "
                f"{tuple(low.shape)} and {tuple(high.shape)}"
            )
        above, below = x >= high, x <= low
        grad_low = grad_high = None
        if ctx.needs_input_grad[1]:
            grad_low = torch.where(below, grad, 0.0).sum().to(low.dtype).reshape(low.shape)
        if ctx.needs_input_grad[2]:
            grad_high = torch.where(above, grad, 0.0).sum().to(high.dtype).reshape(high.shape)
        return torch.where(above | below, 0.0, grad), grad_low, grad_high
