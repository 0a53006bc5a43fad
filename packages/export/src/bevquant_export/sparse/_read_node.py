"""One node of a file, its attributes checked for name, type and size."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

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

OPERATORS = (
    "SparseConvolution", "Add", "QuantAdd", "Relu", "ScatterDense", "Reshape", "Transpose"
)  # fmt: skip
EXTENSIONS = ("Concat", "Fold", "Select", "Pool", "Steps")  # of the portable dialect
_INPUTS = {"SparseConvolution": 3, "Add": 2, "QuantAdd": 2}
_BOUND = 150000  # what the engine takes where a file says nothing


class _Attributes:
    """Attributes of a node by name and type; INT where FLOAT is expected is an error."""

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

    def sizes(self, name: str, *, least: int, default: Any = None) -> tuple[int, ...]:
        value = self.get(name, "INTS", default)
        if value is None or len(value) != 3 or min(value) < least or max(value) >= 1 << 31:
            raise ValueError(
                f"{self.name}: attribute {name} is {value}; expected three integers from {least} on"
            )
        return tuple(int(v) for v in value)

    def precision(self, name: str) -> str:
        return self.one_of(name, "fp16", ("int8", "fp16"))

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


def read_node(proto: NodeProto, tensors: Mapping[str, Tensor], name: str) -> Node:
    """The node.

    Raises:
        ValueError: It has other inputs, weights or attributes than its operator needs.
    """
    op = proto.op_type
    several = op in ("Concat", "Steps")
    wanted = len(proto.input) or 1 if several else _INPUTS.get(op, 1)
    if len(proto.input) != wanted or len(proto.output) != 1:
        raise ValueError(
            f"{name}: {op} takes {wanted} inputs and makes one output, got {len(proto.input)} and "
            f"{len(proto.output)}" + (" (a bias is mandatory)" if wanted == 3 else "")
        )
    attributes = _Attributes(proto, name)
    settings: dict[str, Any] = {
        "path": proto.doc_string, "name": name, "x": proto.input[0], "y": proto.output[0]
    }  # fmt: skip
    if op == "Concat":
        return _concat(attributes, tuple(proto.input), settings)
    if op == "Fold":
        precision = attributes.precision("output_precision")
        channels = int(attributes.get("channels", "INT", 0))
        return Fold(channels=channels, output_precision=precision, **settings)
    if op == "Select":
        return _select(attributes, settings)
    if op == "Pool":
        return _pool(attributes, settings)
    if op == "Steps":
        return _steps(attributes, tuple(proto.input), settings)
    if op == "SparseConvolution":
        weight, bias = (_tensor(n, tensors, name) for n in proto.input[1:])
        return _conv(attributes, weight, bias, settings)
    if op in ("Add", "QuantAdd"):
        return _add(attributes, proto.input[1], settings)
    if op == "ScatterDense":
        return _scatter(attributes, settings)
    if op == "Relu":
        return Relu(**settings)
    dims = attributes.get("dims", "INTS")
    if not dims:
        raise ValueError(f"{name}: {op} needs the attribute dims")
    if op == "Transpose" and sorted(dims) != list(range(len(dims))):
        raise ValueError(f"{name}: dims {dims} is no permutation")
    return LayoutOp(op=op, dims=tuple(int(d) for d in dims), **settings)


def _tensor(wanted: str, tensors: Mapping[str, Tensor], name: str) -> Tensor:
    if wanted not in tensors:
        raise ValueError(f"{name}: initializer {wanted} is missing")
    return tensors[wanted]


def _conv(a: _Attributes, weight: Tensor, bias: Tensor, settings: dict[str, Any]) -> Conv:
    kernel_size = a.sizes("kernel_size", least=1)
    if weight.dim() != 5 or tuple(weight.shape[1:4]) != kernel_size:
        raise ValueError(
            f"{a.name}: weight of shape {tuple(weight.shape)} and kernel_size "
            f"{kernel_size}; expected [out, k0, k1, k2, in]"
        )
    if tuple(bias.shape) != (len(weight),):
        raise ValueError(f"{a.name}: bias of shape {tuple(bias.shape)} for {len(weight)} channels")
    if a.get("transposed", "INT", 0):
        raise ValueError(f"{a.name}: transposed convolutions are not in the dialect")
    return Conv(
        weight=weight,
        bias=bias,
        kernel_size=kernel_size,
        stride=a.sizes("stride", least=1),
        dilation=a.sizes("dilation", least=1),
        padding=a.sizes("padding", least=0),
        output_padding=a.sizes("output_padding", least=0, default=(0, 0, 0)),
        subm=bool(a.get("subm", "INT", 0)),
        inverse=bool(a.get("inverse", "INT", 0)),
        rulebook=a.get("rulebook", "STRING", ""),
        activation=a.one_of("activation", None, ("None", "ReLU")),
        precision=a.precision("precision"),
        output_precision=a.precision("output_precision"),
        input_range=a.range("input_dynamic_range"),
        weight_ranges=a.get("weight_dynamic_ranges", "FLOATS"),
        output_bound=int(a.get("output_bound", "INT", _BOUND)),
        input_spatial_shape=a.sizes("input_spatial_shape", least=1),
        output_spatial_shape=a.sizes("output_spatial_shape", least=1),
        rows=(0, 0),
        **settings,
    )


def _add(a: _Attributes, other: str, settings: dict[str, Any]) -> Add:
    return Add(
        other=other,
        precision=a.precision("precision"),
        output_precision=a.precision("output_precision"),
        range_x=a.range("input0_dynamic_range"),
        range_other=a.range("input1_dynamic_range"),
        **settings,
    )


def _concat(a: _Attributes, xs: tuple[str, ...], settings: dict[str, Any]) -> Concat:
    settings = {key: value for key, value in settings.items() if key != "x"}
    return Concat(
        xs=xs,
        precision=a.precision("precision"),
        output_precision=a.precision("output_precision"),
        input_range=a.range("input_dynamic_range"),
        **settings,
    )


def _select(a: _Attributes, settings: dict[str, Any]) -> Select:
    return Select(
        channels=tuple(int(channel) for channel in a.get("channels", "INTS", ())),
        in_channels=int(a.get("in_channels", "INT", 0)),
        activation=a.one_of("activation", None, ("None", "ReLU")),
        output_precision=a.precision("output_precision"),
        input_range=a.range("input_dynamic_range"),
        **settings,
    )


def _pool(a: _Attributes, settings: dict[str, Any]) -> Pool:
    return Pool(
        kernel_size=a.sizes("kernel_size", least=1),
        stride=a.sizes("stride", least=1),
        dilation=a.sizes("dilation", least=1),
        padding=a.sizes("padding", least=0),
        subm=bool(a.get("subm", "INT", 0)),
        rulebook=a.get("rulebook", "STRING", ""),
        input_spatial_shape=a.sizes("input_spatial_shape", least=1),
        output_spatial_shape=a.sizes("output_spatial_shape", least=1),
        output_precision=a.precision("output_precision"),
        input_range=a.range("input_dynamic_range"),
        **settings,
    )


def _steps(a: _Attributes, read: tuple[str, ...], settings: dict[str, Any]) -> Steps:
    tensors, on = int(a.get("tensors", "INT", 0)), int(a.get("on", "INT", -1))
    ranges = tuple(float(amax) for amax in a.get("input_dynamic_ranges", "FLOATS", ()))
    grid = a.sizes("grid", least=1) if a.get("grid", "INTS") else ()
    if len(ranges) != tensors or tensors > len(read) or not -1 <= on < len(read):
        raise ValueError(f"{a.name}: {tensors} tensors, {len(ranges)} ranges and place {on} among "
                         f"{len(read)} inputs")  # fmt: skip
    settings = {key: value for key, value in settings.items() if key != "x"}
    return Steps(
        xs=read[:tensors], places=read[tensors:], ranges=ranges, on=on, grid=grid,
        channels=int(a.get("channels", "INT", 0)), frames=int(a.get("frames", "INT", 0)),
        body=a.get("body", "STRING", b""),
        output_precision=a.precision("output_precision"), **settings,
    )  # fmt: skip


def _scatter(a: _Attributes, settings: dict[str, Any]) -> Scatter:
    shape = a.get("output_shape", "INTS")
    if shape is None or len(shape) != 5 or min(shape) < 1:
        raise ValueError(f"{a.name}: output_shape is {shape}; expected batch, channels, three axes")
    return Scatter(
        input_spatial_shape=a.sizes("input_spatial_shape", least=1),
        format=a.one_of("format", "xyz", ("xyz", "zyx")),
        output_shape=tuple(int(s) for s in shape),
        **settings,
    )
