"""Numbers that a program takes from tensors, and branches that depend on them.

A file computes these numbers where the program does. A branch or a loop that depends on one has no
form in a file: the program was captured with the example's number and requires it of every frame
(`require`). Files for ONNX Runtime have these requirements as nodes that end a run. Other engines
have no such node: there only the number of frames, as in ``coords[:, 0].max() + 1``, is allowed, a
constant of a file like its input sizes.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from bevquant_export._errors import UnsplitError
from bevquant_graph import TENSOR_FORMS, op_spec
from bevquant_int8sim import IntegerModel
from bevquant_int8sim.program import Coordinates, NumberCall, Program, Ref, Step, names_in

_COORDS = ("getattr", "convolved_coords")
_LARGEST = ("max", "amax")
_SELECTED = {(1, 0): "column", (0, 0): "first", (0, -1): "last"}
_SIGNS = {"add": 1, "sub": -1}
_BATCH_INDEX = (["largest", "column"], ["last", "column"], ["first", "last"])
_FREE: Mapping[str, Any] = {}


def taken_numbers(program: Program, free: Mapping[str, Any] = _FREE) -> set[str]:
    """Numbers that are computed from values of the inputs, or from free sizes.

    `free` has the sizes of tensors, with a name in place of a free size.
    """
    given = (*names_in(program.signature), *program.sparse_inputs, *program.sparse_inputs.values())
    # Python's numbers among the arguments are constants of a file.
    values = program.values
    tensors = {name for name in given if name not in values or values[name].form != "number"}
    numbers: set[str] = set()
    for step in program.steps:
        what = step.called
        read = names_in((step.args, step.kwargs))
        reached = any(name in tensors or name in numbers for name in read)
        number = isinstance(step, NumberCall)
        if number and what == "size" and isinstance(step.args[0], Ref):
            sizes = free.get(step.args[0].name, ())
            if step.args[1] < len(sizes) and isinstance(sizes[step.args[1]], str):
                numbers.update(step.outputs)
        elif number and what not in _COORDS:
            numbers.update(step.outputs if reached else ())
        elif reached and (what != "getattr" or step.args[1] == "indices"):
            tensors.update(step.outputs)
    return numbers


def decisions(model: IntegerModel | None) -> Iterator[Step]:
    """Requirements that a question of the forward has the example's answer (`Graph.answers`)."""
    if model is None or model.source is None or not model.source.graph.decided:
        return
    answers = model.source.graph.answers
    for step in model.program.steps:
        if step.called == "require" and not answers.isdisjoint(step.outputs):
            yield step


def refuse_decisions(model: IntegerModel, who: str, *, rows: bool = False) -> None:
    """Refuse a program with a branch on another number than that of the frames.

    With `rows`, branches on a number of rows are accepted, which the file checks.
    """
    makers = {name: step for step in model.program.steps for name in step.outputs}
    for step in decisions(model):
        if rows and not any(_items(step, makers)):
            continue
        if not counts_frames(model.program, step):
            raise UnsplitError(
                f"{who}: {step.args[1]}: the forward decides by a number out of this tensor, or by "
                "its number of rows (a branch, a loop, a size that must be fixed). The file would "
                f"hold the example's decision for every frame. Keep it a tensor ({TENSOR_FORMS}, "
                "topk(min(k, len(x)))), make it a Python number or a buffer of the model, or set "
                "the attribute that switches it off",
                step.args[1],
            )


def refuse_computed_grids(model: IntegerModel, who: str) -> None:
    """Refuse a program whose grid of voxels is computed from values of a frame."""
    numbers = taken_numbers(model.program)
    for step in model.program.steps:
        if not isinstance(step, Coordinates):
            continue
        computed = numbers.intersection(names_in(step.args[1]))
        if computed and model.source is not None:
            graph = model.source.graph
            nodes = [node for node in graph.operations if node.name in computed]
            places = ", ".join(dict.fromkeys(map(graph.describe, nodes)))
            raise ValueError(
                f"{who}: the spatial_shape of a sparse tensor is computed from values of a frame "
                f"({places}). The file would hold the example's grid for every frame. Give the "
                "sparse tensor a fixed spatial_shape"
            )


def counts_frames(program: Program, requirement: Step) -> bool:
    """Whether a requirement is about the largest, or last, batch index of a table of coordinates.

    That is column 0 of a tensor ``[rows, columns]``.
    """
    makers = {name: step for step in program.steps for name in step.outputs}
    items = list(_items(requirement, makers))
    return bool(items) and all(_past_batch_index(step, makers) is not None for step in items)


def frame_tables(model: IntegerModel | None) -> dict[str, tuple[str, int]]:
    """Tables of coordinates that a program reads its number of frames from.

    Each with the number, and by how much it is larger than the last batch index.
    """
    found: dict[str, tuple[str, int]] = {}
    if model is None:
        return found
    makers = {name: step for step in model.program.steps for name in step.outputs}
    for requirement in decisions(model):
        of_frames = counts_frames(model.program, requirement)
        for item in _items(requirement, makers) if of_frames else ():
            name = item.inputs[0]
            while (step := makers.get(name)) is not None:
                name = step.inputs[0]
            past = _past_batch_index(item, makers) or 0
            found[name.partition(":")[0]] = item.outputs[0], past
    return found


def _items(step: Step, makers: Mapping[str, Step]) -> Iterator[Step]:
    """Operations that take numbers from tensors, among the producers of a requirement."""
    pending, seen = [*reversed(step.inputs)], set[str]()
    while pending:
        name = pending.pop()
        maker = None if name in seen else makers.get(name)
        seen.add(name)
        if maker is not None and maker.called == "item":
            yield maker
        elif maker is not None:
            pending += reversed(maker.inputs)


def _past_batch_index(item: Step, makers: Mapping[str, Step]) -> int | None:
    """A number minus the largest, or the last, entry of a table's first column.

    ``(coords[-1, 0] + 1).int()`` gives 1; None for other numbers.
    """
    step, moves, past = makers.get(item.inputs[0]), [], 0
    while step is not None:
        what = step.called
        if what in _LARGEST and len(step.args) == 1:
            moves.append("largest")
        elif what == "select":
            moves.append(_SELECTED.get(step.args[1:], ""))
        elif what in _SIGNS and not step.kwargs and type(step.args[1]) is int:
            past += _SIGNS[what] * step.args[1]
        elif not (op_spec(what).casts or op_spec(what).kind == "identity"):
            break
        step = makers.get(step.inputs[0])
    return past if moves in _BATCH_INDEX else None
