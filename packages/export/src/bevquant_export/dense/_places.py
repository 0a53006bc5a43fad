"""Values written into a tensor at places that a mask or indices tell."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import torch

from bevquant_export.dense._graph import Graph
from bevquant_export.dense._sizes import Sizes
from bevquant_export.dense._source import Ref, Step

__all__ = ["placed"]


def placed(
    graph: Graph, step: Step, read: Callable[[str], str], args: Any, kwargs: Any, sizes: Sizes
) -> str | None:
    """`index_put`: the axes that are indexed in front, ScatterND, and the axes back.

    Places are one mask, of any number of axes, or indices; in front of the indexed axes and behind
    them may be others (`canvas[:, mask] = rows`), none between. Values are written, not added.

    Returns:
        The tensor made; None where this has no form.
    """
    given = dict(zip(("x", "indices", "values", "accumulate"), args, strict=False)) | kwargs
    x, values = given["x"], given["values"]
    if not isinstance(x, Ref) or not isinstance(values, Ref) or given.get("accumulate"):
        return None
    rank, path = len(sizes.of(x.name)), step.path
    entries = [(axis, entry) for axis, entry in enumerate(given["indices"]) if entry is not None]
    first, refs = entries[0][0], [entry for _, entry in entries]
    masks = [sizes.dtype(ref.name) == torch.bool for ref in refs]
    axes = len(sizes.of(refs[0].name)) if masks == [True] else len(refs)
    named, behind = sizes.named(x.name), list(range(first + axes, rank))
    order = [*range(first, first + axes), *range(first), *behind]
    around = [named[axis] for axis in order[axes:]]
    together = [axis for axis, _ in entries] == list(range(first, first + len(refs)))
    fixed = masks == [True] or not (any(masks) or sizes.free)
    if not together or not fixed or any(isinstance(size, str) for size in around):
        return None
    made = _masked if masks == [True] else _indexed
    rows, shape, spread = made(graph, path, refs, read, sizes)
    parts = [graph.numbers(around[:first]), shape, graph.numbers(around[first:])]
    wanted = graph.node("Concat", path, parts, axis=0)
    updates = graph.node("Expand", path, [read(values.name), wanted])
    end = first + spread
    turned = [*range(first, end), *range(first), *range(end, end + len(behind))]
    inputs = [
        _transposed(graph, path, read(x.name), order),
        rows,
        _transposed(graph, path, updates, turned),
    ]
    written = graph.node("ScatterND", path, inputs)
    return _transposed(graph, path, written, [order.index(axis) for axis in range(rank)])


def _masked(
    graph: Graph, path: str, refs: list[Ref], read: Callable[[str], str], sizes: Sizes
) -> tuple[str, str, int]:
    """Places of a mask, one a row; the shape of their tensor, as a tensor; how many axes it has."""
    found = graph.node("NonZero", path, [read(refs[0].name)])
    rows = graph.node("Transpose", path, [found], perm=[1, 0])
    shape = graph.node("Shape", path, [found])
    return rows, graph.node("Gather", path, [shape, graph.numbers([1])], axis=0), 1


def _indexed(
    graph: Graph, path: str, refs: list[Ref], read: Callable[[str], str], sizes: Sizes
) -> tuple[str, str, int]:
    """The same of indices, one tensor an axis."""
    spread = np.broadcast_shapes(*(sizes.of(ref.name) for ref in refs))
    shape, one = graph.numbers(list(spread)), graph.numbers([*spread, 1])
    wide = [graph.node("Expand", path, [read(ref.name), shape]) for ref in refs]
    parts = [graph.node("Reshape", path, [name, one]) for name in wide]
    return graph.node("Concat", path, parts, axis=-1), shape, len(spread)


def _transposed(graph: Graph, path: str, name: str, order: list[int]) -> str:
    same = order == sorted(order)
    return name if same else graph.node("Transpose", path, [name], perm=order)
