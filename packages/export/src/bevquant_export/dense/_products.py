"""Sums of products of a layer: exactly at single places, and how far float32's may be off."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional

from bevquant_export.dense._graph import Array
from bevquant_export.dense._source import Integers, Step

LAYERS = ("conv", "conv_transpose", "linear")
UNIT = 2.0**-24  # largest relative error of one rounding to float32


def products_at(step: Step, x: Array, places: Array) -> tuple[Array, Array, Array, int]:
    """What a layer's kernel sums up for some of its outputs.

    Written for few places: nothing is computed for the others, and neither the simulator's kernels
    nor a runtime's take part.

    Args:
        step: A convolution, a transposed one or a linear layer.
        x: Integers that it reads.
        places: Indices into its output, int [places, axes].

    Returns:
        Σ x·w, Σ |x·w| and Σ (x·w)², int64 [places], and how many products a sum has at most.
    """
    weight = step.tensors["weight"].cpu().numpy()
    if step.op == "linear":
        picked = x[tuple(places[:, :-1].T)].astype(np.int64) * weight[places[:, -1]]
        return picked.sum(1), np.abs(picked).sum(1), (picked**2).sum(1), weight.shape[1]
    first, out = places[:, :1], places[:, 1]
    groups: int = step.attributes["groups"]
    transposed = step.op == "conv_transpose"
    # Channels that an output reads: those of its group.
    each = weight.shape[0] // groups if transposed else weight.shape[1]
    outputs = weight.shape[1] if transposed else weight.shape[0] // groups
    channels = (out // outputs)[:, None] * each + np.arange(each)
    total, size, squares = (np.zeros(len(places), np.int64) for _ in range(3))
    for offset in np.ndindex(*weight.shape[2:]):
        at, inside = _read_at(step, places[:, 2:], np.asarray(offset), np.asarray(x.shape[2:]))
        values = x[(first, channels, *(axis[:, None] for axis in at.T))].astype(np.int64)
        if transposed:
            factors = weight[(channels, (out % outputs)[:, None], *offset)]
        else:
            factors = weight[(out, slice(None), *offset)]
        terms = values * factors * inside[:, None]
        total += terms.sum(1)
        size += np.abs(terms).sum(1)
        squares += (terms**2).sum(1)
    return total, size, squares, each * math.prod(weight.shape[2:])


def _read_at(step: Step, places: Array, offset: Array, sizes: Array) -> tuple[Array, Array]:
    """Where the kernel's entry `offset` reads for each output, and whether that is in the input."""
    attributes: Any = step.attributes
    stride, dilation = np.asarray(attributes["stride"]), np.asarray(attributes["dilation"])
    if step.op == "conv":
        before = np.asarray([low for low, _ in attributes["padding"]])
        at = places * stride - before + offset * dilation
        inside = np.ones(len(places), bool)
    else:
        shifted = places + np.asarray(attributes["padding"]) - offset * dilation
        at, inside = shifted // stride, (shifted % stride == 0).all(1)
    inside &= ((at >= 0) & (at < sizes)).all(1)
    return np.clip(at, 0, sizes - 1), inside


def deviations(step: Step, x: Tensor, form: Integers, made: object) -> Tensor:
    r"""How far float32 sums of a layer spread about the exact ones, for every output.

    .. math:: \sqrt n\, 2^{-24} \sum_i |x_i w_i|

    which is a fourth of what `Ties` allows a sum of n products; the bias is one of these.

    Args:
        step: A convolution, a transposed one or a linear layer.
        x: Integers that it reads.
        form: Theirs.
        made: The form of what it makes.

    Returns:
        Standard deviations, float32, of the output's shape.
    """
    weight, attributes = step.tensors["weight"].float().abs(), step.attributes
    size = x.float().abs()  # of -128 too
    terms = math.prod(weight.shape[1:])
    if step.op == "linear":
        sums = functional.linear(size, weight)
    elif step.op == "conv":
        sides = [side for pair in reversed(attributes["padding"]) for side in pair]
        convolution: Any = getattr(functional, f"conv{weight.dim() - 2}d")
        settings = {name: attributes[name] for name in ("stride", "dilation", "groups")}
        sums = convolution(functional.pad(size, sides), weight, **settings)
    else:
        terms = math.prod(weight.shape) // weight.shape[1] // attributes["groups"]
        names = "stride padding output_padding dilation groups".split()
        settings = {name: attributes[name] for name in names}
        sums = functional.conv_transpose2d(size, weight, **settings)
    unit = torch.from_numpy(per_channel(step, form, made).copy())
    beside = (1,) * (0 if step.op == "linear" else weight.dim() - 2)
    sums = sums * unit.to(sums).view(-1, *beside)
    if "bias" in step.tensors:
        bias = step.tensors["bias"].abs()
        bias = bias if bias.is_floating_point() else bias * unit.to(bias.device)
        sums = sums + bias.to(sums).view(-1, *beside)
    return sums * (math.sqrt(terms) * UNIT)


def per_channel(step: Step, form: Integers, made: object) -> Array:
    """Value of one step of each output channel's sum, float64."""
    tensors = step.tensors
    if "weight_scale" in tensors:
        unit: Array = tensors["weight_scale"].double().cpu().numpy() * form.scale
    elif "scale" in tensors:
        unit = tensors["scale"].double().cpu().numpy()
    else:
        unit = tensors["multiplier"].double().cpu().numpy()
        unit = unit * (made.scale if isinstance(made, Integers) else 1.0)
    channels = tensors["weight"].shape[1 if step.op == "conv_transpose" else 0]
    if step.op == "conv_transpose":
        channels *= step.attributes["groups"]
    return np.broadcast_to(unit.reshape(-1), (channels,))
