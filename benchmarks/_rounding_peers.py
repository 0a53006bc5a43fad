"""Ways to prepare weights that bevquant_qnn does not ship, to hold its own against."""

from __future__ import annotations

import copy
from collections.abc import Iterable
from contextlib import ExitStack
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call

from bevquant_graph import Forward, on_batch
from bevquant_qnn._linear_form import _from_matrix, grid_step, matrix_of
from bevquant_qnn._round_weights import input_of, layers_called
from bevquant_quantizers import Format, format_of, quantization_disabled


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


def reconstruct(
    model: nn.Module, exact: nn.Module, path: str, batches: Iterable[Any],
    *, forward: Forward | None = None, steps: int = 600, count: int = 16,
) -> None:  # fmt: skip
    """BRECQ (Li et al. 2021, arXiv 2102.05426) of one block, in place: all its layers at once.

    AdaRound's rounding of the weights, and the biases, by the squared error of the block's output
    from quantized inputs against the float model's. The Fisher weights of section 3.3 are left out.
    It begins with the numbers that the weights have, the nearest or GPTQ's. Each weight keeps its
    number or takes the next one in the direction of its float value.

    Args:
        model: The quantized model, the blocks upstream done.
        exact: The float model.
        path: Of the block in both models, from one tensor to one.
        batches: Of the models' inputs.
        forward: As of `round_weights`.
        steps: Of Adam.
        count: Samples in each step.
    """
    run, batches = on_batch(forward), list(batches)
    block, wanted = model.get_submodule(path), exact.get_submodule(path)
    with torch.no_grad():
        x = torch.cat([input_of(block, model, run, batch) for batch in batches])
        inputs = [input_of(wanted, exact, run, batch) for batch in batches]
        target = torch.cat([wanted(part) for part in inputs])
        parts = zip(x.split(count), target.split(count), strict=True)
        error = sum(float((block(a) - b).square().sum()) for a, b in parts) / len(x)
        once = layers_called(block, run, x[:1])[0]
    layers = {f"{name}." if name else "": block.get_submodule(name) for name in once}
    grids: dict[str, tuple[Tensor, Tensor, Format]] = {}
    free, biases = {}, {}
    for name, layer in layers.items():
        step = _from_matrix(layer, grid_step(layer).expand_as(matrix_of(layer)))
        form = format_of(layer.weight_quantizer.num_bits)
        float_numbers = wanted.get_parameter(f"{name}weight").detach() / step
        now = form.rounded(layer.weight.detach() / step)
        base = torch.where(float_numbers < now, now - 1, now)
        share = (float_numbers - base).clamp(0.001, 0.999)
        share = torch.where(now > base, share.clamp(min=0.51), share.clamp(max=0.49))
        grids[name] = base.float(), step.float(), form
        free[name] = (-torch.log(1.2 / (share + 0.1) - 1)).float().requires_grad_()
        if layer.bias is not None:
            biases[f"{name}bias"] = layer.bias.detach().clone().requires_grad_()

    def soft() -> dict[str, Tensor]:
        return {name: (v.sigmoid() * 1.2 - 0.1).clamp(0, 1) for name, v in free.items()}

    def parameters(shares: dict[str, Tensor]) -> dict[str, Tensor]:
        weights = {
            f"{name}weight": (base + shares[name]).clamp(form.low, form.high) * step
            for name, (base, step, form) in grids.items()
        }
        return weights | biases

    # The error at the start costs as much as a twelfth of a step² of each weight.
    factor = sum(v.numel() for v in free.values()) / 12 / max(error, 1e-30)
    groups = [{"params": [*free.values()], "lr": 3e-2}, {"params": [*biases.values()], "lr": 1e-3}]
    optimizer = torch.optim.Adam(groups)
    generator = torch.Generator().manual_seed(0)
    with ExitStack() as stack:
        for layer in layers.values():
            stack.enter_context(quantization_disabled(layer.weight_quantizer))
        for i in range(steps):
            drawn, shares = torch.randperm(len(x), generator=generator)[:count], soft()
            output = functional_call(block, parameters(shares), (x[drawn],))
            loss = factor * (output - target[drawn]).square().sum() / len(drawn)
            if i > 0.2 * steps:
                beta = 20 - 18 * (i / steps - 0.2) / 0.8
                open_shares = [(1 - (2 * s - 1).abs() ** beta).sum() for s in shares.values()]
                loss = loss + torch.stack(open_shares).sum()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
    with torch.no_grad():
        hard = {name: (share >= 0.5).float() for name, share in soft().items()}
        for name, value in parameters(hard).items():
            block.get_parameter(name).copy_(value)
