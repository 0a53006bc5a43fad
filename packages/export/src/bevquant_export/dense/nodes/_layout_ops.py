"""Layout operators: they move values without changing them, also to positions of a mask."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import nn

from bevquant_export._errors import QdqError
from bevquant_export.dense.nodes._at import TYPES, At, Form, written
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


def moved(at: At) -> str | list[str] | None:
    """Nodes of a layout operator: its output, or several.

    None where the operation is unknown.
    """
    step, source, path = at.step, at.source, at.path
    spec = _spec(step)
    fixed, form = _keeps_order(spec), _form(step, spec)
    if not fixed and (form is None or source.counts(step)):
        return None
    args, kwargs = source.constants(path, (step.args, dict(step.kwargs)), sizes=fixed)
    if not fixed:
        made: str | list[str] | None = written(form, at, args, kwargs) if form else None
        return made
    x, output = args[0], Ref(step.outputs[0])
    if at.shape(x) == at.shape(output):
        return at.name(x)
    # A Reshape infers one free size alone.
    if spec.name == "unsqueeze" and at.free(output) > 1:
        axis = int(kwargs.get("dim", args[-1])) % len(at.shape(output))
        return at.node("Unsqueeze", x, [axis])
    return at.node("Reshape", x, source.target(path, output.name, x.name))


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


def _called(at: At, shape: Sequence[int], *given: Any, **named: Any) -> Any:
    """Result of torch itself for a tensor of this shape."""
    function: Any = at.step.target
    return function(torch.empty(shape, device="meta"), *given, **named)


def _output(at: At) -> Ref:
    return Ref(at.step.outputs[0])


def _permuted(at: At, x: Ref, *given: Any, **named: Any) -> str:
    # Strides of a tensor with two elements along every axis tell the axes apart.
    rank = len(at.shape(x))
    strides = _called(at, [2] * rank, *given, **named).stride()
    order = [rank - 1 - int(math.log2(stride)) for stride in strides]
    return at.node("Transpose", x, perm=order)


def _parts(at: At, x: Ref, *given: Any, **named: Any) -> list[str]:
    name, shape = at.name(x), at.shape(x)
    probe = _called(at, shape, *given, **named)
    drops = len(probe[0].shape) < len(shape)
    axis = int(named.get("dim", ([0, *given] if drops else [0, *given[1:]])[-1])) % len(shape)
    if isinstance(at.source.named(x.name)[axis], str):
        if at.step.called == "chunk":
            return _equal_parts(at, name, axis, len(at.source.shapes[at.step.outputs[0]]))
        raise QdqError(
            f"{at.path or 'the model'}: {at.step.called} along an axis "
            "whose size is free in the file; the number of parts would be that of the example"
        )
    names, start = [], 0
    for part in probe:
        length = 1 if drops else part.shape[axis]
        made = at.sliced(name, {axis: (start, start + length, 1)})
        if drops and at.free(x) > 1:
            made = at.node("Squeeze", made, [axis])
        elif drops:
            target = at.source.target(at.path, x.name)
            made = at.node("Reshape", made, [*target[:axis], *target[axis + 1 :]])
        names.append(made)
        start += length
    return names


def _equal_parts(at: At, x: str, axis: int, count: int) -> list[str]:
    """Parts ``[i · n, (i + 1) · n)`` of a free axis, n = ⌈size / count⌉; Slice clips ends."""
    size = at.node("Gather", at.node("Shape", x), [axis])
    length = at.node("Div", at.node("Add", size, [count - 1]), [count])
    ends = [at.node("Mul", length, [i]) for i in range(count + 1)]
    return [at.node("Slice", x, *ends[i : i + 2], [axis]) for i in range(count)]


def _joined(at: At, tensors: Sequence[Ref], dim: int = 0, *, axis: int | None = None) -> str:
    dim = dim if axis is None else axis
    names = [_promoted(at, ref) for ref in tensors]
    return at.node("Concat", *names, axis=int(dim) % len(at.shape(_output(at))))


def _promoted(at: At, ref: Ref) -> str:
    """The value in the result's type: Concat takes one type, torch.cat any."""
    made, own = (at.source.dtype(r.name) for r in (_output(at), ref))
    alike = own == made or made not in TYPES  # half precision: refused with the whole file
    return at.name(ref) if alike else at.node("Cast", ref, to=TYPES[made])


