"""Sums of products at single places of a layer's output, exactly."""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from bevquant_export.dense._graph import Array
from bevquant_export.dense._source import Step

__all__ = ["products_at"]


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
