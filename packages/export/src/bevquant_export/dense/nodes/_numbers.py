"""Numbers that a file computes from its inputs: free sizes, and numbers taken from tensors."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any, NoReturn

import numpy as np
import torch

from bevquant_export._errors import QdqError
from bevquant_export.dense._source import Source
from bevquant_export.dense.nodes._graph import FIRST_SHAPE_OF_PART, Graph
from bevquant_export.voxels._body import DOUBLE, FLOAT, INT64
from bevquant_int8sim.program import Ref, Step

ARITHMETIC = {
    "add": "Add", "sub": "Sub", "mul": "Mul", "truediv": "Div", "div": "Div", "pow": "Pow",
    "maximum": "Max", "minimum": "Min", "sym_min": "Min", "sym_max": "Max", "neg": "Neg",
    "mod": "Mod",
}  # fmt: skip
"""ONNX's operators, by the names of arithmetic in a program."""
_WHOLE = ARITHMETIC.keys() - {"truediv", "div"}
_REAL = ARITHMETIC.keys() - {"mod"}
_OPERANDS = frozenset(("add", "sub", "mul", "div"))  # of a tensor and a number
_COMPARED = {
    "eq": "Equal", "le": "LessOrEqual", "ge": "GreaterOrEqual", "lt": "Less", "gt": "Greater",
}  # fmt: skip
_JOINED = {"sym_not": "Not", "and": "And", "or": "Or"}
_END = 2**63 - 1  # of int64
_FILLED = frozenset(("zeros", "ones", "new_zeros", "new_ones"))


