"""Layout operators: they move values without changing them, also to positions of a mask."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from torch import nn

from bevquant_export._errors import QdqError
from bevquant_export.dense._source import Source
from bevquant_export.dense.nodes._graph import Graph
from bevquant_export.sparse.portable._body import FLOAT
from bevquant_graph import OpSpec, op_spec
from bevquant_int8sim.program import (
    FloatCall,
    LayoutCall,
    MaxPool,
    Ref,
    Relu,
    Resize,
    Step,
    names_in,
)

Read = Callable[[str], str]
Form = Callable[[Graph, Step, Read, Source], str | list[str] | None]
"""Writes a step with constant arguments."""


def placed(graph: Graph, step: Step, read: Read, source: Source) -> str | None:
    """`index_put`: move the indexed axes to the front, ScatterND, move them back.

    Positions are one mask, of any number of axes, or indices. Other axes may be in front of and
    after the indexed ones (`canvas[:, mask] = rows`), not between them. Values are written, not
    added.

    Returns:
        The result; None where this has no form.
    """
    given = _given(step, "x", "indices", "values", "accumulate")
    x, values = given["x"], given["values"]
    if not isinstance(x, Ref) or not isinstance(values, Ref) or given.get("accumulate"):
        return None
    rank, path = len(source.shapes[x.name]), step.path
    entries = [(axis, entry) for axis, entry in enumerate(given["indices"]) if entry is not None]
    first, refs = entries[0][0], [entry for _, entry in entries]
    masks = [source.dtype(ref.name) == torch.bool for ref in refs]
    axes = len(source.shapes[refs[0].name]) if masks == [True] else len(refs)
    named, behind = source.named(x.name), list(range(first + axes, rank))
    order = [*range(first, first + axes), *range(first), *behind]
    around = [named[axis] for axis in order[axes:]]
    together = [axis for axis, _ in entries] == list(range(first, first + len(refs)))
    fixed = masks == [True] or not (any(masks) or source.free)
    if not together or not fixed or any(isinstance(size, str) for size in around):
        return None
    made = _placed_by_mask if masks == [True] else _indexed
    rows, shape, spread = made(graph, path, refs, read, source)
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


def _placed_by_mask(
    graph: Graph, path: str, refs: list[Ref], read: Read, source: Source
) -> tuple[str, str, int]:
    """Positions of a mask, one per row; the shape of its tensor; its number of axes."""
    found = graph.node("NonZero", path, [read(refs[0].name)])
    rows = graph.node("Transpose", path, [found], perm=[1, 0])
    shape = graph.node("Shape", path, [found])
    return rows, graph.node("Gather", path, [shape, graph.numbers([1])], axis=0), 1


def _indexed(
    graph: Graph, path: str, refs: list[Ref], read: Read, source: Source
) -> tuple[str, str, int]:
    """The same for indices, one tensor per axis."""
    spread = np.broadcast_shapes(*(source.shapes[ref.name] for ref in refs))
    shape, one = graph.numbers(list(spread)), graph.numbers([*spread, 1])
    wide = [graph.node("Expand", path, [read(ref.name), shape]) for ref in refs]
    parts = [graph.node("Reshape", path, [name, one]) for name in wide]
    return graph.node("Concat", path, parts, axis=-1), shape, len(spread)


def _transposed(graph: Graph, path: str, name: str, order: list[int]) -> str:
    same = order == sorted(order)
    return name if same else graph.node("Transpose", path, [name], perm=order)


_LAST = 2**31 - 1  # any end behind the last element
_PADDINGS = {"constant": "constant", "replicate": "edge", "reflect": "reflect"}


def keeps_scale(step: Step) -> bool:
    """Whether a step's result consists of its first input's integers, unchanged or clamped."""
    if isinstance(step, Resize):
        return bool(step.kwargs["mode"] == "nearest")
    if isinstance(step, MaxPool | Relu):
        return True
    spec = _spec(step)
    moves = _keeps_order(spec) or (spec.layout != "" and _form(step, spec) is not None)
    return isinstance(step, LayoutCall | FloatCall) and (moves or spec.name == "clamp")


def selects(step: Step) -> bool:
    """Whether a step's result consists of its first input's integers alone."""
    return keeps_scale(step) and not pads(step) and _spec(step).name != "clamp"


def pads(step: Step) -> bool:
    """Whether a step puts other values around its input."""
    return _spec(step).layout == "pad"


def reads_positions(step: Step) -> bool:
    """Whether a step writes to positions that other inputs give."""
    return _spec(step).name == "index_put"


def moved(graph: Graph, step: Step, read: Read, source: Source) -> str | list[str] | None:
    """Nodes of a layout operator: its output, or several.

    None where the operation is unknown.
    """
    spec, path = _spec(step), step.path
    fixed, form = _keeps_order(spec), _form(step, spec)
    if not fixed and (form is None or source.counts(step)):
        return None
    args, kwargs = source.constants(path, (step.args, dict(step.kwargs)), sizes=fixed)
    if fixed:
        first, output = args[0].name, step.outputs[0]
        if source.shapes[first] == source.shapes[output]:
            return read(first)
        if spec.name == "unsqueeze" and _several(source, output):
            axis = int(kwargs.get("dim", args[-1])) % len(source.shapes[output])
            return graph.node("Unsqueeze", path, [read(first), graph.numbers([axis])])
        return reshaped(graph, path, read(first), source.target(path, output, first))
    step = replace(step, args=args, kwargs=kwargs)
    return None if form is None else form(graph, step, read, source)


def _spec(step: Step) -> OpSpec:
    return op_spec(step.target if isinstance(step.target, nn.Module) else step.called)


def _keeps_order(spec: OpSpec) -> bool:
    """Whether values keep their order, and the result's shape is all that an argument tells."""
    return spec.kind == "identity" or (spec.layout == "reshape" and not spec.like)


