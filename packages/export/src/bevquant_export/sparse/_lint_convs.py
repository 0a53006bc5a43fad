"""libspconv: requirements on each node: attributes, weights, bias, precision and ranges.

The parser misreads attributes of another type, precisions and ranges in silence.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from bevquant_export.lint._graph import Finding, Graph, Node, Rules, quoted
from bevquant_export.lint._tensors import numel, shape_of, values
from bevquant_export.sparse._node_attributes import PARSED

if TYPE_CHECKING:
    import onnx

_rule = Rules("SPC", "libspconv")

# fmt: off
THREE = _rule(2, "a SparseConvolution has three inputs: x, weight, bias",
    "fold the batch norm and write the bias always, zeros if need be: the parser aborts without")
INITIALIZER = _rule(3, "weight and bias of a SparseConvolution are initializers",
    "write them as initializers: the parser looks nowhere else")
FLOAT16 = _rule(4, "weight and bias are FLOAT16",
    "convert them: weights of any other type are left empty and the engine asserts")
RAW = _rule(5, "weight and bias are in raw_data, in the file itself",
    "write with onnx.numpy_helper.from_array: typed fields and external data are not read")
SHAPE = _rule(6, "weight is [out, k0, k1, k2, in] (KRSC) with the kernel, out_channels, "
    "in_channels it states",
    "permute the weight with bevquant_sparse.permute_weight to KRSC, and write what it has")
BIAS = _rule(7, "bias is [out]", "write one number for each output channel")
KERNEL = _rule(8, "kernel_size, stride, padding, dilation are there, with three integers each",
    "write all four: a missing one is an empty vector and no error")
KIND = _rule(9, "subm is there, and subm and inverse are 0 or 1", "write 0 or 1")
ACTIVATION = _rule(12, 'activation is "ReLU" or "None"',
    'write one of the two strings exactly, and fold a ReLU after the conv into "ReLU"')
DOUBTFUL = _rule(13, 'activation is not "Sigmoid" or "LeakyReLU", which some exporters write',
    "run that activation after the engine: whether it takes them is not documented", "warning")
FINITE = _rule(21, "weights and biases are finite after the conversion to FLOAT16",
    "look at the layer's folded batch norm: a tiny variance makes weights beyond 65504")
ATTRIBUTES = _rule(29, "output_bound and all attributes of shape are written, of those that the "
    "parser skips too",
    "write ndim, in_channels, out_channels, transposed, output_padding, groups, "
    "input_spatial_shape, output_spatial_shape, input_shape, output_shape and output_bound",
    "warning")
SKIPPED = _rule(31, "groups is 1, transposed 0 (but on an inverse conv), output_padding 0",
    "rewrite the conv: the parser skips these attributes and computes an ordinary conv")
BOUND = _rule(32, "output_bound and fixed_launch_points are positive and within int32",
    "set output_bound from calibration with head room: what is beyond it is cut off in silence, "
    "and the parser reads a number beyond int32 as 0")
NAMES = _rule(45, "names of weights contain `weight`, those of biases `bias`",
    "name them spconv<i>.weight and spconv<i>.bias: one engine finds them by that", "warning")
# fmt: on
_WRITTEN = (
    *("ndim", "in_channels", "out_channels", "transposed", "output_padding", "groups"),
    *("input_spatial_shape", "output_spatial_shape", "input_shape", "output_shape"),
    "output_bound",
)


def check_convs(graph: Graph, folder: Path) -> Iterator[Finding]:
    """Check each SparseConvolution by itself."""
    counts: dict[str, int] = {}
    for node in graph.nodes:
        if node.op == "SparseConvolution":
            yield from _inputs(graph, node, folder, counts)
            yield from _attributes(node)


def kernel_of(node: Node) -> dict[str, list[int]] | None:
    """kernel_size, stride, padding and dilation, None where one is missing."""
    found = {name: node.integers(name) for name in ("kernel_size", "stride", "padding", "dilation")}
    good = all(len(v) == 3 and min(v) >= (name != "padding") for name, v in found.items())
    return found if good else None


def weight_dims(graph: Graph, node: Node) -> list[int] | None:
    """[out, k0, k1, k2, in] of a conv whose weight has the shape that its attributes state."""
    tensor = graph.initializers.get(node.input(1))
    dims = shape_of(tensor) if tensor is not None else []
    return None if _misfits(node, dims) else dims


def _inputs(graph: Graph, node: Node, folder: Path, counts: dict[str, int]) -> Iterator[Finding]:
    if len(node.inputs) != 3 or not all(node.inputs):
        there = len([name for name in node.inputs if name])
        yield THREE.found(node.name, f"it has {there} inputs")
    weight = weight_dims(graph, node)
    for slot, role in ((1, "weight"), (2, "bias")):
        name = node.input(slot)
        if not name:
            continue
        tensor = graph.initializers.get(name)
        if tensor is None:
            if name in graph.producers or graph.sees(name):
                yield INITIALIZER.found(node.name, f"its {role} {quoted(name)} is no initializer")
            continue
        if role not in name:
            yield NAMES.found(node.name, f"its {role} is called {quoted(name)}")
        dims = shape_of(tensor)
        if tensor.data_type != 10:
            yield FLOAT16.found(node.name, f"its {role} has data type {tensor.data_type}, not 10")
        elif tensor.data_location == 1 or (numel(dims) and not tensor.HasField("raw_data")):
            yield RAW.found(node.name, f"its {role} {quoted(name)} is not in raw_data")
        if name not in counts:
            counts[name] = _infinite(tensor, folder)
        if counts[name]:
            yield FINITE.found(node.name, f"{counts[name]} values of its {role} are not finite")
        if role == "weight":
            wrong = _misfits(node, dims)
            if wrong:
                yield SHAPE.found(node.name, f"weight {dims[:8]} does not fit {wrong}")
        elif weight is not None and dims != weight[:1]:
            yield BIAS.found(node.name, f"bias {dims[:6]} for {weight[0]} output channels")


def _infinite(tensor: onnx.TensorProto, folder: Path) -> int:
    """Number of infinite or NaN values in a FLOAT16 tensor that lies in the file."""
    half = tensor.data_type == 10 and tensor.data_location == 0
    numbers = values(tensor, folder) if half else None
    return int((~np.isfinite(numbers)).sum()) if numbers is not None else 0


def _misfits(node: Node, dims: list[int]) -> str:
    """Contradictions of a weight's dimensions, empty where they fit."""
    if len(dims) != 5:
        return "five dimensions"
    kernel = node.integers("kernel_size")
    stated = (
        ("kernel_size", kernel if len(kernel) == 3 else dims[1:4], dims[1:4]),
        ("out_channels", node.integer("out_channels", dims[0]), dims[0]),
        ("in_channels", node.integer("in_channels", dims[4]), dims[4]),
    )
    return " and ".join(
        f"{name} {stated_as}" for name, stated_as, real in stated if stated_as != real
    )


