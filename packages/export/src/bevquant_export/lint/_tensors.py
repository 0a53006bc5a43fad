"""Tensors of a file: claimed size, real size, and values."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from bevquant_export.lint._graph import DENSE, Finding, Graph, Node, Rule, quoted

if TYPE_CHECKING:
    import onnx

# fmt: off
ESCAPES = Rule("ONX009", "error",
    "external data lies in the folder of the model: no absolute path, no .., no link out of it",
    "keep the data file next to the model and write its bare name into `location`")
MISSING_DATA = Rule("ONX010", "error",
    "external data is there, in the length that the tensor needs",
    "copy the data file together with the model, or save the model with its data inside")
SIZES = Rule("ONX011", "error",
    "a tensor has a known type, dimensions a machine can hold, and as much data as they ask for",
    "write the tensor again with onnx.numpy_helper.from_array")
# fmt: on

_MOST_ELEMENTS = 2**40
_MOST_DIMS = 64
# Fields with typed data, and the types that each of them holds (onnx.proto, TensorProto).
_TYPED = {
    "float_data": {1, 14},
    "int32_data": {2, 3, 4, 5, 6, 9, 10, 16, 17, 18, 19, 20, 21, 22, 23, 24, 25, 26},
    "string_data": {8},
    "int64_data": {7},
    "double_data": {11, 15},
    "uint64_data": {12, 13},
}
_BITS = {
    **dict.fromkeys((2, 3, 9, 17, 18, 19, 20, 24), 8),
    **dict.fromkeys((4, 5, 10, 16), 16),
    **dict.fromkeys((1, 6, 12), 32),
    **dict.fromkeys((7, 11, 13, 14), 64),
    **dict.fromkeys((21, 22, 23), 4),
    **dict.fromkeys((25, 26), 2),
    15: 128,
    8: 0,
}


def numel(dims: Any) -> int | None:
    """Number of elements, None where dimensions are negative or exceed any memory.

    Example:
        >>> numel([2, 3]), numel([]), numel([2**62, 2**62]), numel([-1])
        (6, 1, None, None)
    """
    if len(dims) > _MOST_DIMS or any(d < 0 for d in dims):
        return None
    count = math.prod(map(int, dims))
    return count if count <= _MOST_ELEMENTS else None


def shape_of(tensor: onnx.TensorProto) -> list[int]:
    """Dimensions, at most 65 of them: a tensor may claim more, and every node may read it."""
    return list(tensor.dims[: _MOST_DIMS + 1])


def check_tensor(tensor: onnx.TensorProto, folder: Path) -> Iterator[Finding]:
    """Compare a tensor's claims with its content, without allocating by the claim."""
    name = tensor.name or "tensor"
    if tensor.data_type not in _BITS:
        yield SIZES.found(name, f"data type {tensor.data_type} is none of ONNX")
        return
    count = numel(tensor.dims)
    if count is None:
        shown = ", ".join(str(d) for d in tensor.dims[:8])
        yield SIZES.found(name, f"dimensions [{shown}] are impossible")
        return
    needed = (count * _BITS[tensor.data_type] + 7) // 8
    if tensor.data_location == 1:
        yield from _check_external(tensor, name, needed, folder)
        return
    if tensor.data_type == 8:
        if len(tensor.string_data) != count:
            yield SIZES.found(name, f"{count} strings expected, {len(tensor.string_data)} there")
    elif tensor.HasField("raw_data"):
        if len(tensor.raw_data) != needed:
            yield SIZES.found(name, f"{needed} bytes expected, {len(tensor.raw_data)} there")
    else:
        field = next(f for f, types in _TYPED.items() if tensor.data_type in types)
        entries = len(getattr(tensor, field))
        if tensor.data_type in (14, 15):
            count *= 2
        packed = _BITS[tensor.data_type] < 8 and entries == (needed)
        if entries != count and not packed:
            yield SIZES.found(name, f"{count} numbers expected in {field}, {entries} there")


def _check_external(
    tensor: onnx.TensorProto, name: str, needed: int, folder: Path
) -> Iterator[Finding]:
    place = _external(tensor, folder)
    if isinstance(place, str):
        yield ESCAPES.found(name, place)
        return
    path, offset, length = place
    try:
        size = path.stat().st_size if path.is_file() else -1
    except OSError:
        size = -1
    if size < 0:
        yield MISSING_DATA.found(name, "its data file is not in the folder of the model")
    elif offset < 0 or length not in (-1, needed) or offset + needed > size:
        yield MISSING_DATA.found(
            name,
            f"{needed} bytes from byte {offset} expected, `length` says "
            f"{length if length >= 0 else 'nothing'} and the file has {size}",
        )