class Numbers:
    """Writes numbers of a program, and tensors whose sizes depend on them."""

    def __init__(self, source: Source, graph: Graph, read: Callable[[str], str]) -> None:
        self.source, self.graph, self.read = source, graph, read
        self._makers: dict[str, Step] = {}

    def note(self, step: Step) -> None:
        """Record a step that computes a number; it is written when a consumer needs it."""
        self._makers[step.outputs[0]] = step

    def scalar(self, path: str, name: str) -> str:
        """A number that is read as a tensor, int64 ``[]``."""
        return self.graph.node("Squeeze", path, [self.of(path, Ref(name)), self.graph.numbers([0])])

    def shape(self, path: str, sizes: Iterable[Any]) -> str:
        """Several numbers, int64 ``[count]``."""
        return self.graph.node("Concat", path, [self.of(path, size) for size in sizes], axis=0)

    def of(self, path: str, value: Any) -> str:
        """A number as a tensor, int64 ``[1]``."""
        graph = self.graph
        if not self.source.varies(value):
            return graph.numbers([int(self.source.constants(path, value))])
        maker = self._makers.get(value.name)
        what = "" if maker is None else maker.called
        if maker is not None and what == "size":
            axis = int(maker.args[1])
            sized = self.read(maker.args[0].name)
            if graph.opset >= FIRST_SHAPE_OF_PART:
                return graph.node("Shape", path, [sized], start=axis, end=axis + 1)
            shape = graph.node("Shape", path, [sized])
            return graph.node("Gather", path, [shape, graph.numbers([axis])], axis=0)
        if maker is not None and what == "item":
            tensor = graph.node("Cast", path, [self.read(maker.args[0].name)], to=INT64)
            return graph.node("Reshape", path, [tensor, graph.numbers([1])])
        if maker is not None and what == "sym_ite" and list(maker.args[1:]) == [1, 0]:
            return self.of(path, maker.args[0])  # a truth value as a number
        if maker is not None and what in ("trunc", "floor", "ceil"):
            real = self._real(path, maker.args[0])
            whole = real if what == "trunc" else graph.node(what.capitalize(), path, [real])
            return graph.node("Cast", path, [whole], to=INT64)
        if maker is None or what not in (*_WHOLE, "floordiv"):
            refuse(path, f"a size comes from {what or 'a number'}, which has no form")
        operands = [self.of(path, operand) for operand in maker.args]
        if what == "floordiv":  # rounds down, ONNX's towards 0; its Mod has Python's sign
            rest = graph.node("Mod", path, operands)
            operands[0] = graph.node("Sub", path, [operands[0], rest])
            return graph.node("Div", path, operands)
        return graph.node(ARITHMETIC[what], path, operands)

    def _real(self, path: str, value: Any, kind: int = DOUBLE) -> str:
        """A number, or a quotient of two, as a tensor ``[1]``: in float64, as in Python."""
        graph = self.graph
        if not isinstance(value, Ref):
            ratio = float(value).as_integer_ratio()  # exact, and files hold no float64
            if max(map(abs, ratio)) >= 2**63:
                refuse(path, f"a size is computed with {value}, which has no form")
            parts = [graph.node("Cast", path, [graph.numbers([n])], to=kind) for n in ratio]
            return graph.node("Div", path, parts)
        maker = self._makers.get(value.name)
        what = "" if maker is None else maker.called
        if maker is not None and what == "sym_float":
            return self._real(path, maker.args[0], kind)
        if maker is not None and what == "item":
            taken = graph.node("Cast", path, [self.read(maker.args[0].name)], to=kind)
            return graph.node("Reshape", path, [taken, graph.numbers([1])])
        if maker is None or what not in _REAL:
            return graph.node("Cast", path, [self.of(path, value)], to=kind)
        operands = [self._real(path, operand, kind) for operand in maker.args]
        return graph.node(ARITHMETIC[what], path, operands)

    def holds(self, path: str, requirement: Step) -> str:
        """Whether a requirement is fulfilled, as a tensor, bool ``[1]``."""
        return self._condition(path, requirement.args[0], requirement.args[1])

    def _condition(self, path: str, condition: Ref, asked: str) -> str:
        maker = self._makers[condition.name]
        what = maker.called
        if what in _JOINED:
            parts = [self._condition(path, part, asked) for part in maker.args]
            return self.graph.node(_JOINED[what], path, parts)
        if what not in (*_COMPARED, "ne"):
            refuse(asked, f"the forward decides by {what} of numbers, which has no form")
        # Bounds beyond int64, as those of a sum of sizes, hold for all numbers.
        args = [n if isinstance(n, Ref) else max(-_END, min(n, _END)) for n in maker.args]
        operands = [self.of(path, operand) for operand in args]
        met = self.graph.node(_COMPARED.get(what, "Equal"), path, operands)
        return self.graph.node("Not", path, [met]) if what == "ne" else met

    def sized(self, step: Step) -> str | None:
        """A step whose result's size depends on numbers; None for other steps."""
        what = step.called
        if what in _FILLED:
            return self._filled(step)
        if what in _OPERANDS:
            return self._with_number(step)
        if what in ("view", "reshape"):
            return self._shaped(step)
        return self._grown(step) if what in ("repeat", "expand") else None

    def _with_number(self, step: Step) -> str | None:
        """A float tensor and a number, which torch rounds to the tensor's type."""
        x, what = step.args[0], step.called
        numbers = [value for value in step.args if self.source.varies(value)]
        floats = isinstance(x, Ref) and self.source.dtype(x.name) == torch.float32
        if len(step.args) != 2 or numbers != [step.args[1]] or step.kwargs or not floats:
            return None
        exact = self.graph.profile.runner != "plain"  # engines for accelerators lack float64
        number = self._real(step.path, numbers[0], DOUBLE if exact else FLOAT)
        if exact:
            number = self.graph.node("Cast", step.path, [number], to=FLOAT)
        number = self.graph.node("Reshape", step.path, [number, self.graph.numbers([])])
        return self.graph.node(ARITHMETIC[what], step.path, [self.read(x.name), number])

    def _shaped(self, step: Step) -> str | None:
        """A tensor in a shape that contains numbers taken from tensors."""
        sizes = step.args[1]
        if step.kwargs or not isinstance(sizes, list | tuple):
            return None
        if not any(self.source.varies(size) for size in sizes):
            return None
        shape = self.shape(step.path, sizes)
        return self.graph.node("Reshape", step.path, [self.read(step.args[0].name), shape])

    def _filled(self, step: Step) -> str | None:
        """A tensor of one value, with one row per voxel."""
        from onnx import numpy_helper

        shape = step.args[1 if (what := step.called).startswith("new_") else 0]
        if not any(self.source.varies(size) for size in shape):
            return None
        lengths = self.shape(step.path, shape)
        dtype = torch.empty(0, dtype=self.source.dtype(step.outputs[0])).numpy().dtype
        value = numpy_helper.from_array(np.full(1, float(what.endswith("ones")), dtype))
        return self.graph.node("ConstantOfShape", step.path, [lengths], value=value)

    def _grown(self, step: Step) -> str | None:
        """A constant or a row, repeated once per voxel or per found row."""
        first, *given = step.args
        times = given[0] if len(given) == 1 and isinstance(given[0], list | tuple) else given
        if not any(self.source.varies(size) for size in times) or step.kwargs:
            return None
        # −1 leaves a size as it is, as 1 does to ONNX.
        parts = [1 if size == -1 else size for size in times]
        shape = self.shape(step.path, parts)
        x = self.read(first.name)
        if step.called == "expand":
            return self.graph.node("Expand", step.path, [x, shape])
        missing = len(parts) - len(self.source.shapes[first.name])
        if missing:
            target = [1] * missing + self.source.target(step.path, first.name)
            x = self.graph.node("Reshape", step.path, [x, self.graph.numbers(target)])
        return self.graph.node("Tile", step.path, [x, shape])


def refuse(path: str, why: str) -> NoReturn:
    """Raise for an operation without a form in a file with voxels."""
    raise QdqError(
        f"{path or 'the model'}: {why}. export_detector writes the "
        "model as two files, cut at dense(); export_sparse_onnx writes a sparse encoder alone"
    )