def _attributes(node: Node) -> Iterator[Finding]:
    there = node.attributes
    for name in ("kernel_size", "stride", "padding", "dilation"):
        got = node.integers(name)
        # Another type is for the rule about types to say.
        if name in there and there[name].type != 7:
            continue
        if len(got) != 3 or min(got) < (name != "padding"):
            came = got[:6] if name in there else "nothing"
            yield KERNEL.found(node.name, f"{name} is {came}")
    for name in ("subm", "inverse"):
        if node.integer(name) not in (0, 1) or (name == "subm" and name not in there):
            state = node.integer(name) if name in there else "missing"
            yield KIND.found(node.name, f"{name} is {state}")
    activation = node.text("activation")
    if activation in ("Sigmoid", "LeakyReLU"):
        yield DOUBTFUL.found(node.name, f"activation is {activation}")
    elif activation not in ("ReLU", "None") and (
        "activation" not in there or activation is not None
    ):
        word = "missing" if activation is None else quoted(activation)
        yield ACTIVATION.found(node.name, f"activation is {word}")
    missing = [name for name in _WRITTEN if name not in there]
    if missing:
        yield ATTRIBUTES.found(node.name, f"{', '.join(missing)} missing")
    odd = [
        f"{name} {value}"
        for name, value, plain in (
            ("groups", node.integer("groups", 1), 1),
            ("transposed", node.integer("transposed") * (node.integer("inverse") != 1), 0),
            ("output_padding", max(map(abs, node.integers("output_padding")), default=0), 0),
        )
        if value != plain
    ]
    if odd:
        yield SKIPPED.found(node.name, f"it has {' and '.join(odd)}")
    for name in ("output_bound", "fixed_launch_points"):
        # NVIDIA's parser cuts 64 bits to 32: 2³² becomes 0.
        if name in there and there[name].type == 2 and not 0 < node.integer(name) < 2**31:
            yield BOUND.found(node.name, f"{name} is {node.integer(name)}")


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
_KINDS = {1: "FLOAT", 2: "INT", 3: "STRING", 6: "FLOATS", 7: "INTS"}


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
            wanted, came = PARSED.get(name), _KINDS.get(attribute.type, str(attribute.type))
            if wanted not in (None, came):
                yield TYPES.found(node.name, f"{name} is {came}, not {wanted}")
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
    """max|w| of each output channel; None without finite weights in the file."""
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
