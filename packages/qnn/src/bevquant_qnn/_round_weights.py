"""Rounding of weights by the error of the layer's output, and bias correction, layer by layer."""

from __future__ import annotations

import copy
import math
from collections.abc import Iterable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any, Literal, get_args

import torch
from torch import Generator, Tensor, nn

from bevquant_graph import Forward, HtmlTable, checked_batches, evaluation, layer_class, on_batch
from bevquant_qnn._conv import QuantWeighted
from bevquant_qnn._linear_form import (
    grid_step,
    matrix_of,
    put_grid_step,
    put_matrix,
    sampled_patches,
)
from bevquant_qnn._sparse_convolution import QuantSparseConvolution
from bevquant_qnn._sparsity import is_2_4, mask_2_4, why_dense
from bevquant_quantizers import Format, TensorQuantizer, format_of, quantization_disabled

# Inputs of each layer, in the quantized model and in the float one, layer after layer.


# A BaseException, which no `except Exception` of a forward catches.
class _Reached(BaseException):
    """The layer was called; nothing after it is needed."""


def layers_called(model: nn.Module, forward: Forward, batch: Any) -> tuple[list[str], list[str]]:
    """Paths of layers with quantized weights: those called once, in order; and all others."""
    paths = {
        module: path
        for path, module in model.named_modules()
        if layer_class(module, QuantWeighted, QuantSparseConvolution) and _is_on(module)
    }
    called: list[str] = []
    with ExitStack() as stack:
        for module in paths:
            hook = module.register_forward_pre_hook(lambda m, _: called.append(paths[m]))
            stack.callback(hook.remove)
        forward(model, batch)
    once = [path for path in called if called.count(path) == 1]
    # Layers that are called several times have no one input.
    return once, [path for path in paths.values() if path not in once]


def input_of(module: nn.Module, model: nn.Module, forward: Forward, batch: Any) -> Any:
    """Run the model up to `module` and return the input that reaches it."""
    found: list[Any] = []

    def stop(_: nn.Module, args: Sequence[Any]) -> None:
        found.append(args[0])
        raise _Reached

    hook = module.register_forward_pre_hook(stop)
    try:
        forward(model, batch)
    except _Reached:
        pass
    finally:
        hook.remove()
    return found[0] if found else None


def _is_on(module: Any) -> bool:
    quantizer = module.weight_quantizer
    return (
        isinstance(quantizer, TensorQuantizer) and not quantizer._disabled and quantizer._if_quant
    )


Rounding = Literal["gptq", "nearest"]


@dataclass(frozen=True)
class RoundedLayer:
    """Result of `round_weights` for one layer.

    Attributes:
        path: Path in the model.
        nearest: Relative output error of rounding to nearest (bias corrected where requested):
            Σ(ΔW·p)²/Σ(W·p)² over the patches p of the layer's input.
        error: The same error now.
    """

    path: str
    nearest: float
    error: float


@dataclass(frozen=True)
class RoundingResult(HtmlTable):
    """Result of `round_weights`.

    Attributes:
        layers: In the order of their calls.
        skipped: (path, reason) of layers that were not changed.
    """

    layers: tuple[RoundedLayer, ...]
    skipped: tuple[tuple[str, str], ...]

    def __str__(self) -> str:
        lines = [f"{len(self.layers)} layers rounded; relative output error, nearest → now"]
        lines += [f"  {x.path}: {x.nearest:.2e} → {x.error:.2e}" for x in self.layers]
        lines += [f"  {path}: left, {reason}" for path, reason in self.skipped]
        return "\n".join(lines)