def _external(tensor: onnx.TensorProto, folder: Path) -> tuple[Path, int, int] | str:
    """Path, offset (−1 where it is no number) and length (−1 where none is given)."""
    entries = {entry.key: entry.value for entry in tensor.external_data}
    location = entries.get("location", "")
    if not location or "\0" in location:
        return "external data without a location"
    parts = location.replace("\\", "/").split("/")
    if ".." in parts or location[0] in "/\\" or location[1:2] == ":":
        return f"location {location[:60]!r} leads out of the folder of the model"
    path = folder / location
    try:
        if not path.resolve().is_relative_to(folder.resolve()):
            return f"location {location[:60]!r} is a link out of the folder of the model"
    except (OSError, RuntimeError):
        return f"location {location[:60]!r} cannot be followed"
    offset, length = entries.get("offset", "0"), entries.get("length", "-1")
    begin, size = (
        int(text) if re.fullmatch("-?[0-9]{1,18}", text) else -2 for text in (offset, length)
    )
    return path, begin, size


def values(tensor: onnx.TensorProto | None, folder: Path) -> np.ndarray[Any, Any] | None:
    """Values of a tensor, None where `check_tensor` has a finding or it holds strings."""
    import onnx
    from onnx import numpy_helper

    if tensor is None or tensor.data_type == onnx.TensorProto.STRING:
        return None
    if next(check_tensor(tensor, folder), None) is not None:
        return None
    if tensor.data_location == onnx.TensorProto.EXTERNAL:
        place = _external(tensor, folder)
        if isinstance(place, str):
            return None
        path, offset, _ = place
        needed = ((numel(tensor.dims) or 0) * _BITS[tensor.data_type] + 7) // 8
        with path.open("rb") as file:
            file.seek(offset)
            data = file.read(needed)
        tensor = onnx.TensorProto(data_type=tensor.data_type, dims=tensor.dims, raw_data=data)
    try:
        return np.asarray(numpy_helper.to_array(tensor))
    except (TypeError, ValueError, OverflowError):
        return None


# QuantizeLinear and DequantizeLinear: their operands, and the rules that dense targets share.

# fmt: off
NO_AXIS = Rule("QDQ001", "error",
    "scales per channel stand in files of opset 13 or later, where the operator has an axis",
    "write opset 13 with the axis (before it every runtime takes axis 1, in silence)",
    ("tensorrt", "onnxruntime", "openvino"))
POSITIVE = Rule("QDQ002", "error",
    "scales are finite and above 0",
    "calibrate that quantizer: its amax is 0, NaN or missing", DENSE)
SAME = Rule("QDQ003", "error",
    "both halves of a pair have the same scale and zero point",
    "write one scale and one zero point, and let both nodes read them", DENSE)
LONG = Rule("QDQ004", "error",
    "a scale or zero point has at most 65,536 entries",
    "write one entry, or one for each channel", DENSE)
OLD = Rule("QDQ005", "error",
    "FP8 stands in files of opset 19 or later, INT16 of opset 21: before it the two operators have "
    "no such type",
    "write opset 21", DENSE)
NO_FLOAT8 = Rule("QDQ006", "error",
    "integers are integers: the runtime has no FP8, or rounds to it by way of float16 (OpenVINO)",
    "quantize with num_bits=8, or export for TensorRT or ONNX Runtime", ("openvino", "horizon"))
NO_INT16 = Rule("QDQ007", "error",
    "activations have 8 bits: the runtime has no INT16, or drops its pairs (OpenVINO)",
    "quantize with num_bits=8, or export for ONNX Runtime", ("tensorrt", "openvino", "horizon"))
# fmt: on
RULES = (NO_AXIS, POSITIVE, SAME, LONG, OLD, NO_FLOAT8, NO_INT16)
FLOAT8 = {17: "FLOAT8E4M3FN", 18: "FLOAT8E4M3FNUZ", 19: "FLOAT8E5M2", 20: "FLOAT8E5M2FNUZ"}
"""Types of FP8, by onnx.TensorProto's numbers."""
_INT16 = {4: "UINT16", 5: "INT16"}
_MOST_SCALES = 65_536
_QUANTIZE = {"QuantizeLinear", "HzQuantize"}
_DEQUANTIZE = {"DequantizeLinear", "HzDequantize"}


@dataclass(frozen=True)
class Step:
    """One QuantizeLinear or DequantizeLinear."""

    node: Node  # The node
    quantizes: bool  # Whether it is QuantizeLinear
    # Its operand, or the operand of the pair it ends, where that is constant
    constant: onnx.TensorProto | None
    scale: np.ndarray[Any, Any] | None  # Its scale, None where it is not a constant of the file
    # Its zero point, None where it has none or it is not constant
    zero: np.ndarray[Any, Any] | None
    zero_type: int  # Data type of the zero point's tensor; 0 without a constant

    @property
    def float8(self) -> str:
        """Name of its FP8 type; empty for integers."""
        own = 0 if self.quantizes or self.constant is None else self.constant.data_type
        return FLOAT8.get(self.zero_type) or FLOAT8.get(own, "")

    @property
    def block(self) -> int:
        """Values that have a scale of their own; 0 without blocks."""
        return self.node.integer("block_size")

    @property
    def int16(self) -> str:
        """Name of its type of 16 bits; empty for others."""
        return _INT16.get(self.zero_type, "")

    @property
    def per_channel(self) -> bool:
        """Whether it has more than one scale."""
        return self.scale is not None and self.scale.size > 1

    def same(self, other: Step) -> bool:
        """Whether two steps have the same scale and zero point."""
        scales = _equal(self.scale, other.scale) or (self.scale is None and other.scale is None)
        zeros = _equal(self.zero, other.zero) or (self.zero is None or other.zero is None)
        return scales and zeros


