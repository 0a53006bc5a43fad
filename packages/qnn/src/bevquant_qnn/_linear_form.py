"""Any layer with weights as a matrix product: y = W·p, p a patch of its input."""

from __future__ import annotations

import copy
import math
from typing import Any

import torch
import torch.nn.functional as F
from torch import Generator, Tensor, nn

from bevquant_qnn._freeze import range_in_use
from bevquant_qnn._sparse_convolution import QuantSparseConvolution
from bevquant_quantizers import format_of
from bevquant_sparse import WeightLayout, conv_forward, permute_weight, set_weight


def matrix_of(module: Any) -> Tensor:
    """Return the weight as [groups, out/groups, in/groups · kernel], the input channel slowest."""
    return as_matrix(module, module.weight_to_quantize().detach())


def put_matrix(module: Any, matrix: Tensor) -> None:
    """Write a weight of the form of `matrix_of` into the layer's parameter, in place."""
    weight, own = _from_matrix(module, matrix).to(module.weight), module.weight
    factors = module.weight_factors()
    weight = weight if factors is None else weight * factors
    # `set_weight` makes a new parameter; optimizers hold the layer's own.
    if isinstance(module, QuantSparseConvolution):
        set_weight(module, weight, module.weight_layout)
        weight, module.weight = module.weight, own
    with torch.no_grad():
        own.copy_(weight)


def grid_step(module: Any) -> Tensor:
    """Return the distance between two weights on the grid, float64 [groups, out/groups, 1].

    Of FP8, whose numbers lie in unequal steps, the scale: amax / 448 of E4M3.
    """
    if isinstance(module.weight_quantizer.num_bits, str):
        raise ValueError("its weight has scales by block, which follow from the values")
    quantizer, weight = module.weight_quantizer, module.weight_to_quantize().detach()
    amax = range_in_use(quantizer, {quantizer: weight})
    assert amax is not None
    largest = as_matrix(module, amax.to(weight).expand_as(weight)).double()
    step: Tensor = largest / format_of(quantizer.num_bits).high
    if bool((step != step[..., :1]).any()):
        raise ValueError(
            f"the weight's ranges, shape {tuple(amax.shape)}, do not run along the output channels"
        )
    return step[..., :1]


def put_grid_step(module: Any, step: Tensor) -> None:
    """Write the ranges of steps of the form of `grid_step` into the weight's quantizer, in place.

    A range of several channels is the largest of theirs. The quantizer must have ranges.
    """
    quantizer, weight = module.weight_quantizer, module.weight_to_quantize()
    shape = quantizer.amax.shape
    largest = step * format_of(quantizer.num_bits).high
    full = _from_matrix(module, largest.expand_as(as_matrix(module, weight))).reshape(weight.shape)
    shared = [d for d in range(-full.dim(), 0) if -d > len(shape) or shape[d] == 1]
    quantizer.amax = full.amax(shared, keepdim=True).reshape(shape)


def sampled_patches(module: Any, x: Any, count: int, generator: Generator) -> Tensor:
    """Return up to `count` patches of the input, [groups, rows, in/groups · kernel].

    The input quantizer is applied here. Generators of one seed draw the same positions in two
    inputs of one shape.
    """
    if isinstance(module, QuantSparseConvolution):
        return _sparse_patches(module, x, count, generator)
    x = module.quantized_input(x)
    if isinstance(module, nn.Linear):
        rows: Tensor = x.reshape(-1, x.shape[-1])
        return rows[_drawn(len(rows), count, generator).to(x.device)][None]
    if x.dim() == module.weight.dim() - 1:
        x = x[None]
    return _dense_patches(module, x, count, generator)