def round_weights(
    model: nn.Module,
    batches: Iterable[Any],
    *,
    rounding: Rounding = "gptq",
    correct_bias: bool = True,
    sparsity: bool = False,
    rows: int = 2048,
    forward: Forward | None = None,
) -> RoundingResult:
    """Choose the integers of all weights for the smallest error of layer outputs.

    Layers are processed in the order of their calls, dense and sparse; each reads the inputs that
    the quantized layers in front of it give.

    - ``rounding="gptq"`` minimises E‖(Q − W)·p‖² over patches p of the layer's input, column by
      column with error feedback (Frantar et al. 2022, arXiv 2210.17323). The weight parameter then
      holds grid values, which its quantizer does not change. ``"nearest"`` keeps the weights.
    - Below 8 bits and in FP8 GPTQ also chooses the weight's range, of each channel where channels
      have their own. Eleven shares of it, 0.5 to 1, are tried, of FP8 eight within an octave above
      it; after each, the step is fitted to the numbers k: s = wᵀHk / kᵀHk, H = E[p·pᵀ]. The least
      error counts. A range that is learned, that follows
      the weight or that several layers share stays, and no bias may exceed 2³⁰ steps.
    - ``correct_bias`` adds E[W·p] − E[Q·p̂] to the bias, p from the float model and p̂ from the
      quantized one: the mean shift by rounding (Nagel et al. 2019, arXiv 1906.04721, section 4.2,
      with batches in place of batch-norm statistics). A layer without bias gets none.

    - ``sparsity=True`` also sets two of four weights to zero along the input channels (`sparsify`):
      those of the least |w|·√E[p²] (Sun et al. 2023, arXiv 2306.11695). GPTQ's feedback then
      corrects the kept weights (Frantar and Alistarh 2023, arXiv 2301.00774, with this choice).
      Layers that are 2:4 sparse already keep their zeros in any case.

    At 8 bits the gain is small; at 4 bits most of the loss is recovered. Weights and biases are
    changed in place: keep a copy of the float model, and apply a plan first (`apply_precision`),
    because a layer that is set to float later keeps its rounded weights.

    Args:
        model: Calibrated, from `quantize_model`, batch norms folded.
        batches: Some hundred images, or a few LiDAR frames; they are kept in a list.
        rounding: Rounding of weights.
        correct_bias: Correct biases.
        sparsity: Make layers 2:4 sparse whose input channels are a multiple of 4.
        rows: Largest number of patches per layer and batch, drawn with a fixed seed.
        forward: Called as ``forward(model, batch)``; by default a tuple or list is spread over the
            arguments, a dict over the keywords, anything else is the only argument.

    Returns:
        Errors of each layer before and now, and the layers that were not changed.

    Raises:
        ValueError: No batches, an unknown rounding, a layer that a later batch does not reach, or
            an input that is not finite; the message names the layer.

    Example:
        >>> import torch
        >>> from torch import nn
        >>> from bevquant_quantizers import calibrate
        >>> from bevquant_qnn import QuantConfig, quantize_model
        >>> net, images = nn.Sequential(nn.Conv2d(3, 8, 3), nn.ReLU()), torch.randn(8, 3, 8, 8)
        >>> net = quantize_model(net, QuantConfig(weight_bits=4), images).model
        >>> report = calibrate(net, [images])
        >>> layer, = round_weights(net, [images]).layers
        >>> layer.error < layer.nearest
        True
    """
    if rounding not in get_args(Rounding):
        raise ValueError(f"round_weights: unknown rounding {rounding!r}; use 'gptq' or 'nearest'")
    # Gone through once for the means of the inputs, and once for each layer.
    kept = list(checked_batches(batches))
    if not kept:
        raise ValueError("round_weights: there were no batches; give some to round by")
    forward = on_batch(forward)
    # Keeps the float weights, as `model` is rounded in place.
    exact = copy.deepcopy(model)
    layers: list[RoundedLayer] = []
    # Inference tensors could not be trained or loaded later.
    with (
        torch.inference_mode(False), torch.no_grad(), evaluation(model), evaluation(exact),
        quantization_disabled(exact),
    ):  # fmt: skip
        once, others = layers_called(model, forward, kept[0])
        skipped = [
            (path, "it is not called exactly once, so it has no one input") for path in others
        ]
        steps: dict[str, Tensor] = {}
        for path in once:
            try:
                steps[path] = grid_step(model.get_submodule(path))
            except ValueError as error:
                skipped.append((path, str(error)))
        means = _float_means(list(steps), exact, forward, kept, rows)
        for path, step in steps.items():
            moments = _moments(path, means[path], model, forward, kept, rows)
            layers.append(_round(path, model, step, moments, rounding, correct_bias, sparsity))
    return RoundingResult(tuple(layers), tuple(skipped))


@dataclass(frozen=True)
class _Moments:
    """Of patches [groups, rows, n]: means in float and quantized, E[p̂·p̂ᵀ]; float64."""

    mean: Tensor
    quantized_mean: Tensor
    second: Tensor


def _float_means(
    paths: Sequence[str], exact: nn.Module, forward: Forward, batches: Sequence[Any], rows: int
) -> dict[str, Tensor]:
    """Mean patch of every layer's input in the float model, float64 [groups, n], in one pass."""
    sums: dict[str, Tensor] = {}
    count: dict[str, int] = dict.fromkeys(paths, 0)
    for seed, batch in enumerate(batches):
        with ExitStack() as stack:
            for path in paths:

                def add(module: nn.Module, args: Any, path: str = path, seed: int = seed) -> None:
                    patches = _patches(module, args[0], rows, seed)
                    total = patches.sum(1)
                    sums[path] = sums[path] + total if path in sums else total
                    count[path] += patches.shape[1]

                hook = exact.get_submodule(path).register_forward_pre_hook(add)
                stack.callback(hook.remove)
            forward(exact, batch)
    return {path: total / max(1, count[path]) for path, total in sums.items()}


