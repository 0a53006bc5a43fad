"""From the steps of an integer model to operators of a file, with the readings of each tensor."""

from __future__ import annotations

import re
from collections import Counter
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from bevquant_export.sparse._beginning import (
    REMEDY,
    Beginning,
    coord_inputs,
    for_coords,
    is_float_conv,
    location,
    no_operator,
)
from bevquant_export.sparse._channel_permutations import Selections
from bevquant_export.sparse._steps import Between
from bevquant_graph import op_spec
from bevquant_int8sim import IntegerModel
from bevquant_int8sim.program import (
    Add,
    Constant,
    Coordinates,
    Dequantize,
    FloatCall,
    FloatRelu,
    Integers,
    LayoutCall,
    Linear,
    NumberCall,
    Quantize,
    Relu,
    Requantize,
    SparseConv,
    Step,
    names_in,
)

_CONVERSIONS = (Quantize, Requantize, Dequantize, Relu, FloatRelu)
_MATRIX = ("mm", "matmul")
_BEHIND = (1, 2, -1, -2)  # axes behind the rows of three


@dataclass(frozen=True)
class Reading:
    """A tensor as one consumer needs it."""

    tensor: str  # Name: the value that its producer computed
    relu: bool  # After a ReLU
    form: Any  # ``"float"``, or integers with `scale`, `bits`, `low`
    by: str  # The consumer


@dataclass(frozen=True, eq=False)
class Draft:
    """An operator to be written: a conv, an add, a scatter, a permute or a reshape.

    Also: concat and fold (a sum over groups of channels), which become 1×1×1 convolutions for
    libspconv (`with_channel_permutations`); a linear layer on rows of voxels; an affine map of each
    channel, ``x · factor + shift``, with both numbers in `constants`; a product with a matrix
    ``[out_channels, in_channels]`` in `constants`. Where it stands for two steps, `first` is the
    first one's result. In portable files only: a pool, and steps, described by `between`.
    """

    kind: str
    step: Step
    reads: tuple[Reading, ...]
    y: str
    constants: tuple[Tensor, ...] = ()
    first: str = ""
    between: Between | None = None


@dataclass(frozen=True, eq=False)
class Followed:
    """Operators in order, the tensor of the input features, and the results.

    `results` are the values of the program that `outputs` read. Inputs that the model returns
    unchanged (a batch_dict) and computations on coordinates alone are not part of the file, nor are
    the steps in `before`, which compute the features of the voxels. `features` is a name for these.
    """

    drafts: tuple[Draft, ...]
    input: str
    outputs: tuple[Reading, ...]
    results: tuple[str, ...]
    before: tuple[str, ...] = ()
    features: str = "features"


def named(step: Step) -> str:
    """Name of a step in messages."""
    name = step.label
    return f"{step.path} ({name})" if step.path else f"{name} in the model's forward"