def _form(step: Step, spec: OpSpec) -> Form | None:
    """The function that writes an operator's nodes."""
    if isinstance(step.target, nn.Module):  # has its arguments
        return _pixels if spec.name == "pixel_shuffle" else None
    turns = spec.layout == "permute" and step.target is not None
    return _permuted if turns else _FORMS.get(spec.name)


def reshaped(graph: Graph, path: str, name: str, target: list[int]) -> str:
    """A Reshape to these sizes."""
    return graph.node("Reshape", path, [name, graph.numbers(target)])


def _several(source: Source, name: str) -> bool:
    """Whether several sizes are free, which a Reshape to constant sizes cannot keep."""
    return sum(isinstance(size, str) for size in source.named(name)) > 1


def _given(step: Step, *names: str) -> dict[str, Any]:
    """Arguments by name."""
    return {**dict(zip(names, step.args, strict=False)), **step.kwargs}


def _called(step: Step, value: Any) -> Any:
    """Result of torch itself for a tensor as the first argument."""
    function: Any = step.target
    return function(value, *step.args[1:], **step.kwargs)


def _permuted(graph: Graph, step: Step, read: Read, source: Source) -> str:
    # Strides of a tensor with two elements along every axis tell the axes apart.
    rank = len(source.shapes[step.args[0].name])
    strides = _called(step, torch.empty([2] * rank, device="meta")).stride()
    order = [rank - 1 - int(math.log2(stride)) for stride in strides]
    return graph.node("Transpose", step.path, [read(step.args[0].name)], perm=order)


def _parts(graph: Graph, step: Step, read: Read, source: Source) -> list[str]:
    x, shape, path = read(step.args[0].name), source.shapes[step.args[0].name], step.path
    made = source.shapes[step.outputs[0]]
    probe = _called(step, torch.empty(shape, device="meta"))
    drops = len(made[0]) < len(shape)
    given = _given(step, "x", "size", "dim")
    axis = int(given.get("dim", given.get("size", 0) if drops else 0)) % len(shape)
    if isinstance(source.named(step.args[0].name)[axis], str):
        if step.called == "chunk":
            return _equal_parts(graph, path, x, axis, len(made))
        raise QdqError(
            f"{path or 'the model'}: {step.called} along an axis "
            "whose size is free in the file; the number of parts would be that of the example"
        )
    names, start = [], 0
    for part in probe:
        length = 1 if drops else part.shape[axis]
        name = sliced(graph, path, x, {axis: (start, start + length, 1)})
        if drops and _several(source, step.args[0].name):
            name = graph.node("Squeeze", path, [name, graph.numbers([axis])])
        elif drops:
            name = reshaped(graph, path, name, _without(source, path, step.args[0].name, {axis}))
        names.append(name)
        start += length
    return names


