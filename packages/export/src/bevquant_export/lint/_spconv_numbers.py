"""libspconv: precision, ranges and attribute types, which the parser misreads in silence."""

from __future__ import annotations

import math
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from bevquant_export.lint._graph import Graph, Node
from bevquant_export.lint._rule import Finding, quoted
from bevquant_export.lint._spconv_convs import weight_dims
from bevquant_export.lint._tensors import values

if TYPE_CHECKING:
    import onnx

# fmt: off
TYPES = _rule(10, "attributes have the type that the parser reads (INT where it reads FLOAT is "
    "0.0)",
    "write ranges as FLOAT and FLOATS, shapes as INTS, switches as INT, words as STRING")
PRECISION = _rule(11, 'precision and output_precision are there, and "int8" or "fp16"',
    "write one of the two strings exactly: every other one is fp16, in silence")
INPUT_RANGE = _rule(14, "with precision int8 every input has a dynamic range: finite and above 0",
    "calibrate the quantizer of that tensor, and write its amax")
WEIGHT_COUNT = _rule(15, "with precision or output_precision int8 there is a weight range for "
    "each output channel",
    "write one amax for each output channel: the engine asserts that they are as many as biases")
WEIGHT_RANGE = _rule(16, "weight ranges are finite and above 0",
    "calibrate the weights; a channel of zeros takes any positive range")
ONE_RANGE = _rule(17, "all readers of a tensor state one range for it",
    "share one quantizer between them: there is no output range, and the last reader wins")
ADD_RANGE = _rule(18, "both inputs of an Add have the same range",
    "share one quantizer between the two branches")
NO_RANGE = _rule(19, "an int8 tensor is read by a node that states its range",
    "write input_dynamic_range at its reader, or make the tensor fp16")
CLIPPED = _rule(20, "weights are integers of −127 … 127 in steps of range/127",
    "take max|w| of each output channel as its range, or clip the weights")
# fmt: on
RULES = tuple(_rule)
_TYPE_NAMES = {1: "FLOAT", 2: "INT", 3: "STRING", 6: "FLOATS", 7: "INTS"}
_READ_AS = {
    **dict.fromkeys(("kernel_size", "stride", "padding", "dilation", "dims"), 7),
    **dict.fromkeys(("input_spatial_shape", "output_spatial_shape", "output_padding"), 7),
    **dict.fromkeys(("input_shape", "output_shape"), 7),
    **dict.fromkeys(("subm", "inverse", "output_bound", "fixed_launch_points", "ndim"), 2),
    **dict.fromkeys(("in_channels", "out_channels", "transposed", "groups"), 2),
    **dict.fromkeys(("rulebook", "activation", "precision", "output_precision"), 3),
    **dict.fromkeys(("format", "output_layout"), 3),
    **dict.fromkeys(("input_dynamic_range", "input0_dynamic_range", "input1_dynamic_range"), 1),
    "weight_dynamic_ranges": 6,
}


def is_add(node: Node) -> bool:
    """Whether a node is the Add of libspconv, in either spelling."""
    return node.op in ("Add", "QuantAdd")


def precision(node: Node, name: str = "precision") -> str:
    """The parser's reading of a precision: "int8" exactly, else fp16."""
    return "int8" if node.text(name) == "int8" else "fp16"


def check_numbers(graph: Graph, folder: Path) -> Iterator[Finding]:
    """Check types, precisions and ranges of all nodes."""
    largest: dict[str, np.ndarray[Any, Any] | None] = {}
    for node in graph.nodes:
        for name, attribute in node.attributes.items():
            wanted = _READ_AS.get(name, attribute.type)
            if attribute.type != wanted:
                came = _TYPE_NAMES.get(attribute.type, attribute.type)
                yield TYPES.found(node.name, f"{name} is {came}, not {_TYPE_NAMES[wanted]}")
        if node.op == "SparseConvolution" or is_add(node):
            yield from _precision(node)
            yield from _ranges(node)
        if node.op == "SparseConvolution":
            yield from _weights(graph, node, folder, largest)
    yield from _shared(graph)


def _precision(node: Node) -> Iterator[Finding]:
    for name in ("precision", "output_precision"):
        text = node.text(name)
        if text not in ("int8", "fp16") and (text is not None or name not in node.attributes):
            came = "missing" if text is None else quoted(text)
            yield PRECISION.found(node.name, f"{name} is {came}")


