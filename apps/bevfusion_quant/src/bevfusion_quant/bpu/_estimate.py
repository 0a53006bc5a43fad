"""What each layer on the BPU costs, estimated, and what the march's limits say of it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

import torch

from bevfusion_quant.results import BpuEstimate
from bevquant_hybrid.operators import find_violations, trace_calls
from bevquant_hybrid.performance import estimate_layers, load_chip_figures

if TYPE_CHECKING:
    from torch import fx

    from bevfusion_quant.bpu._labels import Label
    from bevquant_hybrid.operators import OperatorCall

__all__ = ["estimate_unit"]


def estimate_unit(
    graph: fx.GraphModule,
    labels: Mapping[str, Label],
    march: str,
    shapes: Sequence[tuple[int, ...]],
) -> BpuEstimate:
    """Trace one image, or one frame's maps, and estimate all of them.

    Args:
        graph: From `convert_fx`.
        labels: Of the form that it was converted from.
        march: The BPU.
        shapes: Of the unit's inputs; of several images one is run, since shapes are all that
            counts and tracing holds every activation.
    """
    count = shapes[0][0]
    calls = trace_calls(graph, tuple(torch.zeros(1, *shape[1:]) for shape in shapes))
    calls = [_of_batch(call, count) for call in calls]
    on_bpu = [c for c in calls if c.operator.endswith("Stub") or "float32" not in c.input_dtypes]
    names = {label.place: label.path for label in labels.values()}
    layers = [
        replace(
            layer,
            path=names.get(layer.path, layer.path),
            fused_into=names.get(layer.fused_into, layer.fused_into),
        )
        for layer in estimate_layers(on_bpu, march)
        if not layer.operator.endswith("Stub")
    ]
    told = [str(v) for v in find_violations([c for c in on_bpu if c.input_dtypes], march)]
    return BpuEstimate(load_chip_figures(march), 1, tuple(layers), tuple(told))


def _of_batch(call: OperatorCall, count: int) -> OperatorCall:
    """The call with `count` entries along the first axis instead of one."""

    def grown(shape: tuple[int, ...]) -> tuple[int, ...]:
        return (shape[0] * count, *shape[1:]) if len(shape) == 4 else shape

    shapes = tuple(map(grown, call.input_shapes))
    return replace(call, input_shapes=shapes, output_shape=grown(call.output_shape))
