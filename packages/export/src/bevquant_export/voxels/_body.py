"""Writing the body of a model-local function as arithmetic on named tensors."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from onnx import FunctionProto, NodeProto

DOMAIN = "bevquant.sparse"
OPSET = 18
# The numbers that onnx.TensorProto gives to types.
FLOAT, UINT8, INT8, INT16, INT32, INT64, BOOL, HALF, DOUBLE = 1, 2, 3, 5, 6, 7, 9, 10, 11
Number = int | float


@dataclass(frozen=True, eq=False)
class Value:
    """A tensor of a body: its name and the number of its element type."""

    body: Body
    name: str
    kind: int

    def __add__(self, other: Value | Number) -> Value:
        return self.body.op("Add", self, self._same(other))

    def __sub__(self, other: Value | Number) -> Value:
        return self.body.op("Sub", self, self._same(other))

    def __mul__(self, other: Value | Number) -> Value:
        return self.body.op("Mul", self, self._same(other))

    def __truediv__(self, other: Value | Number) -> Value:
        """Of integers: towards zero, as ONNX's Div."""
        return self.body.op("Div", self, self._same(other))

    def __and__(self, other: Value) -> Value:
        return self.body.op("And", self, other, kind=BOOL)

    def __or__(self, other: Value) -> Value:
        return self.body.op("Or", self, other, kind=BOOL)

    def __lt__(self, other: Value | Number) -> Value:
        return self.body.op("Less", self, self._same(other), kind=BOOL)

    def __ge__(self, other: Value | Number) -> Value:
        return self.body.op("GreaterOrEqual", self, self._same(other), kind=BOOL)

    def equals(self, other: Value | Number) -> Value:
        """Elementwise."""
        return self.body.op("Equal", self, self._same(other), kind=BOOL)

    def cast(self, kind: int) -> Value:
        """The same values in another type; doubles must be whole numbers within it."""
        return self if kind == self.kind else self.body.op("Cast", self, kind=kind, to=kind)

    def column(self, number: int) -> Value:
        """Column of a matrix, ``[rows]``."""
        return self.body.op("Gather", self, self.body.constant(number, INT64), axis=1)

    def entry(self, number: int) -> Value:
        """Entry of a vector, ``[1]``."""
        return self.body.op("Gather", self, self.body.constant([number], INT64), axis=0)

    def rows(self, index: Value, *, label: str = "") -> Value:
        """Rows by number; a number outside is an error of the runtime, which names `label`."""
        return self.body.op("Gather", self, index, axis=0, label=label)

    def spread(self, *axes: int) -> Value:
        """With axes of length one at these places of the result."""
        return self.body.op("Unsqueeze", self, self.body.constant(axes, INT64))

    def size(self, axis: int) -> Value:
        """Length of an axis, int64 ``[1]``."""
        return self.body.op("Shape", self, kind=INT64, start=axis, end=axis + 1)

    def reshape(self, *sizes: Value | int) -> Value:
        """In another shape; numbers and tensors ``[1]`` may be mixed."""
        return self.body.op("Reshape", self, self.body.vector(*sizes))

    def _same(self, other: Value | Number) -> Value:
        return other if isinstance(other, Value) else self.body.constant(other, self.kind)


class Body:
    """Nodes of a function with these element types; a call must give all attributes."""

    def __init__(self, name: str, inputs: dict[str, int], attributes: Sequence[str] = ()) -> None:
        self.name = name
        self.inputs = {key: Value(self, key, kind) for key, kind in inputs.items()}
        self.attributes = tuple(attributes)
        self.nodes: list[NodeProto] = []
        self._counts: Counter[str] = Counter()
        self._constants: dict[object, Value] = {}

    def op(
        self,
        operator: str,
        *inputs: Value,
        kind: int | None = None,
        label: str = "",
        **attributes: Any,
    ) -> Value:
        """Output of one standard operator, of the first input's type or of `kind`."""
        from onnx import helper

        number = self._counts[operator]
        self._counts[operator] += 1
        made = label or f"{operator}_{number}"
        names = [value.name for value in inputs]
        self.nodes.append(helper.make_node(operator, names, [made], made, **attributes))
        return Value(self, made, inputs[0].kind if kind is None else kind)

    def constant(self, value: Number | Sequence[Number], kind: int) -> Value:
        """A scalar or a vector, written once."""
        from onnx import helper

        vector = not isinstance(value, int | float)
        entries = tuple(value) if not isinstance(value, int | float) else (value,)
        key = (kind, vector, entries)
        if key not in self._constants:
            shape = [len(entries)] if vector else []
            if kind == DOUBLE:  # whole numbers only; no float64 tensor stands in the file
                self._constants[key] = self.constant(value, FLOAT).cast(DOUBLE)
            else:
                tensor = helper.make_tensor("", kind, shape, entries)
                self._constants[key] = self.op("Constant", kind=kind, value=tensor)
        return self._constants[key]

    def integers(self, attribute: str) -> Value:
        """An attribute of the call, int64 ``[n]``."""
        return self._attribute(attribute, "value_ints", "INTS", INT64)

    def number(self, attribute: str) -> Value:
        """An attribute of the call, as a double."""
        return self._attribute(attribute, "value_float", "FLOAT", FLOAT).cast(DOUBLE)

    def _attribute(self, attribute: str, slot: str, form: str, kind: int) -> Value:
        from onnx import AttributeProto

        key = ("attribute", attribute)
        if key not in self._constants:
            made = self.op("Constant", kind=kind)
            reference = self.nodes[-1].attribute.add()
            reference.name, reference.ref_attr_name = slot, attribute
            reference.type = AttributeProto.AttributeType.Value(form)
            self._constants[key] = made
        return self._constants[key]

    def vector(self, *entries: Value | int) -> Value:
        """int64 ``[n]`` of numbers and tensors ``[1]``."""
        if all(isinstance(entry, int) for entry in entries):
            return self.constant([int(e) for e in entries if isinstance(e, int)], INT64)
        parts = [e if isinstance(e, Value) else self.constant([e], INT64) for e in entries]
        return self.op("Concat", *parts, axis=0) if len(parts) > 1 else parts[0]

    def filled(self, shape: Value, value: Number, kind: int) -> Value:
        """A tensor of one value."""
        from onnx import helper

        tensor = helper.make_tensor("", kind, [1], [value])
        return self.op("ConstantOfShape", shape, kind=kind, value=tensor)

    def count(self, first: int, size: Value, kind: int) -> Value:
        """``first, first + 1, …``: `size` numbers; `size` is int64 ``[1]``."""
        last = self.op("Squeeze", size).cast(kind) + first
        return self.op("Range", self.constant(first, kind), last, self.constant(1, kind), kind=kind)

    def function(self, *outputs: Value) -> FunctionProto:
        """The finished function."""
        from onnx import helper

        return helper.make_function(
            DOMAIN,
            self.name,
            list(self.inputs),
            [value.name for value in outputs],
            self.nodes,
            [helper.make_operatorsetid("", OPSET)],
            self.attributes,
        )
