"""Steps that sample integers: GridSample and sums as torch's exporter writes them, or a plugin.

TensorRT's plugin library has ``MultiscaleDeformableAttnPlugin_TRT``: value, spatial_shapes int32,
level_start_index int32, sampling_locations, attention_weights → ``[batch, queries, heads, depth]``.
Runtimes on CPUs have none: `runtime._plugins` puts standard operators in its place.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from bevquant_export.lint._model import ATTENTION, PLUGINS
from bevquant_graph import attend_levels
from bevquant_int8sim.program import PADDINGS, FloatCall, GridSample, Matmul, Ref, Step

if TYPE_CHECKING:
    from bevquant_export.dense.nodes._graph import Graph


def sampling_call(step: Step, constants: Mapping[str, Tensor]) -> FloatCall:
    """The float call that a `GridSample` or a deformable attention is."""
    if isinstance(step, GridSample):
        mode, padding, corners = (step.kwargs[n] for n in ("mode", "padding_mode", "align_corners"))
        args = (*step.args, int(mode == "nearest"), PADDINGS.index(padding), corners)
        function = torch.ops.aten.grid_sampler.default
        return FloatCall(
            step.path, args, step.outputs, name="grid_sampler", function=function,
            reason=step.reason,
        )  # fmt: skip
    value, _, _, places, weights = step.args
    sizes, first = _levels(step, constants)
    return FloatCall(
        step.path, (value, places, weights), step.outputs, name="deformable_attention",
        function=partial(attend_levels, sizes, first), reason=step.reason,
    )  # fmt: skip


def einsum_call(step: Matmul) -> FloatCall:
    """The float call of an `einsum` of two tensors of integers."""
    return FloatCall(
        step.path, (step.equation, list(step.args)), step.outputs, name="einsum",
        function=torch.ops.aten.einsum.default, reason=step.reason,
    )  # fmt: skip


def attention_plugin(
    graph: Graph, step: Step, read: Callable[[str], str], constants: Mapping[str, Tensor]
) -> str:
    """TensorRT's plugin node for a deformable attention, whose output joins heads and depth."""
    name, tensors = f"{step.path}.levels" if step.path else "levels", []
    for value in _levels(step, constants):
        tensors.append(graph.constant(name, value, np.int32))
    value, places, weights = (read(step.args[i].name) for i in (0, 3, 4))
    made = graph.node(
        ATTENTION, step.path, [value, *tensors, places, weights], domain=PLUGINS,
        plugin_version=graph.profile.plugins, plugin_namespace="",
    )  # fmt: skip
    graph.typed[made] = 1  # float32
    return graph.node("Reshape", step.path, [made, graph.numbers([0, 0, -1])])


def _levels(step: Step, constants: Mapping[str, Tensor]) -> tuple[Any, Any]:
    """Sizes and first rows of the levels."""
    known = [constants.get(r.name) if isinstance(r, Ref) else None for r in step.args[1:3]]
    if known[0] is None or known[1] is None:
        raise ValueError(
            f"export_qdq_onnx: {step.path or 'the model'}: the sizes of the sampled levels are "
            "computed from inputs; expected constants. Make value_spatial_shapes and "
            "value_level_start_index from sizes of maps (`x.shape`)"
        )
    return known[0].tolist(), known[1].tolist()
