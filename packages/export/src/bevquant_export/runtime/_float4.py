"""FP8 and FP4 numbers of a file; FP4 in a form that runs on CPUs.

ONNX Runtime has no FP4 on CPUs. All its numbers are numbers of FP8 (E4M3) too.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from bevquant_export.lint._model import FP4_QUANTIZE, TRT

E4M3, E2M1 = 17, 23  # onnx.TensorProto's numbers


def float_types() -> Any:
    """The package ml_dtypes: numpy's FP8 and FP4, which onnx reads."""
    try:
        import ml_dtypes
    except ImportError as error:
        raise ImportError(
            "FP8 in ONNX files needs ml_dtypes, which onnx 1.17 and later bring: "
            "pip install ml_dtypes"
        ) from error
    return ml_dtypes


def float8_array(tensor: Tensor) -> NDArray[Any]:
    """Numbers of torch's FP8 as numpy's."""
    name = str(tensor.dtype).removeprefix("torch.")
    codes: NDArray[np.uint8] = tensor.cpu().contiguous().view(torch.uint8).numpy()
    return codes.view(getattr(float_types(), name))


def with_float8(proto: Any) -> Any:
    """A copy with FP8 in place of FP4 and standard operators in place of TensorRT's, if any."""
    from onnx import numpy_helper, parser

    fours = [t.name for t in proto.graph.initializer if t.data_type == E2M1]
    calls = any(node.op_type == FP4_QUANTIZE for node in proto.graph.node) and not any(
        function.name == FP4_QUANTIZE for function in proto.functions
    )
    if not fours and not calls:
        return proto
    made = type(proto)()
    made.CopyFrom(proto)
    for tensor in made.graph.initializer:
        if tensor.data_type == E2M1:
            wide = numpy_helper.to_array(tensor).astype(float_types().float8_e4m3fn)
            tensor.CopyFrom(numpy_helper.from_array(wide, tensor.name))
    for value in made.graph.value_info:
        if value.type.tensor_type.elem_type == E2M1:
            value.type.tensor_type.elem_type = E4M3
    if calls:
        opset = next(o.version for o in made.opset_import if o.domain in ("", "ai.onnx"))
        head = f'<domain: "{TRT}", opset_import: ["" : {opset}]> {FP4_QUANTIZE}'
        made.functions.append(
            parser.parse_function(f"{head} <axis, block_size, scale_type> {_BODY}")
        )
    return made


# `quantize_blocks` along axis 1. The steps of E2M1 are 0.5, from 2 on 1 and from 4 on 2.
_BODY = """(x, t) => (numbers, scales) {
  blocks = Constant <value_ints = [-1, 16]> ()
  two = Constant <value_ints = [2]> ()
  zero = Constant <value_float = 0.0> ()
  half = Constant <value_float = 0.5> ()
  one = Constant <value_float = 1.0> ()
  double = Constant <value_float = 2.0> ()
  four = Constant <value_float = 4.0> ()
  most = Constant <value_float = 6.0> ()
  least = Constant <value_float = -6.0> ()
  smallest = Constant <value_float = 0.001953125> ()
  largest_scale = Constant <value_float = 448.0> ()
  front = Shape <start = 0, end = 1> (x)
  back = Shape <start = 2> (x)
  split = Concat <axis = 0> (front, blocks, back)
  parts = Reshape (x, split)
  sizes = Abs (parts)
  largest = ReduceMax <keepdims = 0> (sizes, two)
  unit = Mul (most, t)
  ratio = Div (largest, unit)
  empty = Equal (ratio, zero)
  wanted = Where (empty, one, ratio)
  inside = Clip (wanted, smallest, largest_scale)
  scales = Cast <to = 17> (inside)
  exact = Cast <to = 1> (scales)
  steps = Mul (exact, t)
  along = Unsqueeze (steps, two)
  quotients = Div (parts, along)
  clipped = Clip (quotients, least, most)
  magnitude = Abs (clipped)
  is_low = Less (magnitude, double)
  is_middle = Less (magnitude, four)
  upper = Where (is_middle, one, double)
  step = Where (is_low, half, upper)
  count = Div (clipped, step)
  rounded = Round (count)
  values = Mul (rounded, step)
  narrow = Cast <to = 17> (values)
  shape = Shape (x)
  numbers = Reshape (narrow, shape)
}"""
