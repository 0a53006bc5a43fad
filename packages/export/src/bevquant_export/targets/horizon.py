"""Horizon's hb_mapper."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from bevquant_export._target import LintFile
from bevquant_export.dense.nodes._profile import Profile
from bevquant_export.lint._graph import Finding, Graph, Node, Rules, quoted
from bevquant_export.lint._tensors import Pairs, Step, shape_of
from bevquant_export.targets.qdq import QdqTarget

if TYPE_CHECKING:
    import onnx_ir as ir

__all__ = ["HORIZON"]


_rule = Rules("HRZ", "horizon")

# fmt: off
OPSET = _rule(1, "the opset is 11", "export with opset 11 (13 is for running the file elsewhere)")
INTEGRATED = _rule(2, "no operator is one that the toolchain's list marks as not integrated",
    "write it with other operators, or keep it outside of the file")
AXIS = _rule(3, "QuantizeLinear and DequantizeLinear have no axis: there is none in opset 11",
    "leave the attribute out; the mapper takes the axis of the output channels")
ZERO = _rule(4, "zero points are 0", "quantize symmetrically")
INT8 = _rule(5, "zero points are there, and INT8", "write an INT8 zero, not the default of UINT8")
SCALE = _rule(6, "scales are constants of shape [1], or [C] for a weight with C output channels",
    "write the scale as a list, and per channel for weights alone")
PAIR = _rule(7, "QuantizeLinear is followed by DequantizeLinear alone, and that follows no other "
    "node",
    "write both nodes for each fake-quant")
WEIGHT = _rule(8, "weights stay float, through QuantizeLinear and DequantizeLinear",
    "write the float weight, and both nodes behind it")
NAMES = _rule(9, "nodes are named <OpType>_<number>", "name them so: run_on_cpu takes these names")
FLOAT_CONV = _rule(10, "a float conv that reads a quantized tensor is in run_on_cpu",
    "list its name in run_on_cpu: the mapper would quantize it all the same")
SETTINGS = _rule(11, "the mapper's YAML, which names the file as onnx_model, lies next to it",
    "write the settings into the same folder; hb_mapper makertbin reads them", "warning")
LIMITS = _rule(12, "a quantized Conv, ConvTranspose or pool is within what the BPU of BAYES takes",
    "make the layer smaller, or expect it on the CPU", "warning")
SIZES = _rule(13, "inputs have a batch of 1 to 4096, other dimensions of 1 to 65536, and less "
    "than 1 GiB",
    "cut the input into parts", "warning")
# fmt: on
RULES = tuple(_rule)

# "Not yet integrated" in the list of supported ONNX operators, HorizonRDK/rdk_x3_doc,
# docs/toolchain_development/intermediate/supported_op_list.md.
_NOT_INTEGRATED = {
    *("BitShift", "Celu", "Compress", "ConcatFromSequence", "ConvInteger", "Det", "Einsum"),
    *("DynamicQuantizeLinear", "Hardmax", "If", "IsInf", "IsNaN", "Loop", "MatMulInteger", "Mean"),
    *("MeanVarianceNormalization", "Mod", "Multinomial", "QLinearConv", "QLinearMatMul"),
    *("RandomNormal", "RandomNormalLike", "Scan", "Scatter", "SequenceAt", "SequenceConstruct"),
    *("SequenceEmpty", "SequenceErase", "SequenceInsert", "SequenceLength", "Shrink"),
    *("SplitToSequence", "StringNormalizer", "TfIdfVectorizer", "Unique", "Xor"),
}

# What hands a quantized tensor on as it is.
_PASS = ("Relu", "MaxPool", "Identity", "Reshape", "Flatten", "Transpose", "Squeeze", "Unsqueeze")
_MOST_YAML_FILES, _MOST_YAML_BYTES = 64, 2**16


def check_horizon(pairs: Pairs, path: Path) -> Iterator[Finding]:
    """Check one graph, and for the main one the settings in its folder."""
    graph = pairs.graph
    if graph.is_function:
        yield INTEGRATED.found(graph.where, "functions are not integrated")
        return
    for node in graph.nodes:
        if node.op in _NOT_INTEGRATED and not node.domain:
            yield INTEGRATED.found(node.name, f"{node.op} is not integrated")
        number = node.own_name.removeprefix(node.op + "_")
        if number == node.own_name or not re.fullmatch("[0-9]{1,9}", number):
            yield NAMES.found(
                node.name, f"a node {quoted(node.op)} has the name {quoted(node.own_name)}"
            )
    for step in pairs.steps:
        yield from _step(pairs, step)
    floats = _float_convs(pairs)
    if graph.outer is None:
        settings = _settings(path)
        if settings is None:
            yield SETTINGS.found("file", f"no YAML in the folder has onnx_model {path.name!r}")
        listed = _run_on_cpu(settings or "")
        shown = sorted(listed)[:6] or "no name"
        for node in floats:
            if node.own_name not in listed:
                yield FLOAT_CONV.found(node.name, f"run_on_cpu has {shown}")


def _step(pairs: Pairs, step: Step) -> Iterator[Finding]:
    node, graph = step.node, pairs.graph
    if node.domain == "" and "axis" in node.attributes:
        yield AXIS.found(node.name, f"its axis is {node.integer('axis')}")
    if step.zero is not None and np.any(step.zero != 0):
        yield ZERO.found(node.name, f"a zero point is {step.zero.flat[step.zero.argmax()]}")
    if step.zero_type != 3 and not _unmade(graph, node.input(2)):
        came = f"of data type {step.zero_type}" if step.zero_type else "missing or computed"
        yield INT8.found(node.name, f"its zero point is {came}")
    yield from _scale(graph, step)
    users = graph.users(node)
    if step.quantizes:
        others = [user.name for user in users if not _ends(user)]
        if others or not users or not graph.given_away.isdisjoint(node.outputs):
            who = ", ".join(map(quoted, others[:3])) or "the graph's output or nobody"
            yield PAIR.found(node.name, f"it is read by {who}")
    elif step.constant is not None and pairs.made(node.input(0)) is None:
        yield WEIGHT.found(node.name, "it reads integers that the file holds")
    elif pairs.made(node.input(0)) is None and not _unmade(graph, node.input(0)):
        yield PAIR.found(node.name, "it follows no QuantizeLinear")


def _ends(node: Node) -> bool:
    return node.op in ("DequantizeLinear", "HzDequantize")


def _unmade(graph: Graph, name: str) -> bool:
    """Whether a name is read that nothing defines, which the structure rules report."""
    return bool(name) and name not in graph.producers and not graph.sees(name)


def _scale(graph: Graph, step: Step) -> Iterator[Finding]:
    node = step.node
    if step.scale is None:
        if not _unmade(graph, node.input(1)) and graph.constant(node.input(1)) is None:
            yield SCALE.found(node.name, "its scale is computed")
        return
    shape = list(step.scale.shape)
    if shape == [1]:
        return
    dims = shape_of(step.constant) if step.constant is not None else []
    ends = graph.users(node) if step.quantizes else [node]
    readers = [user.op for end in ends for user in graph.users(end)]
    axis = 1 if "ConvTranspose" in readers else 0
    channels = dims[axis] if len(dims) > axis else None
    if len(shape) != 1 or shape[0] != channels:
        of = f"a weight {dims[:6]}" if dims else "an activation"
        yield SCALE.found(node.name, f"its scale has shape {shape[:6]}, for {of}")


def _float_convs(pairs: Pairs) -> list[Node]:
    """Convs with a float weight and a quantized input, through layout operators too."""
    graph, found = pairs.graph, []
    quantized: set[str] = set()
    for node in graph.nodes:
        step = pairs.dequantized(node.outputs[0]) if node.outputs else None
        if step is not None and step.constant is None:
            quantized.update(node.outputs[:1])
        if node.domain or node.input(0) not in quantized:
            continue
        if node.op in _PASS:
            quantized.update(node.outputs[:1])
        elif node.op in ("Conv", "ConvTranspose", "Gemm", "MatMul") and (
            graph.constant(node.input(1)) is not None
        ):
            found.append(node)
    return found


def _settings(path: Path) -> str | None:
    """Text of the YAML file in the folder that names this file."""
    try:
        found = sorted(p for p in path.parent.iterdir() if p.suffix in (".yaml", ".yml"))
    except OSError:
        return None
    # The file of the same name first.
    found.sort(key=lambda p: p.stem != path.stem)
    for candidate in found[:_MOST_YAML_FILES]:
        try:
            if not candidate.is_file():
                continue
            with candidate.open("rb") as file:
                text = file.read(_MOST_YAML_BYTES).decode("utf-8", "replace")
        except OSError:
            continue
        named = re.search(r"^\s*onnx_model\s*:\s*[\"']?([^\"'\n#]*)", text, re.MULTILINE)
        if named is not None and Path(named.group(1).strip()).name == path.name:
            return text
    return None


def _run_on_cpu(settings: str) -> set[str]:
    found = re.search(r"^\s*run_on_cpu\s*:\s*[\"']?([^\"'\n#]*)", settings, re.MULTILINE)
    return {name.strip() for name in found.group(1).split(";")} - {""} if found else set()


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


def scales_as_nodes(model: ir.Model) -> None:
    """Scale and zero point of each QuantizeLinear as nodes in front of it, for its pair.

    hb_mapper needs only one zero, for any number of scales.
    """
    import onnx_ir as ir

    for node in model.graph:
        if node.op_type != "QuantizeLinear":
            continue
        for slot, part in ((1, "scale"), (2, "zero_point")):
            value: Any = node.inputs[slot]
            array = value.const_value.numpy()
            array = array if part == "scale" else array.reshape(-1)[:1].reshape(())
            made = ir.Value(name=f"{node.name}.{part}")
            settings = {"value": ir.tensor(array, name="")}
            model.graph.insert_before(node, ir.node("Constant", [], settings, outputs=[made]))
            for reader in (node, *node.outputs[0].consumers()):
                reader.replace_input_with(slot, made)
    for name in [name for name, value in model.graph.initializers.items() if not value.uses()]:
        del model.graph.initializers[name]


def numbered_names(model: ir.Model) -> None:
    """Nodes named ``<operator>_<place>``, as hb_mapper's ``run_on_cpu`` lists them."""
    for place, node in enumerate(model.graph):
        node.name = f"{node.op_type}_{place}"


