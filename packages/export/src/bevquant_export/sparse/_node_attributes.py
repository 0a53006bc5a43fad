"""The schema of the dialect: one row per attribute of each operator.

Files are written, read and linted by it.
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
    from onnx import AttributeProto, NodeProto

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


class Attribute(NamedTuple):
    """An attribute of an operator."""

    name: str  # Its name
    kind: str  # Its type in ONNX, which the engine's parser wants
    field: str = ""  # Field of the node; empty where the value follows from others
    # Value in the file, from the field's (without one, from the node); None: left out
    write: Callable[[Any], Any] = lambda value: value
    default: Any = None  # Value of a missing attribute
    accepts: Callable[[Any], bool] = lambda value: True  # Whether a value is allowed
    wrong: str = ""  # Error for other values, of the name and the value
    read: Callable[[Any], Any] = lambda value: value  # Value of the field, from the file's


def _sizes(field: str, least: int, default: Any = None) -> Attribute:
    def three(value: Any) -> bool:
        fits = value is not None and len(value) == 3
        return fits and min(value) >= least and max(value) < 1 << 31

    wrong = f"attribute {{}} is {{}}; expected three integers from {least} on"
    return Attribute(field, "INTS", field, list, default, three, wrong)


def _flag(field: str) -> Attribute:
    return Attribute(field, "INT", field, int, 0, read=bool)


def _number(field: str, default: int = 0) -> Attribute:
    return Attribute(field, "INT", field, default=default)


def _choice(field: str, default: str | None, *choices: str) -> Attribute:
    wrong = f"{{}} is {{!r}}; expected {' or '.join(choices)}"
    return Attribute(
        field, "STRING", field, default=default, accepts=choices.__contains__, wrong=wrong
    )


def _range(field: str, name: str) -> Attribute:
    def positive(value: Any) -> bool:
        return value is None or 0 < value < float("inf")

    wrong = "{} is {}; expected a positive range"
    return Attribute(name, "FLOAT", field, _float, None, positive, wrong)


def _float(value: Any) -> float | None:
    return None if value is None else float(value)


def _floats(value: Any) -> list[float] | None:
    return [float(number) for number in value] if value else None


def _is_dense(shape: Any) -> bool:
    return shape is not None and len(shape) == 5 and min(shape) >= 1


_KERNEL = (_sizes("kernel_size", 1), _sizes("stride", 1), _sizes("padding", 0),
           _sizes("dilation", 1))  # fmt: skip
_GRIDS = (_sizes("input_spatial_shape", 1), _sizes("output_spatial_shape", 1))
_GRID = _sizes("grid", 1, ())
_SUBM = _flag("subm")
_RULEBOOK = Attribute("rulebook", "STRING", "rulebook", default="")
_ACTIVATION = _choice("activation", None, "None", "ReLU")
_PRECISION = _choice("precision", "fp16", "int8", "fp16")
_OUTPUT = _choice("output_precision", "fp16", "int8", "fp16")
_RANGE = _range("input_range", "input_dynamic_range")
_DIMS = Attribute("dims", "INTS", "dims", list, ())
# In the order in which a portable file's metadata repeat them.
_ROWS: dict[type[Node], tuple[Attribute, ...]] = {
    Conv: (
        *_KERNEL,
        _sizes("output_padding", 0, (0, 0, 0)),
        *_GRIDS,
        Attribute("ndim", "INT", write=lambda node: 3),
        Attribute("in_channels", "INT", write=lambda node: node.in_channels),
        Attribute("out_channels", "INT", write=lambda node: node.out_channels),
        _number("output_bound", _BOUND),
        Attribute("transposed", "INT", "", lambda node: 0, 0, lambda value: not value,
                  "transposed convolutions are not in the dialect"),
        _flag("inverse"),
        Attribute("groups", "INT", write=lambda node: 1),
        _SUBM,
        _RULEBOOK,
        _ACTIVATION,
        Attribute("input_shape", "INTS", write=lambda node: [node.rows[0], node.in_channels]),
        Attribute("output_shape", "INTS", write=lambda node: [node.rows[1], node.out_channels]),
        _PRECISION,
        _OUTPUT,
        _RANGE,
        Attribute("weight_dynamic_ranges", "FLOATS", "weight_ranges", _floats),
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
    Select: (_DIMS._replace(name="channels", field="channels"), _number("in_channels"),
             _ACTIVATION, _OUTPUT, _RANGE),
    Pool: (*_KERNEL, *_GRIDS, _SUBM, _RULEBOOK, _OUTPUT, _RANGE),
    Steps: (
        Attribute("tensors", "INT", write=lambda node: len(node.xs)),
        Attribute("input_dynamic_ranges", "FLOATS", "ranges", _floats, ()),
        _number("on", -1),
        _GRID._replace(
            write=lambda grid: list(grid) or None,
            accepts=lambda value: not value or _GRID.accepts(value),
        ),
        _number("channels"),
        _number("frames"),
        _OUTPUT,
        Attribute("body", "BYTES", "body", default=b""),
    ),
    Scatter: (
        _sizes("input_spatial_shape", 1),
        _choice("format", "xyz", "xyz", "zyx"),
        Attribute("output_shape", "INTS", "output_shape", list, None, _is_dense,
                  "{} is {}; expected batch, channels, three axes"),
    ),
    LayoutOp: (_DIMS,),
}  # fmt: skip
# Types by the names of attributes; two that only the engine reads, and NVIDIA's exporters write.
PARSED = {
    **{row.name: row.kind for name in OPERATORS for row in _ROWS[_CLASSES[name]]},
    "fixed_launch_points": "INT",
    "output_layout": "STRING",
}


def operator_of(node: Node) -> str:
    """Operator name of a node in the dialect."""
    if isinstance(node, LayoutOp):
        return node.op
    return next(name for name, kind in _CLASSES.items() if kind is type(node))


def node_attributes(node: Node) -> dict[str, Any]:
    """Attributes of a node, without those of default value."""
    made = {
        row.name: row.write(getattr(node, row.field) if row.field else node)
        for row in _ROWS[type(node)]
    }
    return {name: value for name, value in made.items() if value is not None}


def read_node(proto: NodeProto, tensors: Mapping[str, Tensor], name: str) -> Node:
    """Read a node with the inputs, weights and attributes that its operator needs."""
    op, read = proto.op_type, tuple(proto.input)
    kind: Any = _CLASSES[op]
    wanted = len(read) or 1 if kind in (Concat, Steps) else _INPUTS.get(op, 1)
    if len(read) != wanted or len(proto.output) != 1:
        raise ValueError(
            f"{name}: {op} takes {wanted} inputs and makes one output, got {len(read)} and "
            f"{len(proto.output)}" + (" (a bias is mandatory)" if wanted == 3 else "")
        )
    known = {attribute.name: attribute for attribute in proto.attribute}
    said: dict[str, Any] = {
        row.field: _value(known.get(row.name), row, name)
        for row in _ROWS[kind]
        if row.field or row.wrong
    }
    said.pop("", None)
    said |= {"path": proto.doc_string, "name": name, "y": proto.output[0]}
    if kind is Steps:
        return _steps(known, read, said, name)
    said |= {"xs": read} if kind is Concat else dict(zip(kind.reads, read, strict=False))
    if kind is Conv:
        said["weight"], said["bias"] = (_tensor(n, tensors, name) for n in read[1:])
        said["rows"] = (0, 0)
        _check_conv(name, said)
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


def _value(attribute: AttributeProto | None, row: Attribute, name: str) -> Any:
    """A checked value; INT in place of FLOAT is an error."""
    from onnx import AttributeProto

    value: Any = row.default
    if attribute is not None:
        kind = row.kind.replace("BYTES", "STRING")
        if attribute.type != AttributeProto.AttributeType.Value(kind):
            came = AttributeProto.AttributeType.Name(attribute.type)
            raise ValueError(f"{name}: attribute {row.name} is {came}; the engine reads {kind}")
        value = {
            "INT": attribute.i, "FLOAT": attribute.f, "INTS": tuple(attribute.ints),
            "FLOATS": tuple(attribute.floats), "BYTES": attribute.s,
            "STRING": attribute.s.decode("utf-8", "replace"),
        }[row.kind]  # fmt: skip
    if not row.accepts(value):
        raise ValueError(f"{name}: {row.wrong.format(row.name, value)}")
    return row.read(value)


def _check_conv(name: str, said: Mapping[str, Any]) -> None:
    weight, bias, kernel_size = said["weight"], said["bias"], said["kernel_size"]
    if weight.dim() != 5 or tuple(weight.shape[1:4]) != kernel_size:
        raise ValueError(
            f"{name}: weight of shape {tuple(weight.shape)} and kernel_size "
            f"{kernel_size}; expected [out, k0, k1, k2, in]"
        )
    if tuple(bias.shape) != (len(weight),):
        raise ValueError(f"{name}: bias of shape {tuple(bias.shape)} for {len(weight)} channels")


def _steps(
    known: Mapping[str, AttributeProto], read: tuple[str, ...], said: dict[str, Any], name: str
) -> Steps:
    tensors: int = _value(known.get("tensors"), _number("tensors"), name)
    on, ranges = said["on"], said["ranges"]
    if len(ranges) != tensors or tensors > len(read) or not -1 <= on < len(read):
        raise ValueError(f"{name}: {tensors} tensors, {len(ranges)} ranges and place {on} among "
                         f"{len(read)} inputs")  # fmt: skip
    return Steps(xs=read[:tensors], places=read[tensors:], **said)
