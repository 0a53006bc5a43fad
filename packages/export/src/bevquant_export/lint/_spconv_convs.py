"""libspconv: requirements on each SparseConvolution (attributes, weights, bias)."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from bevquant_export.lint._graph import Graph, Node
from bevquant_export.lint._rule import Finding, Rules, quoted
from bevquant_export.lint._tensors import numel, shape_of, values

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