class _Horizon(QdqTarget):
    name, title, aliases = "horizon", "BPU", ("bpu",)
    sparse = "portable"
    domains = frozenset({"horizon"})
    rules = RULES
    unverified = ("hb_mapper was not at hand: the rules follow its documents",)
    command = "hb_mapper makertbin --model-type onnx --config {path.stem}.yaml"  # beside the file
    form = Profile(
        "horizon", 11, np.int8, 0, "float",
        integer_bias=False, integer_relu=False, axis=False,
        transposed_per_channel=True, passes=(scales_as_nodes, numbered_names),
        repeats=False, one_scale=False, integer_inputs=False,
        absent=frozenset(_NOT_INTEGRATED),
    )  # fmt: skip

    def lint(self, file: LintFile) -> Iterator[Finding]:
        """The operator set, then the rules for every graph."""
        opset = file.graphs[0].opsets.get("", 11)
        if opset != 11:
            yield OPSET.found("file", f"the opset is {opset}")
        yield from super().lint(file)

    def lint_pairs(self, pairs: Pairs, file: LintFile) -> Iterator[Finding]:
        """Forms, positions and names, the settings beside the file, sizes."""
        yield from check_horizon(pairs, file.path)
        yield from check_limits(pairs)


HORIZON = _Horizon()