def _range_names(node: Node) -> tuple[str, ...]:
    """The attributes with a range, one for each input that is a tensor of features."""
    if is_add(node):
        return ("input0_dynamic_range", "input1_dynamic_range")
    return ("input_dynamic_range",)


def _ranges(node: Node) -> Iterator[Finding]:
    stated = []
    for name in _range_names(node):
        value = node.number(name)
        stated.append(value)
        wrong = value is not None and not 0 < value < math.inf
        absent = name not in node.attributes and precision(node) == "int8"
        if wrong or absent:
            yield INPUT_RANGE.found(node.name, f"{name} is {'missing' if absent else value}")
    if len(stated) == 2 and None not in stated and stated[0] != stated[1]:
        yield ADD_RANGE.found(node.name, f"the ranges are {stated[0]} and {stated[1]}")


def _weights(
    graph: Graph, node: Node, folder: Path, largest: dict[str, np.ndarray[Any, Any] | None]
) -> Iterator[Finding]:
    ranges = node.numbers("weight_dynamic_ranges")
    tensor = graph.initializers.get(node.input(1))
    dims = weight_dims(graph, node)
    channels = dims[0] if dims is not None else None
    quantized = "int8" in (precision(node), precision(node, "output_precision"))
    typed = (
        node.attributes["weight_dynamic_ranges"].type == 6
        if ("weight_dynamic_ranges" in node.attributes)
        else True
    )
    if quantized and typed and channels is not None and len(ranges) != channels:
        yield WEIGHT_COUNT.found(node.name, f"{len(ranges)} ranges for {channels} channels")
        return
    bad = [i for i, value in enumerate(ranges) if not 0 < value < math.inf]
    if bad:
        yield WEIGHT_RANGE.found(node.name, f"the range of channel {bad[0]} is {ranges[bad[0]]}")
        return
    if not quantized or not ranges or tensor is None or dims is None:
        return
    name = node.input(1)
    if name not in largest:
        largest[name] = _largest(tensor, folder)
    reached = largest[name]
    if reached is not None and len(reached) == len(ranges):
        steps = np.rint(reached * 127 / np.asarray(ranges, np.float64))
        if steps.max() > 127:
            channel = int(steps.argmax())
            yield CLIPPED.found(node.name, f"channel {channel} reaches {int(steps[channel])} steps")


def _largest(tensor: onnx.TensorProto, folder: Path) -> np.ndarray[Any, Any] | None:
    """max|w| of each output channel, None where there are no finite weights in the file."""
    weight = values(tensor, folder) if tensor.data_location == 0 else None
    if weight is None or weight.ndim == 0 or weight.dtype.kind != "f" or not weight.size:
        return None
    found = np.abs(weight.reshape(len(weight), -1).astype(np.float64)).max(axis=1)
    return found if np.isfinite(found).all() else None


def _shared(graph: Graph) -> Iterator[Finding]:
    """Check each tensor from its consumers, which alone state its range."""
    for name, readers in graph.readers.items():
        stated: dict[float, str] = {}
        for node, slot in readers:
            names = _range_names(node)
            features = is_add(node) or node.op in ("SparseConvolution", "ScatterDense")
            if features and slot < len(names):
                value = node.number(names[slot])
                if value is not None and 0 < value < math.inf:
                    stated.setdefault(value, node.name)
        if len(stated) > 1:
            shown = [f"{value:.6g} at {quoted(who)}" for value, who in list(stated.items())[:3]]
            yield ONE_RANGE.found(name, f"its readers state {', '.join(shown)}")
        maker = graph.producers.get(name)
        if maker is not None and not stated and _int8(graph, maker) and not _goes_on(readers):
            yield NO_RANGE.found(name, f"{quoted(maker.name)} makes it int8, no reader has a range")


def _int8(graph: Graph, node: Node) -> bool:
    """Whether a node's output is int8; a Relu has the type of its Add."""
    if node.op == "Relu":
        maker = graph.producers.get(node.input(0))
        return maker is not None and is_add(maker) and _int8(graph, maker)
    made = node.op == "SparseConvolution" or is_add(node)
    return made and precision(node, "output_precision") == "int8"


def _goes_on(readers: list[tuple[Node, int]]) -> bool:
    """Whether the tensor is inside a fused pair, or its range is reported already."""
    return any(
        node.op == "Relu"
        or any(name in node.attributes for name in _range_names(node))
        or precision(node) == "int8"
        for node, _ in readers
    )
