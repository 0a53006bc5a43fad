"""Sizes beyond which no BPU takes an operator, so that it falls back to the CPU."""

from __future__ import annotations

import math
from collections.abc import Iterator

from bevquant_export.lint._graph import Graph, Node
from bevquant_export.lint._qdq import Pairs
from bevquant_export.lint._rule import Finding, Rule
from bevquant_export.lint._tensors import shape_of

LIMITS = Rule(
    "HRZ012",
    "warning",
    "a quantized Conv, ConvTranspose or pool is within what the BPU of BAYES takes",
    "make the layer smaller, or expect it on the CPU",
    ("horizon",),
)
SIZES = Rule(
    "HRZ013",
    "warning",
    "inputs have a batch of 1 to 4096, other dimensions of 1 to 65536, and less than 1 GiB",
    "cut the input into parts",
    ("horizon",),
)
RULES = (LIMITS, SIZES)


def check_limits(pairs: Pairs) -> Iterator[Finding]:
    """Check the layers whose input is quantized, and the graph's inputs."""
    graph = pairs.graph
    for node in graph.nodes:
        data = pairs.dequantized(node.input(0))
        if data is None or data.constant is not None or node.domain:
            continue
        wrong = list(_wrong(pairs, node))
        if wrong:
            yield LIMITS.found(node.name, f"{node.op} has {', '.join(wrong)}")
    if not graph.is_function and graph.outer is None:
        yield from _inputs(graph)


def _wrong(pairs: Pairs, node: Node) -> Iterator[str]:
    weight = pairs.dequantized(node.input(1))
    fixed = weight.constant if weight is not None else None
    dims = shape_of(fixed) if fixed is not None else []
    strides = node.integers("strides") or [1]
    dilations = node.integers("dilations") or [1]
    pads = node.integers("pads") or [0]
    if node.op == "Conv" and len(dims) == 4:
        tests = [
            ("kernel", dims[2:], max(dims[2:]) <= 31),
            ("output channels", dims[0], dims[0] <= 16384),
            ("input channels", dims[1] * node.integer("group", 1), dims[1] <= 8192),
            ("weights per filter", math.prod(dims[1:]), math.prod(dims[1:]) < 65535),
            ("dilations", dilations, max(dilations) <= 16),
            ("dilations with strides", strides, max(dilations) == 1 or max(strides) == 1),
            ("pads", pads, max(pads) <= 256),
        ]
    elif node.op == "ConvTranspose" and len(dims) == 4:
        extra = node.integers("output_padding") or [0]
        tests = [
            ("kernel", dims[2:], 2 <= min(dims[2:]) and max(dims[2:]) <= 14),
            ("channels", dims[:2], max(dims[:2]) <= 2048),
            ("weights per filter", math.prod(dims[1:]), math.prod(dims[1:]) <= 65535),
            ("strides", strides, max(strides) <= min(14, *dims[2:])),
            ("dilations", dilations, max(dilations) == 1),
            ("output_padding", extra, max(extra) <= 1),
        ]
    elif node.op in ("MaxPool", "AveragePool"):
        kernel = node.integers("kernel_shape") or [1]
        most = 255 if node.op == "MaxPool" else 256
        tests = [
            ("kernel", kernel, max(kernel) <= 256),
            ("strides", strides, max(strides) <= 256),
            ("pads", pads, max(pads) <= most),
            ("dilations", dilations, max(dilations) == 1),
        ]
    else:
        return
    for name, came, good in tests:
        if not good:
            yield f"{name} {came[:4] if isinstance(came, list) else came}"


def _inputs(graph: Graph) -> Iterator[Finding]:
    for value in graph.proto.input:
        tensor = value.type.tensor_type
        dims = [d.dim_value for d in tensor.shape.dim if d.WhichOneof("value") == "dim_value"]
        known = len(dims) == len(tensor.shape.dim) and len(dims) > 0
        size = 4 * math.prod(dims[:16]) if known else 0
        if known and (
            len(dims) > 10
            or not 1 <= dims[0] <= 4096
            or not all(1 <= d <= 65536 for d in dims[1:])
            or size >= 2**30
        ):
            yield SIZES.found(value.name, f"its shape is {dims[:8]}")