def _equal_parts(graph: Graph, path: str, x: str, axis: int, count: int) -> list[str]:
    """Parts ``[i · n, (i + 1) · n)`` of a free axis, n = ⌈size / count⌉; Slice clips ends."""
    size = graph.node("Gather", path, [graph.node("Shape", path, [x]), graph.numbers([axis])])
    wider = graph.node("Add", path, [size, graph.numbers([count - 1])])
    length = graph.node("Div", path, [wider, graph.numbers([count])])
    ends = [graph.node("Mul", path, [length, graph.numbers([i])]) for i in range(count + 1)]
    along = graph.numbers([axis])
    return [graph.node("Slice", path, [x, *ends[i : i + 2], along]) for i in range(count)]


def _joined(graph: Graph, step: Step, read: Read, source: Source) -> str:
    given = _given(step, "tensors", "dim")
    names, path, output = [read(ref.name) for ref in given["tensors"]], step.path, step.outputs[0]
    if source.dtype(output).is_floating_point:  # whole numbers among them become floats
        whole = [not source.dtype(ref.name).is_floating_point for ref in given["tensors"]]
        names = [
            graph.node("Cast", path, [name], to=FLOAT) if cast else name
            for name, cast in zip(names, whole, strict=True)
        ]
    rank = len(source.shapes[output])
    axis = int(given.get("dim", given.get("axis", 0))) % rank
    return graph.node("Concat", path, names, axis=axis)


def _expanded(graph: Graph, step: Step, read: Read, source: Source) -> str:
    # 1 leaves a free size as it is; every other size is said.
    shape = [1 if isinstance(n, str) else n for n in source.named(step.outputs[0])]
    return graph.node("Expand", step.path, [read(step.args[0].name), graph.numbers(shape)])


