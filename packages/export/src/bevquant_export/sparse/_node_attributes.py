"""Attributes of a node: written, and read with checks of name, type and size.

Each node class has a row per attribute, by which files are written and read.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, NamedTuple

from torch import Tensor

from bevquant_export.sparse._graph import (
    Add,
    Concat,
    Conv,
    Fold,
    LayoutOp,
    Node,
    Pool,
    Relu,
    Scatter,
    Select,
    Steps,
)

if TYPE_CHECKING:
    from onnx import NodeProto

_CLASSES: dict[str, type[Node]] = {
    "SparseConvolution": Conv, "Add": Add, "QuantAdd": Add, "Relu": Relu, "ScatterDense": Scatter,
    "Reshape": LayoutOp, "Transpose": LayoutOp,
}  # fmt: skip
OPERATORS = tuple(_CLASSES)
_EXTENSIONS: dict[str, type[Node]] = {
    "Concat": Concat, "Fold": Fold, "Select": Select, "Pool": Pool, "Steps": Steps
}  # fmt: skip
EXTENSIONS = tuple(_EXTENSIONS)  # of the portable dialect
_CLASSES |= _EXTENSIONS
_INPUTS = {"SparseConvolution": 3, "Add": 2, "QuantAdd": 2}
_BOUND = 150000  # the engine's default where a file has no value


class _Attributes:
    """Attributes of a node by name and type; INT in place of FLOAT is an error."""

    def __init__(self, proto: NodeProto, name: str) -> None:
        self.name = name
        self._known = {attribute.name: attribute for attribute in proto.attribute}

    def get(self, name: str, kind: str, default: Any = None) -> Any:
        from onnx import AttributeProto

        attribute = self._known.get(name)
        if attribute is None:
            return default
        if attribute.type != AttributeProto.AttributeType.Value(kind):
            came = AttributeProto.AttributeType.Name(attribute.type)
            raise ValueError(f"{self.name}: attribute {name} is {came}; the engine reads {kind}")
        if kind == "STRING":
            return attribute.s.decode("utf-8", "replace") if default != b"" else attribute.s
        value: Any = {
            "INT": attribute.i, "FLOAT": attribute.f, "INTS": attribute.ints,
            "FLOATS": attribute.floats,
        }[kind]  # fmt: skip
        return tuple(value) if kind in ("INTS", "FLOATS") else value

    def sizes(self, name: str, least: int, default: Any = None) -> tuple[int, ...]:
        value = self.get(name, "INTS", default)
        if value is None or len(value) != 3 or min(value) < least or max(value) >= 1 << 31:
            raise ValueError(
                f"{self.name}: attribute {name} is {value}; expected three integers from {least} on"
            )
        return tuple(int(v) for v in value)

    def one_of(self, name: str, default: str | None, choices: tuple[str, ...]) -> str:
        value = self.get(name, "STRING", default)
        if value not in choices:
            raise ValueError(f"{self.name}: {name} is {value!r}; expected {' or '.join(choices)}")
        return str(value)

    def range(self, name: str) -> float | None:
        value = self.get(name, "FLOAT")
        if value is not None and not 0 < value < float("inf"):
            raise ValueError(f"{self.name}: {name} is {value}; expected a positive range")
        return None if value is None else float(value)


class _Row(NamedTuple):
    """An attribute.

    Attributes:
        attribute: Its name.
        write: Its value for a node; None leaves it out. The Python type is the dialect's.
        read: Value of the node's field, from the attributes and this name; None where the file
            repeats a value that follows from others.
        field: Name of the node's field.
    """

    attribute: str
    write: Callable[[Any], Any]
    read: Callable[[_Attributes, str], Any] | None = None
    field: str = ""


def _row(
    field: str,
    read: Callable[[_Attributes, str], Any],
    form: Callable[[Any], Any] = lambda value: value,
    attribute: str = "",
) -> _Row:
    def write(node: Any) -> Any:
        value = getattr(node, field)
        return None if value is None else form(value)

    return _Row(attribute or field, write, read, field)


def _sizes(field: str, least: int, default: Any = None) -> _Row:
    return _row(field, lambda a, name: a.sizes(name, least, default), list)


def _flag(field: str) -> _Row:
    return _row(field, lambda a, name: bool(a.get(name, "INT", 0)), int)


def _number(field: str, default: int = 0) -> _Row:
    return _row(field, lambda a, name: int(a.get(name, "INT", default)))


def _choice(field: str, default: str | None, *choices: str) -> _Row:
    return _row(field, lambda a, name: a.one_of(name, default, choices))


def _range(field: str, attribute: str) -> _Row:
    return _row(field, lambda a, name: a.range(name), float, attribute)


def _grid(a: _Attributes, name: str) -> tuple[int, ...]:
    return a.sizes(name, 1) if a.get(name, "INTS") else ()


def _dense_shape(a: _Attributes, name: str) -> tuple[int, ...]:
    shape = a.get(name, "INTS")
    if shape is None or len(shape) != 5 or min(shape) < 1:
        raise ValueError(f"{a.name}: {name} is {shape}; expected batch, channels, three axes")
    return tuple(int(s) for s in shape)


def _dims(a: _Attributes, name: str) -> tuple[int, ...]:
    return tuple(int(d) for d in a.get(name, "INTS", ()))


def _floats(a: _Attributes, name: str) -> tuple[float, ...]:
    return tuple(float(amax) for amax in a.get(name, "FLOATS", ()))


_KERNEL = (_sizes("kernel_size", 1), _sizes("stride", 1), _sizes("padding", 0),
           _sizes("dilation", 1))  # fmt: skip
_GRIDS = (_sizes("input_spatial_shape", 1), _sizes("output_spatial_shape", 1))
_SUBM = _flag("subm")
_RULEBOOK = _row("rulebook", lambda a, name: a.get(name, "STRING", ""))
_ACTIVATION = _choice("activation", None, "None", "ReLU")
_PRECISION = _choice("precision", "fp16", "int8", "fp16")
_OUTPUT = _choice("output_precision", "fp16", "int8", "fp16")
_RANGE = _range("input_range", "input_dynamic_range")
# In the order in which a portable file's metadata repeat them.
_ROWS: dict[type[Node], tuple[_Row, ...]] = {
    Conv: (
        *_KERNEL,
        _sizes("output_padding", 0, (0, 0, 0)),
        *_GRIDS,
        _Row("ndim", lambda node: 3),
        _Row("in_channels", lambda node: node.in_channels),
        _Row("out_channels", lambda node: node.out_channels),
        _number("output_bound", _BOUND),
        _Row("transposed", lambda node: 0),
        _flag("inverse"),
        _Row("groups", lambda node: 1),
        _SUBM,
        _RULEBOOK,
        _ACTIVATION,
        _Row("input_shape", lambda node: [node.rows[0], node.in_channels]),
        _Row("output_shape", lambda node: [node.rows[1], node.out_channels]),
        _PRECISION,
        _OUTPUT,
        _RANGE,
        _row("weight_ranges", lambda a, name: a.get(name, "FLOATS"),
             lambda ranges: [float(value) for value in ranges], "weight_dynamic_ranges"),
    ),
    Add: (
        _PRECISION,
        _OUTPUT,
        _range("range_x", "input0_dynamic_range"),
        _range("range_other", "input1_dynamic_range"),
    ),
    Relu: (),
    Concat: (_PRECISION, _OUTPUT, _RANGE),
    Fold: (_number("channels"), _OUTPUT),
    Select: (_row("channels", _dims, list), _number("in_channels"), _ACTIVATION, _OUTPUT, _RANGE),
    Pool: (*_KERNEL, *_GRIDS, _SUBM, _RULEBOOK, _OUTPUT, _RANGE),
    Steps: (
        _Row("tensors", lambda node: len(node.xs)),
        _row("ranges", _floats, lambda ranges: list(ranges) or None, "input_dynamic_ranges"),
        _number("on", -1),
        _row("grid", _grid, lambda grid: list(grid) or None),
        _number("channels"),
        _number("frames"),
        _OUTPUT,
        _row("body", lambda a, name: a.get(name, "STRING", b"")),
    ),
    Scatter: (
        _sizes("input_spatial_shape", 1),
        _choice("format", "xyz", "xyz", "zyx"),
        _row("output_shape", _dense_shape, list),
    ),
    LayoutOp: (_row("dims", _dims, list),),
}  # fmt: skip


def operator_of(node: Node) -> str:
    """Operator name of a node in the dialect."""
    if isinstance(node, LayoutOp):
        return node.op
    return next(name for name, kind in _CLASSES.items() if kind is type(node))


def node_attributes(node: Node) -> dict[str, Any]:
    """Attributes of a node, without those of default value."""
    made = {row.attribute: row.write(node) for row in _ROWS[type(node)]}
    return {name: value for name, value in made.items() if value is not None}


def read_node(proto: NodeProto, tensors: Mapping[str, Tensor], name: str) -> Node:
    """Read a node.

    Raises:
        ValueError: It has other inputs, weights or attributes than its operator needs.
    """
    op, read = proto.op_type, tuple(proto.input)
    kind: Any = _CLASSES[op]
    wanted = len(read) or 1 if kind in (Concat, Steps) else _INPUTS.get(op, 1)
    if len(read) != wanted or len(proto.output) != 1:
        raise ValueError(
            f"{name}: {op} takes {wanted} inputs and makes one output, got {len(read)} and "
            f"{len(proto.output)}" + (" (a bias is mandatory)" if wanted == 3 else "")
        )
    attributes = _Attributes(proto, name)
    said = {row.field: row.read(attributes, row.attribute) for row in _ROWS[kind] if row.read}
    said |= {"path": proto.doc_string, "name": name, "y": proto.output[0]}
    if kind is Concat:
        return Concat(xs=read, **said)
    if kind is Steps:
        return _steps(attributes, read, said)
    said["x"] = read[0]
    if kind is Conv:
        said["weight"], said["bias"] = (_tensor(n, tensors, name) for n in read[1:])
        said["rows"] = (0, 0)
        _check_conv(attributes, said)
    elif kind is Add:
        said["other"] = read[1]
    elif kind is LayoutOp:
        said["op"], dims = op, said["dims"]
        if not dims:
            raise ValueError(f"{name}: {op} needs the attribute dims")
        if op == "Transpose" and sorted(dims) != list(range(len(dims))):
            raise ValueError(f"{name}: dims {dims} is no permutation")
    made: Node = kind(**said)
    return made


def _tensor(wanted: str, tensors: Mapping[str, Tensor], name: str) -> Tensor:
    if wanted not in tensors:
        raise ValueError(f"{name}: initializer {wanted} is missing")
    return tensors[wanted]


def _check_conv(a: _Attributes, said: Mapping[str, Any]) -> None:
    weight, bias, kernel_size = said["weight"], said["bias"], said["kernel_size"]
    if weight.dim() != 5 or tuple(weight.shape[1:4]) != kernel_size:
        raise ValueError(
            f"{a.name}: weight of shape {tuple(weight.shape)} and kernel_size "
            f"{kernel_size}; expected [out, k0, k1, k2, in]"
        )
    if tuple(bias.shape) != (len(weight),):
        raise ValueError(f"{a.name}: bias of shape {tuple(bias.shape)} for {len(weight)} channels")
    if a.get("transposed", "INT", 0):
        raise ValueError(f"{a.name}: transposed convolutions are not in the dialect")


def _steps(a: _Attributes, read: tuple[str, ...], said: dict[str, Any]) -> Steps:
    tensors, on, ranges = int(a.get("tensors", "INT", 0)), said["on"], said["ranges"]
    if len(ranges) != tensors or tensors > len(read) or not -1 <= on < len(read):
        raise ValueError(f"{a.name}: {tensors} tensors, {len(ranges)} ranges and place {on} among "
                         f"{len(read)} inputs")  # fmt: skip
    return Steps(xs=read[:tensors], places=read[tensors:], **said)