def _expanded(at: At, x: Ref, *_: Any, **__: Any) -> str:
    # 1 leaves a free size as it is; every other size is said.
    sizes = at.source.named(_output(at).name)
    shape = [1 if isinstance(size, str) else size for size in sizes]
    return at.node("Expand", x, shape)


def _pixels(at: At, x: Ref, *_: Any, **__: Any) -> str:
    factor = math.isqrt(at.shape(x)[1] // at.shape(_output(at))[1])
    return at.graph.pixels(at.path, at.name(x), factor)


def _got(at: At, x: Any, index: Any) -> str | None:
    if not isinstance(x, Ref):
        return None
    index = index if isinstance(index, tuple) else (index,)
    return _masked(at, x, index) or _cut(at, x, index)


def _masked(at: At, x: Ref, index: tuple[Any, ...]) -> str | None:
    """Selection of one axis by a mask, such as the pillars of one frame."""
    masks = [(axis, i) for axis, i in enumerate(index) if isinstance(i, Ref)]
    if len(masks) != 1 or any(i != slice(None) for i in index if not isinstance(i, Ref)):
        return None
    ((axis, mask),) = masks
    if at.source.dtype(mask.name) != torch.bool:
        return None
    # Compress says the same, but TensorRT has no importer of it.
    places = at.node("NonZero", mask)
    if len(at.shape(mask)) != 1:
        if axis:
            return None
        return at.node("GatherND", x, at.node("Transpose", places, perm=[1, 0]))
    return at.node("Gather", x, at.node("Reshape", places, [-1]), axis=axis)


def _narrowed(at: At, x: Ref, dim: int, start: Any, length: Any) -> str | None:
    axis = int(dim) % len(at.shape(x))
    return _cut(at, x, (*[slice(None)] * axis, slice(start, start + length)))


def _selected(at: At, x: Ref, dim: int, index: Any) -> str | None:
    axis = int(dim) % len(at.shape(x))
    return _cut(at, x, (*[slice(None)] * axis, index))


def _cut(at: At, x: Ref, index: tuple[Any, ...]) -> str | None:
    """Slices and numbers of axes."""
    if any(not isinstance(i, int | slice) and i is not Ellipsis for i in index):
        return None
    name, shape, output = at.name(x), at.shape(x), _output(at)
    missing = len(shape) - sum(i is not Ellipsis for i in index)
    if Ellipsis in index:
        place = index.index(Ellipsis)
        index = (*index[:place], *[slice(None)] * missing, *index[place + 1 :])
    cuts, dropped = {}, set()
    free = [isinstance(size, str) for size in at.source.named(x.name)]
    for axis, i in enumerate(index):
        if isinstance(i, int):
            # From −1 on, an end of 0 would be the axis's beginning.
            start = i if free[axis] else i % shape[axis]
            cuts[axis] = (start, start + 1 if start != -1 else _LAST, 1)
            dropped.add(axis)
        elif i != slice(None):
            # From the end of an axis of any length as it was said, in ONNX as in Python.
            bounds = (i.start or 0, i.stop, i.step or 1)
            start, stop, stride = bounds if free[axis] else i.indices(shape[axis])
            cuts[axis] = (start, _LAST if i.stop is None else stop, stride)
    name = at.sliced(name, cuts) if cuts else name
    if not dropped:
        return name
    if at.free(output) > 1:
        return at.node("Squeeze", name, sorted(dropped))
    return at.node("Reshape", name, at.source.target(at.path, output.name))


def _stacked(at: At, tensors: Any, dim: int = 0) -> str:
    axis, names = int(dim) % len(at.shape(_output(at))), []
    for name in names_in(tensors):
        ref = Ref(name)
        value = _promoted(at, ref)
        if at.free(ref) > 1:
            names.append(at.node("Unsqueeze", value, [axis]))
            continue
        target = at.source.target(at.path, name)
        target.insert(axis, 1)
        names.append(at.node("Reshape", value, target))
    return at.node("Concat", *names, axis=axis)


def _padded(
    at: At, x: Ref, pad: Any = (), mode: str = "constant", value: float | None = None
) -> str | None:
    rank = len(at.shape(x))
    low, high = [0] * rank, [0] * rank
    # torch's pairs begin with the last axis.
    for i in range(len(pad) // 2):
        low[rank - 1 - i], high[rank - 1 - i] = int(pad[2 * i]), int(pad[2 * i + 1])
    if mode == "circular" and min(*low, *high) >= 0:
        return _wrapped(at, at.name(x), low, high)
    if mode not in _PADDINGS:
        return None
    value = float(value or 0.0)
    filler = [at.graph.constant(f"float_{value:g}", value)] if value else []
    sizes = [*low, *high]
    return at.node("Pad", x, sizes, *filler, mode=_PADDINGS[mode])


def _wrapped(at: At, name: str, low: list[int], high: list[int]) -> str:
    """Each axis between its own last and first values: OpenVINO has no Pad of mode "wrap"."""
    for axis, (before, after) in enumerate(zip(low, high, strict=True)):
        last = [at.sliced(name, {axis: (-before, _LAST, 1)})] if before else []
        first = [at.sliced(name, {axis: (0, after, 1)})] if after else []
        if last or first:
            name = at.node("Concat", *last, name, *first, axis=axis)
    return name


def _shuffled(at: At, x: Ref, count: Any) -> str:
    """Channel shuffle, or pixels that become channels."""
    name, count = at.name(x), int(count)
    target = at.source.target(at.path, _output(at).name)
    batch, channels, height, width = at.source.target(at.path, x.name)
    if at.step.called == "channel_shuffle":
        split, order = [batch, count, channels // count, height, width], [0, 2, 1, 3, 4]
    else:
        split = [batch, channels, height // count, count, width // count, count]
        order = [0, 1, 3, 5, 2, 4]
    turned = at.node("Transpose", at.node("Reshape", name, split), perm=order)
    return at.node("Reshape", turned, target)


def _repeated(at: At, x: Ref, first: Any, *more: Any) -> str:
    name, shape = at.name(x), at.shape(x)
    times = list(first) if isinstance(first, list | tuple) else [first, *more]
    if len(times) > len(shape):
        target = at.source.target(at.path, x.name)
        name = at.node("Reshape", name, [1] * (len(times) - len(shape)) + target)
    times = [1] * (len(shape) - len(times)) + times
    return at.node("Tile", name, times)


def _placed(at: At, x: Any, indices: Any, values: Any, accumulate: bool = False) -> str | None:
    """`index_put`: move the indexed axes to the front, ScatterND, move them back.

    Positions are one mask, of any number of axes, or indices. Other axes may be in front of and
    behind the indexed ones (`canvas[:, mask] = rows`), not between them. None where it has no form.
    """
    if not isinstance(x, Ref) or not isinstance(values, Ref) or accumulate:
        return None
    rank, source = len(at.shape(x)), at.source
    entries = [(axis, entry) for axis, entry in enumerate(indices) if entry is not None]
    first, refs = entries[0][0], [entry for _, entry in entries]
    masks = [source.dtype(ref.name) == torch.bool for ref in refs]
    axes = len(at.shape(refs[0])) if masks == [True] else len(refs)
    named, behind = source.named(x.name), list(range(first + axes, rank))
    order = [*range(first, first + axes), *range(first), *behind]
    around = [named[axis] for axis in order[axes:]]
    together = [axis for axis, _ in entries] == list(range(first, first + len(refs)))
    fixed = masks == [True] or not (any(masks) or source.free)
    if not together or not fixed or any(isinstance(size, str) for size in around):
        return None
    rows, shape, spread = (_placed_by_mask if masks == [True] else _indexed)(at, refs)
    wanted = at.node("Concat", around[:first], shape, around[first:], axis=0)
    updates = at.node("Expand", values, wanted)
    end = first + spread
    turned = [*range(first, end), *range(first), *range(end, end + len(behind))]
    inputs = [_transposed(at, at.name(x), order), rows, _transposed(at, updates, turned)]
    made = at.node("ScatterND", *inputs)
    return _transposed(at, made, [order.index(axis) for axis in range(rank)])


def _placed_by_mask(at: At, refs: list[Ref]) -> tuple[str, Any, int]:
    """Positions of a mask, one per row; the shape of its tensor; its number of axes."""
    found = at.node("NonZero", refs[0])
    rows = at.node("Transpose", found, perm=[1, 0])
    shape = at.node("Shape", found)
    return rows, at.node("Gather", shape, [1], axis=0), 1


def _indexed(at: At, refs: list[Ref]) -> tuple[str, Any, int]:
    """The same for indices, one tensor per axis; ScatterND takes int64 alone."""
    spread = np.broadcast_shapes(*map(at.shape, refs))
    wide = []
    for ref in refs:
        whole = at.source.dtype(ref.name) == torch.int64
        places = at.name(ref) if whole else at.node("Cast", ref, to=TYPES[torch.int64])
        wide.append(at.node("Expand", places, spread))
    parts = [at.node("Reshape", name, [*spread, 1]) for name in wide]
    return at.node("Concat", *parts, axis=-1), spread, len(spread)


def _transposed(at: At, name: str, order: list[int]) -> str:
    return name if order == sorted(order) else at.node("Transpose", name, perm=order)


def _slice_placed(
    at: At, x: Ref, src: Ref, dim: int = 0, start: Any = None, end: Any = None, step: int = 1
) -> str | None:
    axis = int(dim) % len(at.shape(x))
    if step != 1 or not all(isinstance(place, int | None) for place in (start, end)):
        return None
    return _between(at, x, at.name(src), axis, slice(start, end))


def _select_placed(at: At, x: Ref, src: Ref, dim: int, index: Any) -> str | None:
    axis = int(dim) % len(at.shape(x))
    if not isinstance(index, int) or at.free(src) > 1:
        return None
    target = at.source.target(at.path, src.name)
    target.insert(axis, 1)
    row = at.node("Reshape", src, target)
    return _between(at, x, row, axis, slice(index, index + 1 or None))


def _between(at: At, x: Ref, part: str, axis: int, place: slice) -> str | None:
    """`x` with a part of one axis, of a known size, replaced."""
    size = at.source.named(x.name)[axis]
    if not isinstance(size, int):
        return None
    start, end, _ = place.indices(size)
    sides = [(cut, (cut[1] > cut[0])) for cut in ((0, start, 1), (end, size, 1))]
    before, after = ([at.sliced(at.name(x), {axis: cut})] if held else [] for cut, held in sides)
    return at.node("Concat", *before, part, *after, axis=axis) if before or after else part


def _copied(at: At, x: Ref, src: Ref, non_blocking: bool = False) -> str | None:
    """What is written over all of `x`."""
    one, other = ((at.shape(ref), at.source.dtype(ref.name)) for ref in (x, src))
    if one != other:
        return None
    sizes = at.source.named(x.name)
    if sizes == at.source.named(src.name):
        return at.name(src)
    # Sizes that agree by the forward's own condition alone, such as a mask's rows and boxes.
    known = not any(isinstance(size, str) for size in sizes)
    return at.node("Expand", src, list(sizes) if known else at.node("Shape", x))


_FORMS: dict[str, Form] = {
    "cat": _joined, "stack": _stacked, "expand": _expanded, "getitem": _got, "narrow": _narrowed,
    "select": _selected, "pad": _padded, "pixel_shuffle": _pixels, "index_put": _placed,
    "slice_scatter": _slice_placed, "select_scatter": _select_placed, "copy": _copied,
    **dict.fromkeys(("split", "chunk", "unbind"), _parts),
    **dict.fromkeys(("pixel_unshuffle", "channel_shuffle"), _shuffled),
    **dict.fromkeys(("repeat", "tile"), _repeated),
}  # fmt: skip