def _moments(
    path: str, mean: Tensor, model: nn.Module, forward: Forward, batches: Sequence[Any], rows: int
) -> _Moments:
    """Moments of one layer's input in the model whose layers before it are rounded already."""
    count = 0
    sums: list[Any] = [0, 0]
    module = model.get_submodule(path)
    for seed, batch in enumerate(batches):
        reached = input_of(module, model, forward, batch)
        if reached is None:
            raise ValueError(
                f"round_weights: {path} is called for the first batch and not for number {seed}; "
                "give batches that run the same layers"
            )
        rounded = _patches(module, reached, rows, seed)
        new = (rounded.sum(1), rounded.mT @ rounded)
        sums = [old + add for old, add in zip(sums, new, strict=True)]
        count += rounded.shape[1]
    quantized_mean, second = (total / max(1, count) for total in sums)
    if not bool(torch.isfinite(second).all()):
        raise ValueError(
            f"round_weights: the input of {path} is NaN or infinite; check the batches and ranges"
        )
    return _Moments(mean, quantized_mean, second)


def _patches(module: nn.Module, reached: Any, rows: int, seed: int) -> Tensor:
    """Patches of a layer's input, float64; one seed draws the same places in both models."""
    return sampled_patches(module, reached, rows, Generator().manual_seed(seed)).double()


def _round(
    path: str,
    model: nn.Module,
    steps: Tensor,
    moments: _Moments,
    rounding: str,
    correct_bias: bool,
    sparsity: bool,
) -> RoundedLayer:
    module: Any = model.get_submodule(path)
    corrects = correct_bias and module.bias is not None
    weight = matrix_of(module).double()
    form = _form(module)
    mask = _kept(module, weight, moments.second, sparsity)
    nearest = _numbers_at(steps, weight, form) * steps * mask
    centred = moments.second
    if corrects:
        # The bias takes up any shift, so only what varies counts.
        centred = centred - moments.quantized_mean[..., None] * moments.quantized_mean[:, None]
    chosen = nearest
    if rounding == "gptq":
        tried, least = _tried_steps(module, model, steps)
        found, fitted = _searched(module, weight, centred, tried, least, mask)
        # Greedy, it may lose to the nearest where inputs hardly hang together.
        if _power(found - weight, centred) < _power(nearest - weight, centred):
            chosen = found
            if len(tried) > 1:
                put_grid_step(module, fitted)  # in float32, so the grid is read again
                chosen = _numbers_at(fitted, found, form) * grid_step(module)
    if rounding == "gptq" or sparsity:
        put_matrix(module, chosen)
    if corrects:
        # So that the mean of the output is the float layer's.
        shift = weight @ moments.mean[..., None] - chosen @ moments.quantized_mean[..., None]
        module.bias.add_(shift.flatten().to(module.bias))
    power = _power(weight, moments.second)
    return RoundedLayer(
        path, _power(nearest - weight, centred) / power, _power(chosen - weight, centred) / power
    )


def _kept(module: Any, weight: Tensor, second: Tensor, sparsity: bool) -> Tensor:
    """Weights that may be other than zero, of the shape of `weight`."""
    # Its zeros stay zeros.
    if is_2_4(module):
        return weight != 0
    if not sparsity or why_dense(module):
        return torch.ones_like(weight, dtype=torch.bool)
    # A weight's part in the output, |w|·√E[p²], decides which ones go.
    size = weight.abs() * second.diagonal(dim1=1, dim2=2).clamp(min=0).sqrt()[:, None]
    kernel = math.prod(getattr(module, "kernel_size", (1,)))
    return mask_2_4(size.flatten(0, 1).unflatten(1, (-1, kernel))).view_as(weight)


def _form(module: Any) -> Format:
    quantizer = module.weight_quantizer
    return format_of(quantizer.num_bits, narrow_range=quantizer.narrow_range)


def _numbers_at(steps: Tensor, weight: Tensor, form: Format) -> Tensor:
    return form.rounded(weight / torch.where(steps > 0, steps, 1.0))


# Of the calibrated range, which is the largest weight: at 4 bits clipping it costs less than the
# coarser grid of the others.
_SHARES = torch.arange(10, 21, dtype=torch.float64) / 20
# FP8 numbers look alike an octave further, so clipping gains nothing.
_OCTAVE = 2 ** (torch.arange(8, dtype=torch.float64) / 8)


