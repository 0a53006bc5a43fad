"""Two ways to prepare weights that bevquant_qnn does not ship, to hold its own against."""

from __future__ import annotations

import copy

import torch
from torch import Tensor, nn

from bevquant_quantizers import Format


@torch.no_grad()
def equalized(model: nn.Module, pairs: list[tuple[str, str]]) -> nn.Module:
    """Cross-layer equalization (Nagel et al. 2019, arXiv 1906.04721, section 4.1) of a copy.

    s_i = √(r1_i/r2_i) with r1_i the largest weight of output channel i of the first convolution
    and r2_i that of input channel i of the second; the first is divided by s, the second
    multiplied.
    """
    model = copy.deepcopy(model)
    for first, second in pairs:
        a, b = model.get_submodule(first), model.get_submodule(second)
        s = (a.weight.abs().amax((1, 2, 3)) / b.weight.abs().amax((0, 2, 3))).sqrt()
        s = torch.where((s > 0) & s.isfinite(), s, 1.0)
        a.weight /= s[:, None, None, None]
        a.bias /= s
        b.weight *= s[None, :, None, None]
    return model


def adaround(
    weight: Tensor, hessian: Tensor, step: Tensor, form: Format, _kept: Tensor | None = None,
    *, steps: int = 2000,
) -> Tensor:  # fmt: skip
    """AdaRound (Nagel et al. 2020, arXiv 2004.10568) of one layer, its linear output as target.

    Rectified sigmoid with ζ = 1.1, γ = −0.1, β from 20 to 2 after a fifth of the steps, Adam. The
    error E‖(Q − W)·p‖² is computed from E[p·pᵀ], so every step sees all patches.
    """
    step = torch.where(step > 0, step, 1.0)
    mean = (hessian.diagonal().mean() * step.square().mean()).clamp(min=1e-30)
    base = (weight / step).floor()
    share = (weight / step - base).clamp(0.001, 0.999)
    with torch.enable_grad():
        v = (-torch.log(1.2 / (share + 0.1) - 1)).float().requires_grad_()
        scale, h = step.float(), (hessian / mean).float()
        start, target = base.float(), weight.float()
        optimizer = torch.optim.Adam([v], lr=1e-2)
        for i in range(steps):
            soft = (torch.sigmoid(v) * 1.2 - 0.1).clamp(0, 1)
            error = (start + soft).clamp(form.low, form.high) * scale - target
            loss = ((error @ h) * error).sum()
            if i > 0.2 * steps:
                beta = 20 - 18 * (i / steps - 0.2) / 0.8
                loss = loss + 0.01 * (1 - (2 * soft - 1).abs() ** beta).sum()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
    up = (torch.sigmoid(v.detach()) * 1.2 - 0.1) >= 0.5
    return (base + up).clamp(form.low, form.high) * step
