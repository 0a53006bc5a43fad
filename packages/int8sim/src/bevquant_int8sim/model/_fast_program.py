"""The program that a plain call runs: the same results by fewer and faster steps.

Nothing of it can be seen from outside: whoever looks at intermediate values runs the plain program.
Voxels are put in the order of their coordinates (`sort_rows`): neighbours then lie side by side in
memory, which makes sparse convolutions a good tenth faster. It is done for coordinates that enter a
program, if all that leaves the sparse part of it goes through `to_dense`: the grid does not show
the order of the rows.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from bevquant_int8sim.model._coords import Coords, dense
from bevquant_int8sim.model._float_sparse import FloatSparseConv
from bevquant_int8sim.model._form import Integers
from bevquant_int8sim.model._program import Program, Ref, Step, Value, names_in, replaced

# Steps that treat every row alike.
_ROW_BY_ROW = frozenset({"quantize", "requantize", "dequantize", "relu", "add"})


def fuse_residuals(program: Program) -> Program:
    """Let convolutions add what is added to their output, where that is exact.

    Only the addition may read what the convolution makes. A sparse convolution stores int8 of the
    other operand's scale, and that operand must exist before; a dense one would keep int32
    accumulators, and runs where the addition stood.
    """
    reads = Counter(name for step in program.steps for name in step.inputs)
    reads.update(names_in(program.result))
    makers = {name: i for i, step in enumerate(program.steps) for name in step.outputs}
    steps: list[Step | None] = list(program.steps)
    for number, step in enumerate(program.steps):
        if step.op != "add" or step.attributes["out"] != "int8" or "ceiling" in step.attributes:
            continue
        if step.rounding:  # of the sum, and not of what is added
            continue
        for mine, other in (step.args, step.args[::-1]):
            at = makers.get(mine.name, -1)
            before = makers.get(other.name, -1) < at
            conv = steps[at] if at >= 0 and reads[mine.name] == 1 else None
            if conv is not None and before and _fits(conv, step, program, mine, other):
                # The sum is now made where the convolution stood, before everything that reads it.
                steps[at] = _joined(conv, step, program, mine, other)
                steps[number] = None
                break
            if conv is not None and _fits_dense(conv, step, program, mine, other):
                steps[at], steps[number] = None, _joined_dense(conv, step, mine, other)
                break
    return replace(program, steps=tuple(step for step in steps if step is not None))


def _fits(conv: Step, add: Step, program: Program, mine: Ref, other: Ref) -> bool:
    forms: list[Any] = [program.values[ref.name].form for ref in (mine, other)]
    bounds = ("relu", "ceiling", "residual")
    return (
        conv.op == "sparse_conv"
        and len(conv.args) == 2
        and conv.attributes["out"] == "int8"
        and not any(conv.attributes.get(name) for name in bounds)
        and all(isinstance(form, Integers) and form.bits == 8 for form in forms)
        and forms[0].scale == forms[1].scale
        and conv.attributes["narrow"] == add.attributes["narrow"]
        and add.attributes["bits"] == 8
    )


def _joined(conv: Step, add: Step, program: Program, mine: Ref, other: Ref) -> Step:
    form: Any = program.values[mine.name].form
    attributes = {
        **conv.attributes,
        "relu": add.attributes["relu"],
        "sum_multiplier": form.scale / add.attributes["scale"],
    }
    outputs = (add.outputs[0], *conv.outputs[1:])
    return replace(conv, args=(*conv.args, other), outputs=outputs, attributes=attributes)


def _fits_dense(conv: Step, add: Step, program: Program, mine: Ref, other: Ref) -> bool:
    form = program.values[other.name].form
    own, added = (add.tensors[f"scale{add.args.index(ref)}"] for ref in (mine, other))
    return (
        conv.op == "conv"
        and len(conv.args) == 1
        and conv.attributes["out"] == "int32"
        and not any(conv.attributes.get(name) for name in ("relu", "ceiling"))
        and isinstance(form, Integers)
        and form.bits <= 8
        and add.attributes["bits"] == 8
        and add.attributes["axis"] == conv.attributes["channel_axis"]
        and own.dim() == 1  # else the addition rounds another product
        and added.dim() == 0
    )


def _joined_dense(conv: Step, add: Step, mine: Ref, other: Ref) -> Step:
    own, added = (
        add.tensors[f"scale{add.args.index(ref)}"] / add.attributes["scale"]
        for ref in (mine, other)
    )
    settings = {name: add.attributes[name] for name in ("out", "relu", "narrow")}
    return replace(
        conv,
        args=(*conv.args, other),
        outputs=add.outputs,
        attributes={**conv.attributes, **settings, "addend_multiplier": float(added)},
        tensors={**conv.tensors, "multiplier": own},
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
    kept = (s for s in steps if s.op != "dequantize" or reads[s.outputs[0]])
    return replace(program, steps=tuple(kept), values=values)


def _parts(step: Step, makers: dict[str, Step], program: Program) -> list[Step]:
    """The dequantizations of one scale whose results a step concatenates; none otherwise."""
    if step.op != "move" or step.attributes["what"] != "cat":
        return []
    found = [makers.get(name) for name in step.inputs]
    parts = [part for part in found if part is not None and part.op == "dequantize"]
    if len(parts) < len(found) or any(part.attributes["relu"] for part in parts):
        return []
    forms = [program.values[part.args[0].name].form for part in parts]
    same = all(isinstance(form, Integers) and form == forms[0] for form in forms)
    return parts if parts and same and parts[0].tensors["scale"].dim() == 0 else []


def sort_rows(program: Program) -> Program:
    """The program with its rows sorted, or itself where the order could be seen."""
    if any(_goes_back(step) for step in program.steps):
        return program
    enter = {*names_in(program.signature), *program.sparse_inputs.values()}
    for step in program.steps:
        if step.op == "sites" and enter.issuperset(step.inputs):
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
            if step.op == "sparse_conv":
                self._grow_by_convolution(step)
            elif step.op in _ROW_BY_ROW and self.features.intersection(
                (*step.inputs, *step.outputs)
            ):
                self.features.update((*step.inputs, *step.outputs))
            elif step.op == "host" and self.coords.intersection(step.inputs):
                self.metadata.update(step.outputs)
        return size < len(self.coords) + len(self.features) + len(self.metadata)

    def _grow_by_convolution(self, step: Step) -> None:
        features, coords, *residual = (ref.name for ref in step.args)
        if coords in self.coords:
            self.features.add(features)
            if step.attributes["subm"]:
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
            if step.op == "host" and self.features.intersection(step.inputs):
                return False
            if step.op == "sparse_conv" and not self._stands_here(step):
                return False
            known = step.op in ("sparse_conv", "sites", "host") or step.op in _ROW_BY_ROW
            if not known and step.function is not dense:
                return False
        return True

    def _stands_here(self, step: Step) -> bool:
        """Whether a convolution that reads or makes such values does so on these voxels.

        Others may lie row by row on coordinates that the forward made of these, in their order.
        """
        features, coords, *residual = (ref.name for ref in step.args)
        made = self.features.intersection((step.outputs[0], *residual))
        reads = features in self.features and coords not in self.coords
        return not reads and (not made or step.outputs[1] in self.coords)


def _goes_back(step: Step) -> bool:
    """Whether an inverse convolution returns to rows that came in."""
    if isinstance(step.module, FloatSparseConv):
        return step.module.geometry.inverse
    return bool(step.attributes.get("inverse"))


def _with_sorting(program: Program, entry: Step, features: set[str]) -> Program:
    """Sort behind the entry of the coordinates, and the features before anything reads them."""
    coords, order = entry.outputs[0], f"{entry.outputs[0]}.order"
    first = replace(entry, op="sorted_sites", outputs=(coords, order))
    values = {**program.values, order: Value("host", order)}
    takes, renamed = [], {}
    for name in sorted(features):
        renamed[name] = f"{name}.sorted"
        values[renamed[name]] = replace(values[name], source=f"{name}.sorted")
        attributes = {"what": "take_rows"}
        takes.append(
            Step(
                "move", entry.path, (Ref(name), Ref(order)), (renamed[name],),
                attributes=attributes, function=take_rows,
            )
        )  # fmt: skip

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
    """Coordinates in ascending order, and the row that each one had.

    Coordinates of a form or a size that has no keys of 64 bits stay as they are, and the order is
    ``None``; coordinates out of range or repeated are left for the rulebook to name.
    """
    sizes = [int(batch_size), *(int(n) for n in spatial_shape)]
    bits = max(len(indices), 1).bit_length()
    fits = indices.device.type == "cpu" and indices.dtype in (torch.int32, torch.int64)
    fits = fits and indices.dim() == 2 and indices.shape[1] == len(sizes)
    if not fits or not len(indices) or float(np.prod(sizes, dtype=float)) * 2.0**bits >= 2.0**62:
        return Coords(indices, spatial_shape, batch_size), None
    rows = indices.numpy()
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