def _tried_steps(module: Any, model: nn.Module, steps: Tensor) -> tuple[Tensor, Tensor]:
    """Steps to try, [tries, *steps.shape], and the least that the bias allows, as `steps`."""
    quantizer = module.weight_quantizer
    owners = [m for m in model.modules() if m._modules.get("_weight_quantizer") is quantizer]
    # A range that is learned, or of several layers, is not this layer's to choose.
    own = None if quantizer._learn_amax or len(owners) > 1 else quantizer.amax
    exact = isinstance(quantizer.num_bits, int)
    if (exact and quantizer.num_bits >= 8) or own is None or own.numel() not in (1, steps.numel()):
        return steps[None], steps
    own, shares = own.clone(), (_SHARES if exact else _OCTAVE).to(steps)
    put_grid_step(module, steps * shares[0])
    # Wider where the bias would have too many steps.
    module.settle_ranges()
    least = grid_step(module)
    quantizer.amax = own
    return torch.maximum(steps * shares.view(-1, 1, 1, 1), least), least


def _searched(
    module: Any, weight: Tensor, hessian: Tensor, tried: Tensor, least: Tensor, kept: Tensor
) -> tuple[Tensor, Tensor]:
    """Round with each of the steps tried, [tries, groups, out, 1]; the best weights and steps."""
    form, tries = _form(module), len(tried)
    groups = [
        gptq(w.repeat(tries, 1), h, steps.reshape(-1, 1), form, free.repeat(tries, 1))
        for w, h, steps, free in zip(weight, hessian, tried.unbind(1), kept, strict=True)
    ]
    found = torch.stack([rows.unflatten(0, (tries, -1)) for rows in groups], 1)
    if tries == 1:
        return found[0], tried[0]
    one = module.weight_quantizer.amax.numel() == 1  # range for all channels

    def of_range(rows: Tensor) -> Tensor:
        total = rows.sum(-1, keepdim=True)
        return total.sum((1, 2), keepdim=True).expand_as(total) if one else total

    power = of_range((found @ hessian) * found)
    factor = of_range((found @ hessian) * weight) / power.clamp(min=1e-300)
    # Between 1 and the best factor each one is better than 1: the error is a parabola.
    factor = torch.where(power > 0, factor, 1.0).clamp(min=least / tried.clamp(min=1e-300))
    found, tried = found * factor, tried * factor
    best = of_range(((found - weight) @ hessian) * (found - weight)).argmin(0, keepdim=True)
    return found.take_along_dim(best, 0)[0], tried.take_along_dim(best, 0)[0]


def _power(matrix: Tensor, second: Tensor) -> float:
    return max(float(((matrix @ second) * matrix).sum()), 1e-300)


_DAMPING = 0.01  # of the mean diagonal, as in the paper below
_BLOCK = 128  # columns: what each changes at once stays in the cache


def gptq(
    weight: Tensor, hessian: Tensor, step: Tensor, form: Format, kept: Tensor | None = None
) -> Tensor:
    """Round to the grid step · numbers of a format with a small output error of the layer.

    Minimises tr((Q − W)·H·(Q − W)ᵀ), H = E[p·pᵀ] over the layer's patches p, greedily: columns in
    the order of falling H_ii are rounded half to even one after the other, and each one's error is
    spread over those to come, w_j −= (w_i − q_i)/U_ii · U_ij, U the upper Cholesky factor of H⁻¹
    (Frantar et al. 2022, arXiv 2210.17323, algorithm 1 and section 3; optimal brain surgeon).

    Args:
        weight: float64 [out, in].
        hessian: float64 [in, in], symmetric, not negative.
        step: float64 [out, 1], the grid's step; 0 for a row of zeros.
        form: Format of the numbers.
        kept: [out, in], False where the weight becomes 0; all by default.

    Returns:
        Weights on the grid, float64 [out, in].
    """
    count = len(hessian)
    diagonal = hessian.diagonal()
    # Inputs that are always 0: without a diagonal there is no factor.
    dead = diagonal <= 0
    spread = torch.diag(torch.where(dead, 1.0, 0.0) + _DAMPING * diagonal.mean().clamp(min=1e-30))
    order = diagonal.argsort(descending=True)
    damped = (hessian + spread)[order][:, order]
    inverse = torch.cholesky_inverse(torch.linalg.cholesky(damped))
    # The inverse is symmetric up to rounding only.
    upper = torch.linalg.cholesky((inverse + inverse.T) / 2, upper=True)
    left, safe = weight[:, order].clone(), torch.where(step > 0, step, 1.0)
    rounded = torch.zeros_like(left)
    free = torch.ones_like(left) if kept is None else kept[:, order]
    for start in range(0, count, _BLOCK):
        stop = min(start + _BLOCK, count)
        errors = torch.zeros_like(left[:, start:stop])
        for i in range(start, stop):
            at = slice(i, i + 1)
            rounded[:, at] = form.rounded(left[:, at] / safe) * step * free[:, at]
            errors[:, i - start] = (left[:, i] - rounded[:, i]) / upper[i, i]
            left[:, i:stop] -= errors[:, i - start, None] * upper[i, i:stop]
        # The columns behind the block take all of its errors in one product.
        left[:, stop:] -= errors @ upper[start:stop, stop:]
    return rounded[:, order.argsort()]
