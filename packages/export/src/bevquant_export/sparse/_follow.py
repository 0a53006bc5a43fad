"""From the steps of an integer model to the operators of a file, and who reads what."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from bevquant_int8sim import IntegerModel
from bevquant_int8sim.model import Step

__all__ = ["Draft", "Followed", "Reading", "follow", "is_float_conv", "place"]

_CONVERSIONS = ("quantize", "requantize", "dequantize", "relu")
_PERMUTATIONS = ("permute", "transpose", "movedim", "swapaxes", "moveaxis", "swapdims")
_RESHAPES = ("flatten", "view", "reshape", "unflatten", "squeeze", "unsqueeze")
_ADDITIONS = ("add", "add_", "iadd")
_REMEDY = (
    "export the model up to it, or replace it; ONNX Runtime takes the model as it is "
    "(export_qdq_onnx, profile='onnxruntime')"
)
_REMEDIES = {
    "BatchNorm1d": "fold it first with bevquant_fusion.fuse_model",
    "batch_norm": "fold it first with bevquant_fusion.fuse_model",
    "cat": "the engine has no concatenation: add the branches, or split the model there; ONNX "
    "Runtime takes the model as it is (export_qdq_onnx, profile='onnxruntime')",
}


@dataclass(frozen=True)
class Reading:
    """A tensor as one reader wants it.

    Attributes:
        tensor: Its name: the value that its producer made.
        relu: Behind a ReLU.
        form: ``"float"``, or integers with `scale`, `bits`, `low`.
        by: The reader.
    """

    tensor: str
    relu: bool
    form: Any
    by: str


@dataclass(frozen=True, eq=False)
class Draft:
    """An operator to be written: a conv, an add, a scatter, a permute or a reshape."""

    kind: str
    step: Step
    reads: tuple[Reading, ...]
    y: str


@dataclass(frozen=True, eq=False)
class Followed:
    """Operators in order, the tensor of the input features, and the results."""

    drafts: tuple[Draft, ...]
    input: str
    outputs: tuple[Reading, ...]


def place(step: Step) -> str:
    """How a message names a step."""
    what = str(step.attributes.get("what", step.op))
    return f"{step.path} ({what})" if step.path else f"{what} in the model's forward"


def is_float_conv(step: Step) -> bool:
    """Whether a step is a sparse convolution that stays float."""
    return type(step.module).__name__ == "FloatSparseConv"


def follow(model: IntegerModel) -> Followed:
    """Every step as an operator; conversions between forms become what the readers want.

    Raises:
        ValueError: A step has no operator in the dialect; it is named.
    """
    return _Follower(model).run()


class _Follower:
    def __init__(self, model: IntegerModel) -> None:
        self.program, self.source = model.program, model.source
        self.made = {name for step in model.steps for name in step.outputs}
        self.holds: dict[str, tuple[str, bool]] = {}  # value to tensor and whether behind a ReLU
        self.input = ""
        self.drafts: list[Draft] = []

    def run(self) -> Followed:
        coords = self._coords()
        for step in self.program.steps:
            if step.outputs[0] not in coords:
                self._step(step)
        # What the model hands through, as a batch_dict with its inputs, is nothing of the file.
        results = [
            name
            for name in _names(self.program.result)
            if self._is_tensor(name) and name in self.made
        ]
        outputs = tuple(self._read(name, "the model's result") for name in results)
        if not self.input:
            raise ValueError("export_sparse_onnx: nothing in the model reads voxels' features")
        return Followed(tuple(self.drafts), self.input, outputs)

    def _coords(self) -> set[str]:
        """What is computed for the coordinates alone: the engine gets these ready made."""
        read = set(_names(self.program.result))
        found: set[str] = set()
        for step in reversed(self.program.steps):
            made = set(step.outputs)
            if step.op == "float" and not made & read and not is_float_conv(step):
                found |= made
            elif step.op not in ("host", "sites"):
                read.update(step.inputs)
        return found

    def _is_tensor(self, name: str) -> bool:
        return self.program.values[name].form not in ("sites", "host")

    def _step(self, step: Step) -> None:
        what = str(step.attributes.get("what", ""))
        if step.op in ("host", "sites", "constant"):
            return  # who reads a constant says so
        if step.attributes.get("ceiling") is not None:
            raise ValueError(
                f"export_sparse_onnx: {place(step)} is followed by a ReLU6; the engine has "
                '"ReLU" and "None" only: replace it by nn.ReLU'
            )
        if step.op in _CONVERSIONS or (step.op == "float" and what == "relu"):
            self._pass(step)
        elif step.op == "sparse_conv" or is_float_conv(step):
            self._draft("conv", step, 1)
        elif step.op == "add" or (step.op == "float" and what in _ADDITIONS):
            self._draft("add", step, 2)
        elif step.op == "move" and what == "to_dense":
            self._draft("scatter", step, 1)
        elif step.op == "move" and what in _PERMUTATIONS:
            self._draft("permute", step, 1)
        elif step.op == "move" and what in _RESHAPES:
            self._draft("reshape", step, 1)
        else:
            remedy = _REMEDIES.get(what, _REMEDY)
            raise ValueError(
                f"export_sparse_onnx: {place(step)}{self._location(step)} has no operator in the "
                "libspconv dialect "
                "(sparse convolutions, additions, ReLU, dense(), permute, reshape); " + remedy
            )

    def _location(self, step: Step) -> str:
        """File and line of the forward."""
        source = self.source
        if source is None:
            return ""
        nodes = (n for n, forms in source.held.items() if step.outputs[0] in forms.values())
        location = next(map(source.graph.location, nodes), "")
        return f" ({location})" if location else ""

    def _pass(self, step: Step) -> None:
        """Another form of the same tensor."""
        tensor, relu = self._tensor(step.args[0].name, place(step))
        self.holds[step.outputs[0]] = (tensor, relu or bool(step.attributes.get("relu")))

    def _draft(self, kind: str, step: Step, operands: int) -> None:
        reads = tuple(self._operand(arg, step) for arg in step.args[:operands])
        y = step.outputs[0]
        self.holds[y] = (y, bool(step.attributes.get("relu")))
        self.drafts.append(Draft(kind, step, reads, y))

    def _operand(self, arg: Any, step: Step) -> Reading:
        name = getattr(arg, "name", None)
        if not isinstance(name, str) or not self._is_tensor(name):
            raise ValueError(
                f"export_sparse_onnx: {place(step)} takes {arg!r}; the dialect has operators of "
                "tensors only, no constants"
            )
        return self._read(name, place(step))

    def _read(self, name: str, by: str) -> Reading:
        tensor, relu = self._tensor(name, by)
        return Reading(tensor, relu, self.program.values[name].form, by)

    def _tensor(self, name: str, by: str) -> tuple[str, bool]:
        if name not in self.holds and name not in self.made:
            if self.input not in ("", name):
                raise ValueError(
                    f"export_sparse_onnx: {by} reads a second input; a file has one, the features "
                    "of the voxels"
                )
            self.input = name
            self.holds[name] = (name, False)
        if name not in self.holds:
            raise ValueError(f"export_sparse_onnx: {by} reads a constant of the model")
        return self.holds[name]


def _names(value: Any) -> Iterator[str]:
    """Values in the nested containers of a program's result; of sparse tensors the features."""
    if isinstance(value, Mapping):
        value = list(value.values())
    if isinstance(value, list | tuple):
        for item in value:
            yield from _names(item)
    elif hasattr(value, "sites"):
        yield value.features
    elif isinstance(getattr(value, "name", None), str):
        yield value.name
