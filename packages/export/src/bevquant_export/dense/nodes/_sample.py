"""Steps that sample integers: GridSample and sums as torch's exporter writes them, or a plugin.

TensorRT's plugin library has ``MultiscaleDeformableAttnPlugin_TRT``: value, spatial_shapes int32,
level_start_index int32, sampling_locations, attention_weights → ``[batch, queries, heads, depth]``.
Runtimes on CPUs have none: `without_plugins` puts standard operators in its place.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from bevquant_export.dense.nodes._float4 import with_float8
from bevquant_export.lint._model import ATTENTION, PLUGINS
from bevquant_graph import attend_levels
from bevquant_int8sim.program import PADDINGS, FloatCall, GridSample, Matmul, Ref, Step

if TYPE_CHECKING:
    from bevquant_export.dense.nodes._graph import Graph


_GRID_SAMPLE = 16  # first operator set; operators of 13 and later mean the same in it


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


def without_plugins(proto: Any) -> Any:
    """A copy with functions of standard operators in place of `ATTENTION` and of FP4, if any."""
    proto = with_float8(proto)
    if not any(node.op_type == ATTENTION for node in proto.graph.node):
        return proto
    made = type(proto)()
    made.CopyFrom(proto)
    held = {tensor.name: tensor for tensor in made.graph.initializer}
    (standard,) = (o for o in made.opset_import if o.domain in ("", "ai.onnx"))
    standard.version = max(standard.version, _GRID_SAMPLE)
    for place, node in enumerate(made.graph.node):
        if node.op_type == ATTENTION:
            node.op_type = f"{ATTENTION}_{place}"
            made.functions.append(_function(node, held, standard.version))
    return made


def _function(node: Any, held: Mapping[str, Any], opset: int) -> Any:
    """`attend_levels` as an ONNX function, of the sizes that the file's constants have."""
    from onnx import numpy_helper, parser

    sizes, starts = (numpy_helper.to_array(held[name]).tolist() for name in node.input[1:3])
    levels = [
        _LEVEL.format(level=level, first=start, end=start + h * w, h=h, w=w)
        for level, ((h, w), start) in enumerate(zip(sizes, starts, strict=True))
    ]
    sums = ", ".join(f"sum{level}" for level in range(len(levels)))
    body = _BODY.format(levels="".join(levels), sums=sums)
    head = f'<domain: "{PLUGINS}", opset_import: ["" : {opset}]> {node.op_type}'
    return parser.parse_function(f"{head} {body}")


_BODY = """(value, shapes, starts, places, weights) => (made) {{
  merged = Constant <value_ints = [-1]> ()
  one_channel = Constant <value_ints = [1]> ()
  pair = Constant <value_ints = [2]> ()
  last = Constant <value_ints = [3]> ()
  two = Constant <value_float = 2.0> ()
  one = Constant <value_float = 1.0> ()
  batch = Shape <start = 0, end = 1> (value)
  heads = Shape <start = 2, end = 3> (value)
  depth = Shape <start = 3, end = 4> (value)
  queries = Shape <start = 1, end = 2> (places)
  points = Shape <start = 4, end = 5> (places)
  rows = Transpose <perm = [0, 2, 3, 1]> (value)
  moved = Transpose <perm = [3, 0, 2, 1, 4, 5]> (places)
  doubled = Mul (moved, two)
  grids = Sub (doubled, one)
  shares = Transpose <perm = [3, 0, 2, 1, 4]> (weights)
  grid_shape = Concat <axis = 0> (merged, queries, points, pair)
  share_shape = Concat <axis = 0> (merged, one_channel, queries, points)
  {levels}
  total = Sum ({sums})
  made_shape = Concat <axis = 0> (batch, heads, depth, queries)
  split = Reshape (total, made_shape)
  made = Transpose <perm = [0, 3, 1, 2]> (split)
}}"""
_LEVEL = """
  first{level} = Constant <value_ints = [{first}]> ()
  end{level} = Constant <value_ints = [{end}]> ()
  size{level} = Constant <value_ints = [{h}, {w}]> ()
  level{level} = Constant <value_int = {level}> ()
  part{level} = Slice (rows, first{level}, end{level}, last)
  map_shape{level} = Concat <axis = 0> (merged, depth, size{level})
  map{level} = Reshape (part{level}, map_shape{level})
  own_grid{level} = Gather <axis = 0> (grids, level{level})
  grid{level} = Reshape (own_grid{level}, grid_shape)
  sampled{level} = GridSample <align_corners = 0> (map{level}, grid{level})
  own_share{level} = Gather <axis = 0> (shares, level{level})
  share{level} = Reshape (own_share{level}, share_shape)
  weighted{level} = Mul (sampled{level}, share{level})
  sum{level} = ReduceSum <keepdims = 0> (weighted{level}, last)
"""
