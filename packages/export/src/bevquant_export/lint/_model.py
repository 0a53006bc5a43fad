"""Rules on a model's content: versions, operators, leaked tensors, layers.

Layers of dense files have weights and windows, whose numbers may contradict each other.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

from bevquant_export.lint._graph import DENSE, Finding, Graph, Node, Rule, quoted
from bevquant_export.lint._tensors import check_tensor, shape_of

if TYPE_CHECKING:
    import onnx

    from bevquant_export._target import Target

# fmt: off
VERSIONS = Rule("ONX014", "error",
    "the model states its IR version and imports each domain it uses once, ONNX in a version that "
    "there is",
    "write ir_version and one opset_import for every domain (onnx.helper.make_model does)", DENSE)
UNKNOWN_OP = Rule("ONX015", "error",
    "every operator is in ONNX at the imported opset, or a function of the model",
    "write it with standard operators, or raise the opset if the target takes a later one", DENSE)
LEAKED = Rule("ONX016", "error",
    "no tensor of the file is float64 or bfloat16 (but what rescales exact sums over voxels)",
    "convert the model to float32 before it is exported", DENSE)
SIZES = Rule("ONX020", "error",
    "inputs, outputs and values have dimensions that a machine can hold",
    "write the sizes of the model, or a name for one that is free")
UNREAD = Rule("ONX017", "warning",
    "every initializer is read (num_batches_tracked and float weights leak into files)",
    "leave it out of the file")
# fmt: on


# fmt: off
WINDOWS = Rule("ONX018", "error",
    "windows have sizes, strides, dilations and groups from 1 and pads from 0, as many as their "
    "weight's kernel has axes, and no stride or dilation beyond any grid",
    "write the numbers of the layer that the node stands for")
CHANNELS = Rule("ONX019", "error",
    "a layer's weight has the channels of what it reads",
    "write the weight of this layer, in ONNX's order of axes, or correct what it reads")
# fmt: on

PLUGINS = "trt.plugins"  # domain of TensorRT's own plugins, as ONNX Runtime calls it
ATTENTION = "MultiscaleDeformableAttnPlugin_TRT"
TRT, FP4_QUANTIZE = "trt", "TRT_FP4DynamicQuantize"  # an operator of TensorRT's parser
VOXELS = "bevquant.voxels"  # domain of functions in files with sparse convolutions
_WEIGHTED = {"Conv": 1, "ConvTranspose": 1, "ConvInteger": 1, "QLinearConv": 3}
_POOLS = ("MaxPool", "AveragePool", "LpPool")
_LEAST = {"kernel_shape": 1, "strides": 1, "dilations": 1, "pads": 0}
_MOST = 2**31 - 1
_WIDEST = 2**16  # of strides and dilations
# What hands on the channels of its first input; these keep axis 1 wherever they stand.
_KEEPS = frozenset(
    "Relu LeakyRelu PRelu Elu Selu Celu Sigmoid HardSigmoid HardSwish Tanh Clip Softplus Mish "
    "BatchNormalization InstanceNormalization Dropout Identity QuantizeLinear DequantizeLinear "
    "MaxPool AveragePool LpPool GlobalAveragePool GlobalMaxPool Cast Abs Neg Exp Sqrt Erf "
    "HzQuantize HzDequantize".split()
)


def check_model(
    model: onnx.ModelProto, graphs: list[Graph], target: Target, folder: Path
) -> Iterator[Finding]:
    """Check versions, operators, layers and initializers of all graphs."""
    exact = any(function.domain == VOXELS for function in model.functions)
    read = {name for graph in graphs for name in (*graph.readers, *graph.outputs)}
    for graph in graphs:
        constants = [
            attribute.t
            for node in graph.nodes
            for attribute in node.attributes.values()
            if attribute.type == 4 and not attribute.ref_attr_name
        ]
        for tensor in (*graph.tensors, *constants):
            yield from check_tensor(tensor, folder)
            if target.kind == "dense" and tensor.data_type in ((16,) if exact else (11, 16)):
                kind = "float64" if tensor.data_type == 11 else "bfloat16"
                yield LEAKED.found(tensor.name or "constant", f"the tensor is {kind}")
        for tensor in graph.tensors:
            if tensor.name not in read:
                yield UNREAD.found(tensor.name, "no node reads this initializer")
    yield from _sizes(graphs)
    if target.kind == "dense":
        yield from _versions(model, graphs)
        yield from _operators(model, graphs, target)
        for graph in graphs:
            yield from _windows(graph, folder)


def _sizes(graphs: list[Graph]) -> Iterator[Finding]:
    for graph in graphs:
        if graph.is_function:
            continue
        proto = graph.proto
        for value in (*proto.input, *proto.output, *proto.value_info):
            if not value.type.HasField("tensor_type"):
                continue
            dims = [d.dim_value for d in value.type.tensor_type.shape.dim[:65]]
            # A negative size is a free one (`FREE`).
            if max(dims, default=0) >= 2**31 or math.prod(max(d, 1) for d in dims) > 2**40:
                shown = ", ".join(map(str, dims[:8]))
                yield SIZES.found(value.name or "value", f"dimensions [{shown}] are impossible")


def _versions(model: onnx.ModelProto, graphs: list[Graph]) -> Iterator[Finding]:
    if model.ir_version < 1:
        yield VERSIONS.found("file", f"IR version {model.ir_version}")
    imports = Counter("" if e.domain == "ai.onnx" else e.domain for e in model.opset_import)
    for domain, count in imports.items():
        if count > 1:
            yield VERSIONS.found("file", f"domain {quoted(domain or 'ai.onnx')} is imported twice")
    import onnx

    newest = onnx.defs.onnx_opset_version()
    for entry in model.opset_import:
        if entry.domain in ("", "ai.onnx") and not 1 <= entry.version <= newest:
            known = f"ONNX has 1 to {newest} here"
            yield VERSIONS.found("file", f"operator set {entry.version} is imported; {known}")
    reported: set[str] = set()
    for graph in graphs:
        for node in graph.nodes:
            if node.domain not in graph.opsets and node.domain not in reported:
                reported.add(node.domain)
                domain = quoted(node.domain or "ai.onnx")
                yield VERSIONS.found(node.name, f"its domain {domain} is not imported")


def _operators(model: onnx.ModelProto, graphs: list[Graph], target: Target) -> Iterator[Finding]:
    known: dict[tuple[str, str, int], bool] = {}
    functions = {(f.domain, f.name) for f in model.functions}
    for graph in graphs:
        for node in graph.nodes:
            if (node.domain, node.op) in functions or node.domain in target.domains:
                continue
            # TensorRT looks for a plugin under the operator's name; it has a rule of its own.
            if node.domain and target.family == "tensorrt":
                continue
            version = graph.opsets.get(node.domain)
            if version is None:
                continue
            key = (node.op, node.domain, version)
            if key not in known:
                known[key] = _is_known(*key)
            if not known[key]:
                of = quoted(node.domain) if node.domain else "ONNX"
                yield UNKNOWN_OP.found(
                    node.name, f"operator {quoted(node.op)} is not in {of} at opset {version}"
                )


def _is_known(op: str, domain: str, version: int) -> bool:
    import onnx

    try:
        schema = onnx.defs.get_schema(op, min(version, 2**31 - 1), domain)
    except (onnx.defs.SchemaError, TypeError, ValueError):
        return False
    return not schema.deprecated


def _windows(graph: Graph, folder: Path) -> Iterator[Finding]:
    """Check convolutions, pooling and linear layers of the standard operators."""
    for node in graph.nodes:
        if node.domain:
            continue
        if node.op in _WEIGHTED or node.op in _POOLS:
            wrong = next(_wrong(node), None) or next(_of_weight(graph, node), None)
            if wrong is not None:
                yield WINDOWS.found(node.name, wrong)
                continue
        if node.op in ("Conv", "ConvTranspose", "Gemm"):
            wrong = _channels(graph, node, folder)
            if wrong is not None:
                yield CHANNELS.found(node.name, wrong)


def _wrong(node: Node) -> Iterator[str]:
    for name, least in _LEAST.items():
        most = _WIDEST if name in ("strides", "dilations") else _MOST
        for value in node.integers(name):
            if not least <= value <= most:
                yield f"{name} has {value}"
    if node.op in _WEIGHTED and not 1 <= node.integer("group", 1) <= _MOST:
        yield f"group is {node.integer('group', 1)}"


def _of_weight(graph: Graph, node: Node) -> Iterator[str]:
    kernel = node.integers("kernel_shape")
    shape = _weight(graph, node.input(_WEIGHTED[node.op])) if node.op in _WEIGHTED else None
    if shape is not None and len(shape) >= 3:
        if kernel and kernel != shape[2:]:
            yield f"kernel_shape {kernel}, but its weight's kernel is {shape[2:]}"
        # A transposed convolution's weight starts with the input channels.
        if shape[0] % node.integer("group", 1):
            yield f"its {shape[0]} channels are not a multiple of group {node.integer('group', 1)}"
        kernel = shape[2:]
    if not kernel:
        return
    for name, times in (("strides", 1), ("dilations", 1), ("pads", 2), ("output_padding", 1)):
        given = node.integers(name)
        if given and len(given) != times * len(kernel):
            yield f"{name} has {len(given)} entries for {len(kernel)} axes"


def _weight(graph: Graph, name: str) -> list[int] | None:
    """Dimensions of a constant weight, also behind its pair."""
    for _ in range(4):
        tensor = graph.constant(name)
        if tensor is not None:
            return shape_of(tensor)
        maker = graph.producers.get(name)
        if maker is None or maker.op not in ("QuantizeLinear", "DequantizeLinear", "Identity"):
            return None
        name = maker.input(0)
    return None


def _channels(graph: Graph, node: Node, folder: Path) -> str | None:
    shape = _weight(graph, node.input(1))
    reads = _made(graph, node.input(0))
    if shape is None or reads is None or len(shape) < 2:
        return None
    if any(next(check_tensor(t, folder), None) for t in graph.tensors if shape_of(t) == shape):
        return None  # what it says of itself is wrong
    if node.op == "Gemm":
        if node.integer("transA"):
            return None
        wants = shape[1] if node.integer("transB") else shape[0]
    else:
        wants = shape[0] if node.op == "ConvTranspose" else shape[1] * node.integer("group", 1)
    if wants == reads:
        return None
    return f"its weight {shape[:6]} is for {wants} channels, and what it reads has {reads}"


def _made(graph: Graph, name: str) -> int | None:
    """Channels (axis 1) of a tensor; None where the file does not determine it."""
    for _ in range(len(graph.nodes) + 1):
        maker = graph.producers.get(name)
        if maker is None:
            return _given(graph, name)
        if maker.domain and maker.domain != "horizon":
            return None
        if maker.op in ("Conv", "ConvTranspose", "Gemm"):
            shape = _weight(graph, maker.input(1))
            if shape is None or len(shape) < 2:
                return None
            if maker.op == "Conv":
                return shape[0]
            if maker.op == "ConvTranspose":
                return shape[1] * maker.integer("group", 1)
            return shape[0] if maker.integer("transB") else shape[1]
        if maker.op not in _KEEPS:
            return None
        name = maker.input(0)
    return None


def _given(graph: Graph, name: str) -> int | None:
    if graph.is_function:
        return None
    for value in graph.proto.input:
        if value.name == name and value.type.HasField("tensor_type"):
            dims = value.type.tensor_type.shape.dim
            if len(dims) > 1 and dims[1].HasField("dim_value") and dims[1].dim_value > 0:
                return int(dims[1].dim_value)
    return None
