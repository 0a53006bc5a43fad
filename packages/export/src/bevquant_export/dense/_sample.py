"""Steps that sample integers, as calls that torch's exporter writes: GridSample and sums."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial

import torch
from torch import Tensor
from torch.nn import functional

from bevquant_int8sim.program import PADDINGS, Ref, Step


def sampling_call(step: Step, constants: Mapping[str, Tensor]) -> Step:
    """The float call that a sampling step is.

    Args:
        step: Of an operation of `bevquant_int8sim.program.SAMPLES`.
        constants: Constant values of the program.

    Raises:
        ValueError: The sizes of the sampled levels are no constants.
    """
    if step.op == "grid_sample":
        mode, padding, corners = (step.kwargs[n] for n in ("mode", "padding_mode", "align_corners"))
        return replace(
            step, args=(*step.args, int(mode == "nearest"), PADDINGS.index(padding), corners),
            kwargs={}, attributes={"what": "grid_sampler"},
            function=torch.ops.aten.grid_sampler.default,
        )  # fmt: skip
    value, shapes, starts, places, weights = step.args
    known = [constants.get(ref.name) if isinstance(ref, Ref) else None for ref in (shapes, starts)]
    if known[0] is None or known[1] is None:
        raise ValueError(
            f"export_qdq_onnx: {step.path or 'the model'}: the sizes of the sampled levels are "
            "computed from inputs; expected constants. Make value_spatial_shapes and "
            "value_level_start_index from sizes of maps (`x.shape`)"
        )
    sizes, first = (tensor.tolist() for tensor in known if tensor is not None)
    return replace(
        step, args=(value, places, weights), attributes={"what": "deformable_attention"},
        function=partial(attend, sizes, first),
    )  # fmt: skip


def attend(
    sizes: Sequence[Sequence[int]], starts: Sequence[int], value: Tensor, places: Tensor,
    weights: Tensor,
) -> Tensor:  # fmt: skip
    """`bevquant_graph.deformable_attention` of known sizes, by operators of torch."""
    heads, depth = value.shape[2:]
    total: Tensor | None = None
    for level, ((h, w), start) in enumerate(zip(sizes, starts, strict=True)):
        rows = value[:, start : start + h * w].permute(0, 2, 3, 1)
        grid = 2 * places[:, :, :, level].transpose(1, 2).flatten(0, 1) - 1
        sampled = functional.grid_sample(
            rows.reshape(-1, depth, h, w), grid, "bilinear", "zeros", align_corners=False
        )
        own = weights[:, :, :, level].transpose(1, 2).flatten(0, 1)[:, None]
        summed = (sampled * own).sum(3)
        total = summed if total is None else total + summed
    assert total is not None
    made: Tensor = total.unflatten(0, (-1, heads)).flatten(1, 2)
    return made.transpose(1, 2)
