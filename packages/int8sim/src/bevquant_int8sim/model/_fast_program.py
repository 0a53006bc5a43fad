"""The program that a plain call runs: the same results by fewer and faster steps.

Nothing of it can be seen from outside: whoever looks at intermediate values runs the plain program.
Voxels are put in the order of their coordinates (`sort_rows`): neighbours then lie side by side in
memory, which makes sparse convolutions a good tenth faster. It is done for coordinates that enter a
program, if all that leaves the sparse part of it goes through `to_dense`: the grid does not show
the order of the rows.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from bevquant_int8sim.model._coords import Coords, dense
from bevquant_int8sim.model._float_sparse import FloatSparseConv
from bevquant_int8sim.model._form import Integers
from bevquant_int8sim.model._integer_steps import Add, Dequantize, Quantize, Relu, Requantize
from bevquant_int8sim.model._program import Program, Value
from bevquant_int8sim.model._step import (
    Coordinates,
    Given,
    LayoutCall,
    NumberCall,
    Ref,
    Step,
    names_in,
    replaced,
)
from bevquant_int8sim.model._weighted_steps import Conv, SparseConv

_ROW_BY_ROW = (Quantize, Requantize, Dequantize, Relu, Add)
"""Steps that treat every row alike."""


def fuse_residuals(program: Program) -> Program:
    """Let convolutions add what is added to their output, where that is exact."""
    reads = Counter(name for step in program.steps for name in step.inputs)
    reads.update(names_in(program.result))
    makers = {name: i for i, step in enumerate(program.steps) for name in step.outputs}
    steps: list[Step | None] = list(program.steps)
    for number, step in enumerate(program.steps):
        if not isinstance(step, Add) or not _is_int8(step.form) or step.ceiling is not None:
            continue
        if not step.is_default:  # a rounding of the sum, and not of its operands
            continue
        for mine, other in (step.args, step.args[::-1]):
            at = makers.get(mine.name, -1)
            before = makers.get(other.name, -1) < at
            # Only the addition may read what the convolution makes.
            conv = steps[at] if at >= 0 and reads[mine.name] == 1 else None
            # It stores int8 of the other operand's scale. The sum is made where the convolution
            # stood, before everything that reads it, so that operand must exist by then.
            if isinstance(conv, SparseConv) and before and _fits(conv, step, program, other):
                steps[at] = _joined(conv, step, other)
                steps[number] = None
                break
            # It would keep int32 accumulators, and runs where the addition stood.
            if isinstance(conv, Conv) and _fits_dense(conv, step, program, mine, other):
                steps[at], steps[number] = None, _joined_dense(conv, step, mine, other)
                break
    return replace(program, steps=tuple(step for step in steps if step is not None))


def _is_int8(form: object) -> bool:
    return isinstance(form, Integers) and form.dtype == torch.int8


def _fits(conv: SparseConv, add: Add, program: Program, other: Ref) -> bool:
    form, added = conv.form, program.values[other.name].form
    return (
        len(conv.args) == 2
        and not conv.relu
        and conv.ceiling is None
        and isinstance(form, Integers)
        and isinstance(added, Integers)
        and form.bits == added.bits == add.integers.bits == 8
        and form.scale == added.scale
        and form.narrow == add.integers.narrow
    )


def _joined(conv: SparseConv, add: Add, other: Ref) -> Step:
    return replace(
        conv,
        args=(*conv.args, other),
        outputs=(add.outputs[0], *conv.outputs[1:]),
        form=add.form,
        relu=add.relu,
        sum_multiplier=conv.integers.scale / add.integers.scale,
    )


def _fits_dense(conv: Conv, add: Add, program: Program, mine: Ref, other: Ref) -> bool:
    form = program.values[other.name].form
    own, added = (add.scales[add.args.index(ref)] for ref in (mine, other))
    return (
        len(conv.args) == 1
        and conv.keeps_accumulators
        and isinstance(form, Integers)
        and form.bits <= 8
        and add.integers.bits == 8
        and add.axis == conv.channel_axis
        and own.dim() == 1  # else the addition rounds another product
        and added.dim() == 0
    )


def _joined_dense(conv: Conv, add: Add, mine: Ref, other: Ref) -> Step:
    own, added = (add.scales[add.args.index(ref)] / add.integers.scale for ref in (mine, other))
    return replace(
        conv,
        args=(*conv.args, other),
        outputs=add.outputs,
        form=add.form,
        relu=add.relu,
        multiplier=own,
        addend_multiplier=float(added),
    )


def dequantize_late(program: Program) -> Program:
    """Concatenate integers of one scale and dequantize the result, not the parts.

    A part that has other readers stays a float for these.
    """
    makers = {name: step for step in program.steps for name in step.outputs}
    values, steps = dict(program.values), list[Step]()
    for step in program.steps:
        parts = _parts(step, makers, program)
        if not parts:
            steps.append(step)
            continue
        integers = step.outputs[0] + ":integers"
        sources = {part.outputs[0]: part.args[0] for part in parts}
        args = replaced(step.args, lambda ref, known=sources: known[ref.name])
        steps.append(replace(step, args=args, outputs=(integers,)))
        steps.append(replace(parts[0], args=(Ref(integers),), outputs=step.outputs))
        values[integers] = values[parts[0].args[0].name]
    reads = Counter(name for step in steps for name in step.inputs)
    reads.update(names_in(program.result))
    kept = (s for s in steps if not isinstance(s, Dequantize) or reads[s.outputs[0]])
    return replace(program, steps=tuple(kept), values=values)


def _parts(step: Step, makers: dict[str, Step], program: Program) -> list[Dequantize]:
    """The dequantizations of one scale whose results a step concatenates; none otherwise."""
    if not isinstance(step, LayoutCall) or step.name != "cat":
        return []
    found = [makers.get(name) for name in step.inputs]
    parts = [part for part in found if isinstance(part, Dequantize)]
    if len(parts) < len(found) or any(part.relu for part in parts):
        return []
    forms = [program.values[part.args[0].name].form for part in parts]
    same = all(isinstance(form, Integers) and form == forms[0] for form in forms)
    return parts if parts and same and parts[0].scale.dim() == 0 else []


def sort_rows(program: Program) -> Program:
    """The program with its rows sorted, or itself where the order could be seen."""
    if any(_goes_back(step) for step in program.steps):
        return program
    enter = {*names_in(program.signature), *program.sparse_inputs.values()}
    for step in program.steps:
        if isinstance(step, Coordinates) and enter.issuperset(step.inputs):
            rows = _Rows(program, step.outputs[0])
            if rows.hidden:
                program = _with_sorting(program, step, rows.features & enter)
    return program


class _Rows:
    """Values with one row per voxel of some coordinates, and whether their order stays hidden.

    Attributes:
        features: Names of these values.
        hidden: Whether nothing but `to_dense` and the sparse layers reads them.
    """

    def __init__(self, program: Program, coords: str) -> None:
        self.program = program
        self.coords = {coords}
        self.features: set[str] = set()
        self.metadata: set[str] = set()
        while self._grow():
            pass
        self.hidden = self._is_hidden()

    def _grow(self) -> bool:
        size = len(self.coords) + len(self.features) + len(self.metadata)
        for step in self.program.steps:
            if isinstance(step, SparseConv):
                self._grow_by_convolution(step)
            elif isinstance(step, _ROW_BY_ROW) and self.features.intersection(
                (*step.inputs, *step.outputs)
            ):
                self.features.update((*step.inputs, *step.outputs))
            elif isinstance(step, NumberCall) and self.coords.intersection(step.inputs):
                self.metadata.update(step.outputs)
        return size < len(self.coords) + len(self.features) + len(self.metadata)

    def _grow_by_convolution(self, step: SparseConv) -> None:
        features, coords, *residual = (ref.name for ref in step.args)
        if coords in self.coords:
            self.features.add(features)
            if step.geometry.subm:
                self.coords.add(step.outputs[1])
        if step.outputs[1] in self.coords:
            self.features.update((step.outputs[0], *residual))

    def _is_hidden(self) -> bool:
        touched = self.coords | self.features | self.metadata
        if touched.intersection(names_in(self.program.result)):
            return False
        for step in self.program.steps:
            if not touched.intersection((*step.inputs, *step.outputs)):
                continue
            if isinstance(step, NumberCall) and self.features.intersection(step.inputs):
                return False
            if isinstance(step, SparseConv) and not self._stands_here(step):
                return False
            known = isinstance(step, (SparseConv, Coordinates, NumberCall, *_ROW_BY_ROW))
            if not known and step.target is not dense:
                return False
        return True

    def _stands_here(self, step: Step) -> bool:
        """Whether a convolution that reads or makes such values does so on these voxels."""
        features, coords, *residual = (ref.name for ref in step.args)
        made = self.features.intersection((step.outputs[0], *residual))
        # Others may lie row by row on coordinates that the forward made of these, in their order.
        reads = features in self.features and coords not in self.coords
        return not reads and (not made or step.outputs[1] in self.coords)


def _goes_back(step: Step) -> bool:
    """Whether an inverse convolution returns to rows that came in."""
    if isinstance(step.target, FloatSparseConv):
        return step.target.geometry.inverse
    return isinstance(step, SparseConv) and step.geometry.inverse


@dataclass(frozen=True, eq=False)
class _SortedCoordinates(Coordinates):
    """Sorted coordinates, and the row that each one had."""

    makes = 2

    def run(self, args: Given, kwargs: dict[str, Any], backend: str) -> Given:
        """As `sorted_coords`."""
        return sorted_coords(*args)


def _with_sorting(program: Program, entry: Step, features: set[str]) -> Program:
    """Sort behind the entry of the coordinates, and the features before anything reads them."""
    coords, order = entry.outputs[0], f"{entry.outputs[0]}.order"
    first = _SortedCoordinates(entry.path, entry.args, (coords, order), entry.kwargs)
    values = {**program.values, order: Value("number", order)}
    takes, renamed = [], {}
    for name in sorted(features):
        renamed[name] = f"{name}.sorted"
        values[renamed[name]] = replace(values[name], source=f"{name}.sorted")
        called = entry.path, (Ref(name), Ref(order)), (renamed[name],)
        takes.append(LayoutCall(*called, name="take_rows", function=take_rows))

    def read(ref: Ref) -> Ref:
        return Ref(renamed.get(ref.name, ref.name)) if isinstance(ref, Ref) else ref

    rest = [
        replace(step, args=replaced(step.args, read), kwargs=replaced(step.kwargs, read))
        for step in program.steps
        if step.outputs != entry.outputs
    ]
    return replace(program, steps=(first, *takes, *rest), values=values)


def sorted_coords(
    indices: Tensor, spatial_shape: list[int], batch_size: int
) -> tuple[Coords, Tensor | None]:
    """Coordinates in ascending order, and the row that each one had; None where they stay."""
    sizes = [int(batch_size), *(int(n) for n in spatial_shape)]
    bits = max(len(indices), 1).bit_length()
    fits = indices.device.type == "cpu" and indices.dtype in (torch.int32, torch.int64)
    fits = fits and indices.dim() == 2 and indices.shape[1] == len(sizes)
    # Keys of 64 bits hold cell and row.
    if not fits or not len(indices) or float(np.prod(sizes, dtype=float)) * 2.0**bits >= 2.0**62:
        return Coords(indices, spatial_shape, batch_size), None
    rows = indices.numpy()
    # The rulebook names these, and voxels that are repeated.
    if (rows < 0).any() or (rows >= np.array(sizes)).any():
        return Coords(indices, spatial_shape, batch_size), None
    keys = rows[:, 0].astype(np.int64)
    for column, size in enumerate(sizes[1:], start=1):
        keys = keys * size + rows[:, column]
    # Key and row in one number: numpy sorts plain integers several times faster than an argsort.
    packed = np.sort(keys << bits | np.arange(len(keys)))
    keys = packed >> bits
    if (keys[1:] == keys[:-1]).any():
        return Coords(indices, spatial_shape, batch_size), None
    order = torch.from_numpy(packed & ((1 << bits) - 1))
    return Coords(indices[order], spatial_shape, batch_size), order


def take_rows(features: Tensor, order: Tensor | None) -> Tensor:
    """Rows in that order; another number of them stays as it is, for the layer to name."""
    if order is None or len(features) != len(order):
        return features
    return features.index_select(0, order)