class Follower:
    """Reads every step as an operator of the dialect, from the beginning of the file on."""

    portable = False  # the dialect, for messages

    def __init__(self, model: IntegerModel, begins: Beginning | None) -> None:
        self.program, self.source = model.program, model.source
        self.made = {name for step in model.steps for name in step.outputs}
        self.holds: dict[str, tuple[str, bool]] = {}  # value to tensor and whether behind a ReLU
        self.input = "" if begins is None else begins.features
        if begins is not None:
            self.holds[self.input] = (self.input, False)
        steps = () if begins is None else begins.steps
        self.before = tuple(s for s in steps if not isinstance(s, Constant | NumberCall))
        self.left_out = {name for step in self.before for name in step.outputs}
        relus = (s for s in self.before if s.outputs == (self.input,) and isinstance(s, FloatRelu))
        self.without_relu = next((s.args[0].name for s in relus), "")
        self.at: Step | None = None  # the current step
        self.drafts: list[Draft] = []
        self.dense: set[str] = set()  # tensors that are not on voxels
        self.rounded: dict[str, str] = {}  # floats to the integers they come from
        self.constants: dict[str, Tensor] = {}
        self.selected = Selections(model, self.constants)
        self.readers = Counter(name for step in self.program.steps for name in step.inputs)
        self.readers.update(names_in(self.program.result))
        self.of_coords = coord_inputs(self.program, self.made)

    def run(self) -> Followed:
        """Read all steps."""
        coords = for_coords(self.program)
        for step in self.program.steps:
            self.at = step
            known = step.outputs[0] in coords or step.outputs[0] in self.left_out
            if not known and not self._only_coords(step):
                self._step(step)
        results = [
            name
            for name in names_in(self.program.result)
            if self._is_tensor(name) and name in self.made - self.left_out - self.of_coords
        ]
        outputs = tuple(self._result(name) for name in results)
        if not self.input:
            raise ValueError("export_sparse_onnx: nothing in the model reads voxels' features")
        before = tuple(f"{named(s)}{location(self.source, s)}" for s in self.before)
        return Followed(
            tuple(self.drafts), self.input, outputs, tuple(results), before, self._features()
        )

    def _features(self) -> str:
        """Name of the file's input: computed features differ from the model's own input."""
        if not self.before:
            return "features"
        maker = next((s for s in self.before if self.input in s.outputs), self.before[-1])
        return re.sub(r"\W", "_", maker.label) + "_features"

    def _result(self, name: str) -> Reading:
        return self._read(name, "the model's result")

    def _only_coords(self, step: Step) -> bool:
        """Whether a step depends on coordinates alone: consumers of coordinates compute it too."""
        if isinstance(step, Constant):
            self.constants[step.outputs[0]] = step.value
        if not isinstance(step, FloatCall | LayoutCall):
            return False
        read = [name for name in step.inputs if name not in self.constants]
        before = self.of_coords | (self.left_out - {self.input})
        hosts = [not self._is_tensor(name) or name in before for name in read]
        if not read or not all(hosts):
            return False
        self.of_coords.update(step.outputs)
        return True

    def _is_tensor(self, name: str) -> bool:
        return self.program.values[name].form not in ("coordinates", "number")

    def _step(self, step: Step) -> None:
        spec, what = op_spec(step.called), step.called
        is_float, moves = isinstance(step, FloatCall), isinstance(step, LayoutCall)
        if isinstance(step, NumberCall | Coordinates | Constant):
            return  # the consumer of a constant reports it
        form = self.program.values[step.outputs[0]].form
        if isinstance(form, Integers) and form.unsigned:
            raise ValueError(
                f"export_sparse_onnx: {named(step)} makes unsigned integers, 0…255; the engine has "
                "signed ones: quantize with unsigned=False and calibrate"
            )
        if step.clamps[1] is not None:
            raise ValueError(
                f"export_sparse_onnx: {named(step)} is followed by a ReLU6; the engine has "
                '"ReLU" and "None" only: replace it by nn.ReLU'
            )
        if isinstance(step, _CONVERSIONS):
            self._pass(step)
        elif isinstance(step, SparseConv) or is_float_conv(step):
            self._draft("conv", step, 1)
        elif isinstance(step, Linear) and self._on_voxels(step.args[0]):
            self._draft("linear", step, 1)
        elif is_float and self._is_affine(step, spec.name):
            self._affine(step, spec.name)
        elif is_float and what in _MATRIX and self._is_matrix(step):
            matrix = self.constants[step.args[1].name].detach().float()
            self._check_half(step, matrix)
            self._append("matrix", step, (self._operand(step.args[0], step),), (matrix.t(),))
        elif isinstance(step, Add) or (is_float and spec.kind == "add"):
            self._draft("add", step, 2)
        elif what == "cat" and _along_channels(step):
            self._concatenation(step)
        elif moves and self._of_channels(step) and self.selected.follow(step):
            pass  # its consumer reports it
        elif what == "sum" and self._sums_groups(step):
            self._append("fold", step, (self._groups(step),))
        elif moves and what == "to_dense":
            self._draft("scatter", step, 1)
            self.dense.add(step.outputs[0])
        elif moves and spec.layout == "permute":
            self._draft("permute", step, 1)
            self.dense.add(step.outputs[0])
        elif moves and spec.layout == "reshape" and not spec.like:
            self._draft("reshape", step, 1)
            self.dense.add(step.outputs[0])
        else:
            self._unfollowed(step)

    def _unfollowed(self, step: Step) -> None:
        where = f"{named(step)}{location(self.source, step)}"
        reads_map = self._reads_map(step)
        raise no_operator(step, where, reads_map=reads_map, portable=self.portable)

    def _reads_map(self, step: Step) -> bool:
        """Whether it reads a result of ``dense()``."""
        return any(name in self.holds and self.holds[name][0] in self.dense for name in step.inputs)

    def _pass(self, step: Step) -> None:
        """Another form of the same tensor."""
        if step.args[0].name == self.without_relu and step.clamps[0]:
            self.holds[step.outputs[0]] = (self.input, False)  # the file begins behind the ReLU
            return
        tensor, relu = self._tensor(step.args[0].name, named(step))
        self.holds[step.outputs[0]] = (tensor, relu or step.clamps[0])
        before = step.args[0].name
        if isinstance(step, Dequantize) and not isinstance(self.program.values[before].form, str):
            self.rounded[step.outputs[0]] = before

    def _draft(self, kind: str, step: Step, operands: int) -> None:
        self._append(kind, step, tuple(self._operand(arg, step) for arg in step.args[:operands]))

    def _concatenation(self, step: Step) -> None:
        """Integers concatenated as floats are read as integers: their values are the same."""
        names = [ref.name for ref in step.args[0]]
        rounded = [self.rounded.get(name) for name in names]
        known = [name for name in rounded if name is not None]
        forms = {self.program.values[name].form for name in known}
        chosen = known if len(known) == len(names) and len(forms) == 1 else names
        reads = tuple(self._read(name, named(step)) for name in chosen)
        for draft in self.drafts:  # joined in two forms: it is one tensor
            if draft.kind == "concat" and _same(draft.reads, reads):
                self.holds[step.outputs[0]] = (draft.y, False)
                return
        self._append("concat", step, reads)

    def _on_voxels(self, arg: Any) -> bool:
        name: str = getattr(arg, "name", "")
        if name in self.selected and name not in self.holds:
            base, _, _ = self.selected.channels(name)
            return self.selected.is_matrix(name) and base in self.holds
        return name in self.holds and self.holds[name][0] not in self.dense

    def _number(self, arg: Any) -> Tensor | None:
        """A constant per channel, or one for all: ``[channels]`` or ``[1]``."""
        if isinstance(arg, int | float):
            return torch.tensor([float(arg)])
        value = self.constants.get(getattr(arg, "name", ""))
        per_channel = value is not None and value.numel() == value.shape[-1:].numel()
        return value.detach().float().reshape(-1) if value is not None and per_channel else None

    def _is_matrix(self, step: Step) -> bool:
        if len(step.args) != 2 or step.kwargs or not self._on_voxels(step.args[0]):
            return False
        matrix = self.constants.get(getattr(step.args[1], "name", ""))
        return matrix is not None and matrix.dim() == 2

    def _check_half(self, step: Step, number: Tensor) -> None:
        lost = number[number.half().float() != number]
        if len(lost):
            raise ValueError(
                f"export_sparse_onnx: {named(step)}{location(self.source, step)} takes "
                f"{float(lost[0]):g}, which float16 does not hold, and the file holds no other "
                f"constants: write {float(lost[0].half())!r} in its place"
            )

    def _is_affine(self, step: Step, what: str) -> bool:
        if what not in ("add", "mul", "sub") or len(step.args) != 2 or step.kwargs:
            return False
        if what == "sub" and not self._on_voxels(step.args[0]):
            return False
        x, number = self._affine_operands(step)
        if number is not None and what == "mul" and self._is_given(x):
            # By powers of two float16 multiplies as exactly as float32: the file begins with it.
            return bool((number.frexp().mantissa == 0.5).all())
        return number is not None and self._on_voxels(x)

    def _is_given(self, x: Any) -> bool:
        """Whether a value is an input of the model other than coordinates."""
        name = getattr(x, "name", "")
        return name in self.program.values and name not in self.made | self.of_coords

    def _affine_operands(self, step: Step) -> tuple[Any, Tensor | None]:
        x, other = step.args
        number = self._number(other)
        return (x, number) if number is not None else (other, self._number(x))

    def _affine(self, step: Step, what: str) -> None:
        """``x · factor`` or ``x + shift``; both in sequence are one operator."""
        x, number = self._affine_operands(step)
        assert number is not None
        number = -number if what == "sub" else number
        self._check_half(step, number)
        adds = what != "mul"
        if bool((number == (0 if adds else 1)).all()):
            self.holds[step.outputs[0]] = self._tensor(x.name, named(step))
            return
        factor, shift = (torch.ones(1), number) if adds else (number, torch.zeros(1))
        reads = (self._operand(x, step),)
        last = self.drafts[-1] if self.drafts else None
        if adds and last is not None and last.kind == "affine" and last.y == x.name:
            if self.readers[x.name] == 1 and not bool(last.constants[1].any()):
                self.drafts.pop()
                self._append("affine", step, last.reads, (last.constants[0], shift), last.y)
                return
        self._append("affine", step, reads, (factor, shift))

    def _of_channels(self, step: Step) -> bool:
        """Whether a layout operator reads the features of voxels."""
        x = step.args[0] if step.args else None
        selected = getattr(x, "name", "") in self.selected
        return selected or self._is_given(x) or self._on_voxels(x)

    def _sums_groups(self, step: Step) -> bool:
        """Whether it sums groups of channels, ``[voxels, channels, group]`` or in memory order."""
        axes = step.args[1] if len(step.args) == 2 and not step.kwargs else ()
        axes = [axes] if isinstance(axes, int) else list(axes)
        name: str = getattr(step.args[0], "name", "")
        if name not in self.selected or self.selected.is_matrix(name):
            return False
        return len(axes) == 1 and self.selected.channels(name)[2].dim() == 2 and axes[0] in _BEHIND

    def _groups(self, step: Step) -> Reading:
        """The channels that a sum over groups reads, group after group."""
        name, axis = step.args[0].name, step.args[1]
        (axis,) = [axis] if isinstance(axis, int) else axis
        _, _, channels = self.selected.channels(name)
        behind = channels.movedim(axis % 3 - 1, -1).reshape(-1)
        tensor, relu = self._selection(name, behind, named(step))
        return Reading(tensor, relu, self.program.values[name].form, named(step))

    def _selection(self, name: str, channels: Tensor, by: str) -> tuple[str, bool]:
        """The tensor of a value's selected channels, and whether it is after a ReLU."""
        base, width, _ = self.selected.channels(name)
        read = self._read(base, by)
        if torch.equal(channels, torch.arange(width)):
            return read.tensor, read.relu
        for number, draft in enumerate(self.drafts):
            if draft.kind == "select" and torch.equal(draft.constants[0], channels):
                if draft.reads[0].tensor == read.tensor and draft.reads[0].relu == read.relu:
                    self.drafts[number] = replace(draft, reads=(*draft.reads, read))
                    return draft.y, False
        step = self.selected.makers[name]
        number_of = torch.tensor(width)
        self.drafts.append(Draft("select", step, (read,), name, (channels, number_of)))
        return name, False

    def _append(
        self,
        kind: str,
        step: Step,
        reads: tuple[Reading, ...],
        constants: tuple[Tensor, ...] = (),
        first: str = "",
    ) -> None:
        y = step.outputs[0]
        self.holds[y] = (y, step.clamps[0])
        self.drafts.append(Draft(kind, step, reads, y, constants, first))

    def _operand(self, arg: Any, step: Step) -> Reading:
        name = getattr(arg, "name", None)
        if not isinstance(name, str) or not self._is_tensor(name):
            raise ValueError(
                f"export_sparse_onnx: {named(step)} takes {arg!r}; the dialect has operators of "
                "tensors only, no constants"
            )
        return self._read(name, named(step))

    def _read(self, name: str, by: str) -> Reading:
        tensor, relu = self._tensor(name, by)
        return Reading(tensor, relu, self.program.values[name].form, by)

    def _tensor(self, name: str, by: str) -> tuple[str, bool]:
        if name in self.selected and name not in self.holds:
            if not self.selected.is_matrix(name):
                Follower._unfollowed(self, self.selected.makers[name])
            self.holds[name] = self._selection(name, self.selected.channels(name)[2], by)
        if name not in self.holds and name not in self.made - self.left_out:
            if self.input not in ("", name):
                raise ValueError(
                    f"export_sparse_onnx: {self._where(by)} reads a second input; a file has one, "
                    "the features of the voxels. " + REMEDY
                )
            self.input = name
            self.holds[name] = (name, False)
        if name not in self.holds:
            what = "what is made of coordinates" if name in self.of_coords else "a constant"
            raise ValueError(
                f"export_sparse_onnx: {self._where(by)} reads {what}, and a file has one input, "
                "the features of the voxels. " + REMEDY
            )
        return self.holds[name]

    def _where(self, by: str) -> str:
        """A consumer, with file and line for the current step."""
        step = self.at
        return by + (location(self.source, step) if step and by == named(step) else "")


def _same(one: tuple[Reading, ...], other: tuple[Reading, ...]) -> bool:
    wanted = [(r.tensor, r.relu, r.form) for r in one]
    return wanted == [(r.tensor, r.relu, r.form) for r in other]


def _along_channels(step: Step) -> bool:
    axis = step.kwargs.get("dim", step.args[1] if len(step.args) > 1 else 0)
    return axis in (1, -1) and all(hasattr(ref, "name") for ref in step.args[0])