def _pixels(graph: Graph, step: Step, read: Read, source: Source) -> str:
    first, shapes = step.args[0].name, source.shapes
    factor = math.isqrt(shapes[first][1] // shapes[step.outputs[0]][1])
    return graph.pixels(step.path, read(first), factor)


def _got(graph: Graph, step: Step, read: Read, source: Source) -> str | None:
    if not isinstance(step.args[0], Ref):
        return None
    masked = _masked(graph, step, read, source)
    return masked or _sliced(graph, step, read, source)


def _masked(graph: Graph, step: Step, read: Read, source: Source) -> str | None:
    """Selection of one axis by a mask, such as the pillars of one frame."""
    index = step.args[1] if isinstance(step.args[1], tuple) else (step.args[1],)
    masks = [(axis, i) for axis, i in enumerate(index) if isinstance(i, Ref)]
    if len(masks) != 1 or any(i != slice(None) for i in index if not isinstance(i, Ref)):
        return None
    ((axis, mask),) = masks
    if source.dtype(mask.name) != torch.bool:
        return None
    # Compress says the same, but TensorRT has no importer of it.
    places = graph.node("NonZero", step.path, [read(mask.name)])
    if len(source.shapes[mask.name]) != 1:
        if axis:
            return None
        places = graph.node("Transpose", step.path, [places], perm=[1, 0])
        return graph.node("GatherND", step.path, [read(step.args[0].name), places])
    places = reshaped(graph, step.path, places, [-1])
    return graph.node("Gather", step.path, [read(step.args[0].name), places], axis=axis)


def _sliced(graph: Graph, step: Step, read: Read, source: Source) -> str | None:
    if not isinstance(step.args[0], Ref):
        return None
    first, what = step.args[0].name, step.called
    x, shape = read(first), source.shapes[first]
    index = step.args[1:]
    if what == "getitem":
        index = index[0] if isinstance(index[0], tuple) else (index[0],)
    else:
        names = ("dim", "start", "length") if what == "narrow" else ("dim", "index")
        given = {**dict(zip(names, index, strict=False)), **step.kwargs}
        axis = int(given["dim"]) % len(shape)
        at = given.get("start", given.get("index"))
        part = at if what == "select" else slice(at, at + given["length"])
        index = (*[slice(None)] * axis, part)
    if any(not isinstance(i, int | slice) and i is not Ellipsis for i in index):
        return None
    missing = len(shape) - sum(i is not Ellipsis for i in index)
    if Ellipsis in index:
        at = index.index(Ellipsis)
        index = (*index[:at], *[slice(None)] * missing, *index[at + 1 :])
    cuts, dropped = {}, set()
    free = [isinstance(size, str) for size in source.named(first)]
    for axis, i in enumerate(index):
        if isinstance(i, int):
            start = i if free[axis] else i % shape[axis]
            cuts[axis] = (start, start + 1 if start != -1 else _LAST, 1)
            dropped.add(axis)
        elif i != slice(None):
            # From the end of an axis of any length as it was said, in ONNX as in Python.
            bounds = (i.start or 0, i.stop, i.step or 1)
            start, stop, stride = bounds if free[axis] else i.indices(shape[axis])
            cuts[axis] = (start, _LAST if i.stop is None else stop, stride)
    name = sliced(graph, step.path, x, cuts) if cuts else x
    if not dropped:
        return name
    if _several(source, step.outputs[0]):
        return graph.node("Squeeze", step.path, [name, graph.numbers(sorted(dropped))])
    return reshaped(graph, step.path, name, source.target(step.path, step.outputs[0]))


def sliced(graph: Graph, path: str, x: str, cuts: dict[int, tuple[int, int, int]]) -> str:
    """A Slice with start, end and stride per axis."""
    starts, stops, strides = ([cut[i] for cut in cuts.values()] for i in range(3))
    inputs = [graph.numbers(values) for values in (starts, stops, list(cuts), strides)]
    return graph.node("Slice", path, [x, *inputs])


def _without(source: Source, path: str, name: str, dropped: set[int]) -> list[int]:
    target = source.target(path, name)
    return [size for axis, size in enumerate(target) if axis not in dropped]


def _stacked(graph: Graph, step: Step, read: Read, source: Source) -> str:
    given = _given(step, "tensors", "dim")
    axis = int(given.get("dim", 0)) % len(source.shapes[step.outputs[0]])
    names = []
    for name in names_in(given["tensors"]):
        if _several(source, name):
            names.append(graph.node("Unsqueeze", step.path, [read(name), graph.numbers([axis])]))
            continue
        target = source.target(step.path, name)
        target.insert(axis, 1)
        names.append(reshaped(graph, step.path, read(name), target))
    return graph.node("Concat", step.path, names, axis=axis)


def _padded(graph: Graph, step: Step, read: Read, source: Source) -> str | None:
    given = _given(step, "x", "pad", "mode", "value")
    mode = _PADDINGS.get(given.get("mode", "constant"))
    if mode is None:
        return None
    widths = given.get("pad", ())
    rank = len(source.shapes[step.args[0].name])
    low, high = [0] * rank, [0] * rank
    for i in range(len(widths) // 2):
        low[rank - 1 - i], high[rank - 1 - i] = int(widths[2 * i]), int(widths[2 * i + 1])
    value = float(given.get("value") or 0.0)
    filler = [graph.constant(f"float_{value:g}", value)] if value else []
    inputs = [read(step.args[0].name), graph.numbers([*low, *high]), *filler]
    return graph.node("Pad", step.path, inputs, mode=mode)


def _shuffled(graph: Graph, step: Step, read: Read, source: Source) -> str | None:
    """Channel shuffle, or pixels that become channels."""
    if len(step.args) != 2:
        return None
    x, count = read(step.args[0].name), int(step.args[1])
    path, target = step.path, source.target(step.path, step.outputs[0])
    batch, channels, height, width = source.target(path, step.args[0].name)
    if step.called == "channel_shuffle":
        split, order = [batch, count, channels // count, height, width], [0, 2, 1, 3, 4]
    else:
        split = [batch, channels, height // count, count, width // count, count]
        order = [0, 1, 3, 5, 2, 4]
    x = reshaped(graph, path, x, split)
    return reshaped(graph, path, graph.node("Transpose", path, [x], perm=order), target)


def _repeated(graph: Graph, step: Step, read: Read, source: Source) -> str | None:
    if len(step.args) < 2:
        return None
    x, given = read(step.args[0].name), step.args[1:]
    times = list(given[0] if isinstance(given[0], list | tuple) else given)
    shape = source.shapes[step.args[0].name]
    if len(times) > len(shape):
        target = source.target(step.path, step.args[0].name)
        x = reshaped(graph, step.path, x, [1] * (len(times) - len(shape)) + target)
    times = [1] * (len(shape) - len(times)) + times
    return graph.node("Tile", step.path, [x, graph.numbers(times)])


_FORMS: dict[str, Form] = {
    "cat": _joined, "stack": _stacked, "expand": _expanded, "getitem": _got, "narrow": _sliced,
    "select": _sliced, "pad": _padded, "pixel_shuffle": _pixels, "index_put": placed,
    **dict.fromkeys(("split", "chunk", "unbind"), _parts),
    **dict.fromkeys(("pixel_unshuffle", "channel_shuffle"), _shuffled),
    **dict.fromkeys(("repeat", "tile"), _repeated),
}  # fmt: skip
