"""Masks of large negative numbers in front of a softmax, in numbers that float16 has."""

from __future__ import annotations

from typing import Any

import numpy as np

from bevquant_export.dense._bound import RENAMED
from bevquant_export.dense._bounds import Bounds
from bevquant_export.dense._half_graph import FloatGraph
from bevquant_export.dense._half_limits import LARGEST_HALF

_MASK, _BESIDE_MASK = -32768.0, 16384.0


def lower_masks(graph: FloatGraph, bounds: Bounds) -> bool:
    """Replace large negative numbers by −32,768, which has the same softmax; return whether any.

    Unmasked values are at most 16,384, so that a masked one is 0 after the softmax.
    """
    from onnx import numpy_helper

    found = False
    for name, tensor in graph.constants.items():
        value = numpy_helper.to_array(tensor)
        large = np.isfinite(value) & (value <= -LARGEST_HALF)
        others = np.abs(value[~large & np.isfinite(value)]).max(initial=0.0)
        readers = graph.readers.get(name, [])
        if not large.any() or others > _BESIDE_MASK:
            continue
        if readers and all(_is_mask(graph, bounds, node, name) for node in readers):
            lowered = np.where(large, np.float32(_MASK), value)
            tensor.CopyFrom(numpy_helper.from_array(lowered, name))
            found = True
    return found


def _is_mask(graph: FloatGraph, bounds: Bounds, node: Any, name: str) -> bool:
    if node.op_type not in ("Add", "Where") or not _is_softmax_only(graph, node.output[0]):
        return False
    others = [n for n in node.input if n != name and n in graph.floats]
    return all(bounds[n].largest <= _BESIDE_MASK for n in others)


def _is_softmax_only(graph: FloatGraph, name: str) -> bool:
    readers = graph.readers.get(name, [])
    return bool(readers) and all(
        reader.op_type == "Softmax"
        or (reader.op_type in RENAMED and _is_softmax_only(graph, reader.output[0]))
        for reader in readers
    )
