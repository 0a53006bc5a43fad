"""TensorRT's own nodes as functions of standard operators, which run on CPUs."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from bevquant_export.lint._model import ATTENTION, PLUGINS
from bevquant_export.runtime._float4 import with_float8

_GRID_SAMPLE = 16  # first operator set; operators of 13 and later mean the same in it


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