class Pairs:
    """All steps of a graph, by node and by output."""

    def __init__(self, graph: Graph, folder: Path) -> None:
        self.graph = graph
        self._read: dict[str, np.ndarray[Any, Any] | None] = {}
        self._folder = folder
        self.long: dict[str, int] = {}
        self.steps: list[Step] = []
        self._made: dict[str, Step] = {}
        for node in graph.nodes:
            if node.op in _QUANTIZE | _DEQUANTIZE and node.domain in ("", "horizon"):
                step = self._step(node)
                self.steps.append(step)
                for name in node.outputs[:1]:
                    self._made.setdefault(name, step)

    def _step(self, node: Node) -> Step:
        constant = self.graph.constant(node.input(0))
        quantizes = node.op in _QUANTIZE
        before = self.graph.producers.get(node.input(0))
        if constant is None and not quantizes and before is not None and before.op in _QUANTIZE:
            constant = self.graph.constant(before.input(0))
        zero = self.graph.constant(node.input(2))
        return Step(
            node,
            quantizes,
            constant,
            self._values(node.input(1)),
            self._values(node.input(2)),
            zero.data_type if zero is not None else 0,
        )

    def _values(self, name: str) -> np.ndarray[Any, Any] | None:
        if name not in self._read:
            tensor = self.graph.constant(name) if name else None
            count = numel(tensor.dims) if tensor is not None else None
            long = count is not None and count > _MOST_SCALES
            if long:
                self.long[name] = count or 0
            self._read[name] = None if long else values(tensor, self._folder)
        return self._read[name]

    def constant(self, name: str) -> np.ndarray[Any, Any] | None:
        """Values of a constant of any size; None for other tensors."""
        return values(self.graph.constant(name) if name else None, self._folder)

    def made(self, name: str) -> Step | None:
        """The step whose output is this tensor."""
        return self._made.get(name) if name else None

    def dequantized(self, name: str) -> Step | None:
        """The DequantizeLinear whose output is this tensor."""
        step = self.made(name)
        return step if step is not None and not step.quantizes else None

    def quantizers(self, node: Node) -> list[Step]:
        """The QuantizeLinear nodes that read a node's output."""
        users = [self._made.get(u.outputs[0]) for u in self.graph.users(node) if u.outputs]
        return [s for s in users if s is not None and s.quantizes]

    def is_quantized(self, node: Node, *ops: str) -> bool:
        """Whether a node is one of these operators, with its data and its weight dequantized."""
        if node.op not in ops:
            return False
        data, weight = (self.dequantized(node.input(slot)) for slot in (0, 1))
        return data is not None and weight is not None and weight.constant is not None


def check_pairs(pairs: Pairs, *, float8: bool = False, int16: bool = False) -> Iterator[Finding]:
    """Check scales and pairs by the rules of all dense targets."""
    graph = pairs.graph
    for name, count in pairs.long.items():
        yield LONG.found(name, f"it has {count} entries")
    for step in pairs.steps:
        node = step.node
        for kind, known, first, rule in (
            (step.float8, float8, 19, NO_FLOAT8), (step.int16, int16, 21, NO_INT16)
        ):  # fmt: skip
            opset = graph.opsets.get("", 0)
            if kind and not known:
                yield rule.found(node.name, f"it is of {kind}")
            elif kind and opset < first:
                yield OLD.found(node.name, f"it is of {kind} at opset {opset}")
        if step.scale is not None and step.scale.dtype.kind == "f":
            wrong = ~(np.isfinite(step.scale) & (step.scale > 0))
            if wrong.any():
                worst = step.scale[wrong].flat[0]
                yield POSITIVE.found(node.name, f"{int(wrong.sum())} scales like {worst}")
        before = graph.producers.get(node.input(0))
        if not step.quantizes and before is not None and before.op in _QUANTIZE:
            quantizer = pairs.made(node.input(0))
            if quantizer is not None and not step.same(quantizer):
                yield SAME.found(node.name, f"it differs from {quoted(before.name)}")


def check_axis(pairs: Pairs) -> Iterator[Finding]:
    """Check that scales per channel have an axis that the runtime reads."""
    opset = pairs.graph.opsets.get("", 0)
    for step in pairs.steps:
        if step.per_channel and opset < 13 and step.node.domain == "":
            count = step.scale.size if step.scale is not None else 0
            yield NO_AXIS.found(step.node.name, f"{count} scales at opset {opset}")


def _equal(a: np.ndarray[Any, Any] | None, b: np.ndarray[Any, Any] | None) -> bool:
    if a is b:
        return a is not None
    if a is None or b is None or a.dtype != b.dtype:
        return False
    return a.ravel().tobytes() == b.ravel().tobytes()
