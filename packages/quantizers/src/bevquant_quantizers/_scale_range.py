r"""A range that follows its tensor, where that tensor is multiplied.

Folding a batch norm multiplies each output channel of a weight by a factor f. With

.. math:: \text{amax}' = |f|\,\text{amax}

the integers stay, up to their sign: rounding half to even and a symmetric clamp give
q(f·x, amax') = sign(f)·q(x, amax).
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ._descriptor import kept_axes
from ._format import format_of


@torch.no_grad()
def scale_range(quantizer: Any, factor: Tensor, inputs: Tensor) -> Tensor:
    """`TensorQuantizer.scale_range`."""
    who = quantizer._who()
    factor = factor.detach().double().to(inputs.device)
    ends = _ends(quantizer)
    if quantizer._learn_amax and not torch.equal(-ends[0], ends[1]):
        signed = factor  # a range that is not symmetric is turned over by a negative factor
    else:
        signed = factor.abs()
    shape = _shape(ends, quantizer, inputs)
    each = _one_each(signed, shape, who)
    if not ends:
        return inputs  # dynamic: the largest value of every tensor
    result = _without_lowest(quantizer, factor, inputs, who)
    new = [(end.double() * each.reshape(end.shape)).to(end.dtype) for end in ends]
    if not all(bool(value.isfinite().all()) for value in new):
        raise ValueError(f"{who}: its range times the factor is not finite in {new[0].dtype}")
    if len(new) == 2:
        new = [torch.minimum(*new), torch.maximum(*new)]
    if any(bool(value.any()) for value in new):  # any range fits a tensor of zeros
        for end, value in zip(ends, new, strict=True):
            end.data.copy_(value)
    if quantizer._calibrator is not None:
        quantizer._calibrator.reset()  # it has seen values that are no longer there
    return result


def _ends(quantizer: Any) -> list[Tensor]:
    """The tensors that hold the range: none where it is dynamic, two where a clip learns it."""
    if quantizer._learn_amax:
        return [quantizer.clip.clip_value_min.detach(), quantizer.clip.clip_value_max.detach()]
    return [] if quantizer.amax is None else [quantizer.amax]


def _shape(ends: list[Tensor], quantizer: Any, inputs: Tensor) -> list[int]:
    """The range's shape, with an axis for each of the tensor's."""
    if ends:
        return [1] * (inputs.dim() - ends[0].dim()) + list(ends[0].shape)
    kept = kept_axes(quantizer.axis, inputs.shape, quantizer._who())
    return [n if axis in kept else 1 for axis, n in enumerate(inputs.shape)]


def _one_each(factor: Tensor, shape: list[int], who: str) -> Tensor:
    """The factor of each range, in the ranges' shape."""
    joined = [axis for axis, n in enumerate(shape) if n == 1]
    low = factor.amin(joined, keepdim=True) if joined else factor
    high = factor.amax(joined, keepdim=True) if joined else factor
    if not torch.equal(low, high):
        raise ValueError(
            f"{who}: one range holds values that are multiplied by different factors "
            f"({float(factor.min()):.3g} to {float(factor.max()):.3g}), so that its integers "
            "would change; multiply before quantizing, or use one range per channel (axis)"
        )
    return high.expand(shape)


def _without_lowest(quantizer: Any, factor: Tensor, inputs: Tensor, who: str) -> Tensor:
    """The tensor, with no value whose opposite has another integer where its sign changes."""
    if quantizer._disabled or quantizer._learn_amax or not bool((factor < 0).any()):
        return inputs
    if quantizer.unsigned:
        raise ValueError(f"{who}: a factor is negative, and the integers are unsigned")
    form = format_of(quantizer.num_bits, narrow_range=quantizer.narrow_range)
    if form.low == -form.high and not quantizer.use_fb_fake_quant:
        return inputs
    top = form.high
    amax = quantizer._get_amax(inputs)
    lowest = inputs.double() * (top / amax.double()) <= -(top + 0.5) * (1 - 1e-6)
    if bool((lowest & (factor < 0)).any()):
        raise ValueError(
            f"{who}: a factor is negative, and values below the range have the integer "
            f"{-int(top) - 1}, which has no opposite; clamp the values to the range (for weights "
            "bevquant_qnn.keep_within_ranges(model)), or set narrow_range = True first"
        )
    return torch.where(factor < 0, torch.minimum(inputs, amax.to(inputs.dtype)), inputs)