def as_matrix(module: Any, weight: Tensor) -> Tensor:
    """Return a tensor of the shape that the weight is quantized in, in the form of `matrix_of`."""
    if isinstance(module, QuantSparseConvolution):
        full = permute_weight(
            weight, module.weight_layout, WeightLayout.KCRS, kernel_size=_kernel_size(module)
        )
        return full.reshape(1, len(full), -1)
    groups = getattr(module, "groups", 1)
    if isinstance(module, nn.modules.conv._ConvTransposeNd):
        split = weight.reshape(groups, module.in_channels // groups, -1, *module.kernel_size)
        return split.transpose(1, 2).flatten(2)
    return weight.reshape(groups, len(weight) // groups, -1)


def _from_matrix(module: Any, matrix: Tensor) -> Tensor:
    if isinstance(module, QuantSparseConvolution):
        size = _kernel_size(module)
        full = matrix[0].reshape(matrix.shape[1], -1, *size)
        return permute_weight(full, WeightLayout.KCRS, module.weight_layout, kernel_size=size)
    if isinstance(module, nn.modules.conv._ConvTransposeNd):
        groups, outputs = matrix.shape[:2]
        split = matrix.reshape(groups, outputs, -1, *module.kernel_size)
        return split.transpose(1, 2).reshape(module.weight.shape)
    return matrix.reshape(module.weight.shape)


def _kernel_size(module: Any) -> tuple[int, ...]:
    return tuple(int(size) for size in module.kernel_size)


def _drawn(total: int, count: int, generator: Generator) -> Tensor:
    if total <= count:
        return torch.arange(total)
    return torch.randperm(total, generator=generator)[:count].sort().values


def _dense_patches(module: Any, x: Tensor, count: int, generator: Generator) -> Tensor:
    """Gather the input under the kernel at drawn places of the output."""
    size, stride, dilation = module.kernel_size, module.stride, module.dilation
    transposed = isinstance(module, nn.modules.conv._ConvTransposeNd)
    if transposed:
        padding = module._output_padding(x, None, stride, module.padding, size, len(size), dilation)
        shape = [
            (n - 1) * s - 2 * p + d * (k - 1) + extra + 1
            for n, s, p, d, k, extra in zip(
                x.shape[2:], stride, module.padding, dilation, size, padding, strict=True
            )
        ]
    else:
        mode = "constant" if module.padding_mode == "zeros" else module.padding_mode
        x = F.pad(x, module._reversed_padding_repeated_twice, mode)
        shape = [
            (n - d * (k - 1) - 1) // s + 1
            for n, s, d, k in zip(x.shape[2:], stride, dilation, size, strict=True)
        ]
    drawn = _drawn(len(x) * math.prod(shape), count, generator)
    image, *places = torch.unravel_index(drawn, (len(x), *shape))
    rank = len(size)
    index: list[Tensor] = [image.reshape(-1, *[1] * rank)]
    inside = torch.ones(1, dtype=torch.bool)
    for axis, place in enumerate(places):
        taps = torch.arange(size[axis]) * dilation[axis]
        if transposed:
            # Output o meets input i through tap k where o = i·stride − padding + k·dilation.
            at = place[:, None] + module.padding[axis] - taps
            fits = (at % stride[axis] == 0) & (at >= 0)
            at = torch.div(at, stride[axis], rounding_mode="floor")
            fits &= at < x.shape[2 + axis]
            at = at.clamp(0, x.shape[2 + axis] - 1)
            inside = inside & fits.reshape(-1, *_along(axis, rank, size[axis]))
        else:
            at = place[:, None] * stride[axis] + taps
        index.append(at.reshape(-1, *_along(axis, rank, size[axis])))
    patches = x.movedim(1, -1)[tuple(i.to(x.device) for i in index)]
    patches = patches * inside.to(x.device)[..., None] if transposed else patches
    groups = module.groups
    # [rows, *kernel, channels] to [groups, rows, channels of the group · kernel]
    patches = patches.movedim(-1, 1).reshape(len(drawn), groups, -1)
    return patches.movedim(1, 0)


def _along(axis: int, rank: int, size: int) -> list[int]:
    return [size if i == axis else 1 for i in range(rank)]


def _sparse_patches(module: Any, x: Any, count: int, generator: Generator) -> Tensor:
    """Find the rows under each tap by a convolution of their numbers, then fetch those drawn."""
    size = _kernel_size(module)
    taps = math.prod(size)
    features: Tensor = module.quantized_input(x.features)
    # float64 holds every number; one channel in, one out for each tap.
    numbers = torch.arange(1, len(features) + 1, dtype=torch.float64, device=features.device)
    plain = copy.copy(module)
    plain.act_type, plain.in_channels, plain.out_channels = None, 1, taps
    # A tap meets one row of an output or none, so a number comes out as it went in, or 0.
    moved = conv_forward(
        plain,
        x,
        features=numbers[:, None],
        weight=torch.eye(taps, dtype=torch.float64, device=features.device).view(taps, 1, *size),
        layout=WeightLayout.KCRS,
        bias=None,
    )
    drawn = _drawn(len(moved.features), count, generator).to(features.device)
    # Number 0, where a tap meets no row, is a row of zeros.
    padded = torch.cat([features.new_zeros(1, features.shape[1]), features])
    fetched = padded[moved.features[drawn].long()]
    return fetched.transpose(1, 2).flatten(1)[None]
