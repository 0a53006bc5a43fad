"""TensorRT: operators that its ONNX parser imports, and pair placement for fused kernels."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import numpy as np

from bevquant_export.lint import _attention
from bevquant_export.lint._graph import Finding, Graph, Node, Rule, Rules, quoted
from bevquant_export.lint._model import ATTENTION, FP4_QUANTIZE, PLUGINS, TRT
from bevquant_export.lint._tensors import Pairs, Step, shape_of

if TYPE_CHECKING:
    import onnx


# In the library that trtexec loads by itself (initLibNvInferPlugins).
_OWN_PLUGINS = {(PLUGINS, ATTENTION), (TRT, FP4_QUANTIZE)}
_rule = Rules("TRT", "tensorrt")

# fmt: off
IMPORT = _rule(1, "every operator has an importer (none of QLinear*, ConvInteger, MatMulInteger, "
    "Unique, scatters with a reduction, …)",
    "export QuantizeLinear/DequantizeLinear around float operators, and keep the rest outside")
PLUGIN = _rule(2, "operators of other domains are functions of the model",
    "load a plugin of that name before the file is parsed", "warning")
ZERO = _rule(3, "zero points are 0", "quantize symmetrically")
UINT8 = _rule(4, "integers are INT8; a missing zero point means UINT8",
    "write INT8 zero points, and INT8 weights where weights are integers")
COUNT = _rule(5, "there are as many zero points as scales", "write one zero for each scale")
CONSTANT = _rule(7, "scales and zero points are constants", "write them as initializers")
PER_TENSOR = _rule(8, "activations have one scale", "calibrate activations per tensor")
WEIGHT = _rule(9, "weight scales are one, or 1-D with as many entries as the weight has along "
    "axis",
    "write the axis of the output channels: 0 for Conv, 1 for ConvTranspose and MatMul")
BIAS = _rule(10, "a bias is a float initializer, without DequantizeLinear",
    "write the bias in float: TensorRT quantizes it itself")
TRANSPOSED = _rule(11, "the weight of a ConvTranspose has one scale, or none",
    "quantize it per tensor or leave it in float: backends disagree about its axis", "warning")
ONE_SCALE = _rule(12, "the quantized inputs of an Add or Concat have one scale",
    "share one quantizer between them: TensorRT reformats otherwise", "warning")
RESIDUAL = _rule(13, "the other branch of an Add behind a quantized conv is quantized",
    "put a pair on the residual branch, so that conv and Add fuse", "warning")
BETWEEN = _rule(14, "no pair stands between a conv and its batch norm or ReLU",
    "quantize what the activation gives, and not what it takes", "warning")
HALF = _rule(15, "pairs that a Gemm reads are of float32: with scales in float16 TensorRT 10.8 to "
    "10.16 makes NaN of it",
    "write the scales in float32, and cast to float16 behind the layer where that is meant")
FLOAT8 = _rule(20, "FP8 is FLOAT8E4M3FN",
    "quantize with num_bits=(4, 3): TensorRT has no other FP8")
FLOAT8_CHANNELS = _rule(21, "the weight of an FP8 layer has one scale: with one for each channel "
    "TensorRT 10 was reported to multiply in float16",
    "quantize with QuantConfig(weight_per_channel=False), or compare with the engine's layers "
    "(--against layers.json)", "warning")
# fmt: on
RULES = (*_rule, *_attention.RULES)
TYPED = ("tensorrt11",)
# fmt: off
BINDINGS = Rule("TRT016", "warning",
    "inputs and outputs are float16 in the file: TensorRT 11 takes their type from there",
    "export with profile='tensorrt11'; CUDA-BEVFusion asserts half bindings", TYPED)
SINGLE = Rule("TRT017", "warning",
    "what is not quantized is float16: TensorRT 11 runs a float32 operator in float32",
    "export with profile='tensorrt11', which types the file", TYPED)
GUARD = Rule("TRT018", "error",
    "a guard against 0 is a number of float16: what is divided by, or taken the logarithm of, is "
    "not kept from 0 by a constant that float16 rounds to 0 or to few digits (below 2^-17)",
    "compute the guard and the operation that needs it in float32, between two Casts, or write a "
    "guard of 1e-5 or more", TYPED)
INFINITE = Rule("TRT019", "error",
    "float16 constants are finite, but for a mask of minus infinity in front of a Softmax",
    "write 65504 or -65504 where a clamp or a replacement of infinity is meant, -32768 where a "
    "mask is, and cast to float32 around operations whose values are larger", TYPED)
# fmt: on
TYPED_RULES = (BINDINGS, SINGLE, GUARD, INFINITE)
# Marked N in onnx-tensorrt's docs/operators.md; those with Integer or QLinear in bevquant's notes.
NOT_IMPORTED = frozenset(
    "QLinearConv QLinearMatMul ConvInteger MatMulInteger DynamicQuantizeLinear Unique Compress Det "
    "MaxRoiPool MaxUnpool Multinomial StringNormalizer TfIdfVectorizer SplitToSequence "
    "ConcatFromSequence SequenceAt SequenceEmpty SequenceConstruct SequenceErase SequenceInsert "
    "SequenceLength".split()
) | {
    f"{scatter} with reduction {kind}"
    for scatter in ("ScatterElements", "ScatterND") for kind in ("add", "mul", "max", "min")
}  # fmt: skip
_CONVS = ("Conv", "ConvTranspose", "Gemm", "MatMul")


def check_tensorrt(pairs: Pairs, functions: set[tuple[str, str]]) -> Iterator[Finding]:
    """Check one graph; of a function the operators alone: constants may come from its callers."""
    for node in pairs.graph.nodes:
        yield from _operator(node, functions)
    if pairs.graph.is_function:
        return
    for node in pairs.graph.nodes:
        if node.op in _CONVS[:3]:
            yield from _bias(pairs.graph, node)
        if node.op == "Gemm":
            yield from _half(pairs, node)
        if node.op == "ConvTranspose":
            weight = pairs.dequantized(node.input(1))
            if weight is not None and weight.per_channel:
                yield TRANSPOSED.found(node.name, "its weight has a scale for each channel")
        if node.op in _CONVS:
            weight = pairs.dequantized(node.input(1))
            if weight is not None and weight.float8 and weight.per_channel:
                yield FLOAT8_CHANNELS.found(node.name, "its weight has a scale for each channel")
        if node.op in ("Add", "Sum", "Concat"):
            yield from _joined(pairs, node)
        if pairs.is_quantized(node, *_CONVS):
            yield from _between(pairs, node)
    for step in pairs.steps:
        yield from _step(pairs, step)
    yield from _attention.check_attentions(pairs)


def check_types(pairs: Pairs, model: onnx.ModelProto) -> Iterator[Finding]:
    """Check the types of one graph, which the engine uses as they are."""
    graph = pairs.graph
    for node in graph.nodes:
        yield from _guard(pairs, node)
        yield from _infinite(pairs, node)
    if graph.is_function or graph.outer is not None:
        return
    # The exporter names what it left in float32 because of its range.
    reasons = next((p.value for p in model.metadata_props if p.key == "float32"), "")
    meant = {line.partition(": float32: ")[0] for line in reasons.splitlines()}
    for port in (*model.graph.input, *model.graph.output):
        named = {f"input {port.name}", f"output {port.name}"}
        if port.type.tensor_type.elem_type == 1 and not named & meant:
            yield BINDINGS.found(port.name, "it is float32")
    for node in graph.nodes:
        if node.name in meant:
            continue
        if node.op in ("Conv", "ConvTranspose") and pairs.dequantized(node.input(1)) is None:
            weight = graph.constant(node.input(1))
            if weight is not None and weight.data_type == 1:
                yield SINGLE.found(node.name, "it is not quantized, and its weight is float32")


_GUARDED = {"Div": 1, "Reciprocal": 0, "Log": 0}
_THROUGH = set("Sqrt Expand Reshape Unsqueeze Squeeze Transpose Identity Flatten".split())
_MASKS = set("Where Add Expand Reshape Unsqueeze Squeeze Transpose Identity".split())
_LEAST = 2.0**-17


def _guard(pairs: Pairs, node: Node) -> Iterator[Finding]:
    """A sum or clamp with a constant too small for float16, in front of its consumer."""
    slot = _GUARDED.get(node.op)
    if node.op == "Pow":
        power = _halves(pairs, node.input(1))
        slot = 0 if power is not None and power.size and (power < 0).any() else None
    maker = None if slot is None else pairs.graph.producers.get(node.input(slot))
    while maker is not None and maker.op in _THROUGH:
        maker = pairs.graph.producers.get(maker.input(0))
    if maker is None or maker.op not in ("Add", "Max", "Clip"):
        return
    for name in maker.inputs[1:2] if maker.op == "Clip" else maker.inputs[:2]:
        value = _halves(pairs, name)
        if value is not None and value.size and np.abs(value).max() < _LEAST:
            least = float(np.abs(value).max())
            yield GUARD.found(
                node.name, f"its guard in {quoted(maker.name)} is {least:g} in float16"
            )


def _infinite(pairs: Pairs, node: Node) -> Iterator[Finding]:
    for name in node.inputs:
        value = _halves(pairs, name)
        if value is None or not np.isinf(value).any():
            continue
        if (value == -np.inf)[np.isinf(value)].all() and _is_mask(pairs.graph, node):
            continue
        if node.op != "Equal":
            yield INFINITE.found(node.name, f"its constant {quoted(name)} is infinite")


def _is_mask(graph: Graph, node: Node) -> bool:
    users = graph.users(node)
    return (
        node.op in _MASKS
        and bool(users)
        and all(user.op == "Softmax" or _is_mask(graph, user) for user in users)
    )


def _halves(pairs: Pairs, name: str) -> np.ndarray[Any, Any] | None:
    """Values of a constant of float16 in the file."""
    tensor = pairs.graph.constant(name) if name else None
    if tensor is None or tensor.data_type != 10:
        return None
    return pairs.constant(name)


def _operator(node: Node, functions: set[tuple[str, str]]) -> Iterator[Finding]:
    if (node.domain, node.op) in functions:
        return
    if (node.domain, node.op) in _OWN_PLUGINS:
        return
    if node.domain:
        yield PLUGIN.found(node.name, f"{quoted(node.op)} is of domain {quoted(node.domain)}")
    elif node.reducing in NOT_IMPORTED or node.op.startswith("QLinear"):
        yield IMPORT.found(node.name, f"{quoted(node.reducing)} has no importer")


def _bias(graph: Graph, node: Node) -> Iterator[Finding]:
    name = node.input(2)
    if not name:
        return
    tensor = graph.constant(name)
    filled = graph.producer(name, "ConstantOfShape")
    if filled is not None and graph.constant(filled.input(0)) is not None:
        return  # a constant by another name, which the parser folds
    if tensor is None and (name in graph.producers or graph.sees(name)):
        maker = graph.producers.get(name)
        if node.op == "Gemm" and (maker is None or maker.op != "DequantizeLinear"):
            return  # a matrix that is added: the parser makes a sum of it
        source = quoted(maker.op) if maker is not None else "outside"
        yield BIAS.found(node.name, f"its bias comes from {source}")
    elif tensor is not None and tensor.data_type not in (1, 10):
        yield BIAS.found(node.name, f"its bias has data type {tensor.data_type}")


def _half(pairs: Pairs, node: Node) -> Iterator[Finding]:
    """A pair of opset 19 and later has the type of its scale."""
    for name in node.inputs[:2]:
        maker = pairs.graph.producer(name, "DequantizeLinear")
        scale = pairs.graph.constant(maker.input(1)) if maker is not None else None
        if maker is not None and scale is not None and scale.data_type == 10:
            yield HALF.found(node.name, f"the scale of {quoted(maker.name)} is float16")


def _joined(pairs: Pairs, node: Node) -> Iterator[Finding]:
    steps = [pairs.dequantized(name) for name in node.inputs if name]
    scales = {
        float(s.scale.flat[0])
        for s in steps
        if s is not None and s.scale is not None and s.scale.size == 1
    }
    if len(scales) > 1:
        shown = ", ".join(f"{scale:.6g}" for scale in sorted(scales)[:4])
        yield ONE_SCALE.found(node.name, f"its inputs have the scales {shown}")
    makers = [pairs.graph.producers.get(name) for name in node.inputs]
    behind = any(m is not None and pairs.is_quantized(m, "Conv", "ConvTranspose") for m in makers)
    fixed = any(pairs.graph.constant(name) is not None for name in node.inputs)
    if node.op != "Concat" and behind and not fixed and not any(steps):
        yield RESIDUAL.found(node.name, "neither of its inputs comes from a DequantizeLinear")


def _between(pairs: Pairs, node: Node) -> Iterator[Finding]:
    for quantizer in pairs.quantizers(node):
        for dequantizer in pairs.graph.users(quantizer.node):
            for user in pairs.graph.users(dequantizer):
                if user.op in ("Relu", "BatchNormalization", "Clip", "LeakyRelu", "PRelu"):
                    yield BETWEEN.found(
                        quantizer.node.name,
                        f"it stands between {quoted(node.name)} and {quoted(user.name)}",
                    )


def _step(pairs: Pairs, step: Step) -> Iterator[Finding]:
    node, graph = step.node, pairs.graph
    if step.constant is not None and step.constant.data_type == 6:
        return  # A bias of 32-bit integers: the rule about biases speaks of it.
    for slot, what in ((1, "scale"), (2, "zero point")):
        name = "" if step.block else node.input(slot)  # scales of blocks are quantized too
        if name and graph.constant(name) is None and (name in graph.producers or graph.sees(name)):
            yield CONSTANT.found(node.name, f"its {what} {quoted(name)} is computed")
    if step.float8 not in ("", "FLOAT8E4M3FN"):
        yield FLOAT8.found(node.name, f"it is of {step.float8}")
    kind = step.constant.data_type if step.constant is not None and not step.quantizes else 3
    if step.zero_type == 2 or (step.quantizes and not node.input(2)) or kind == 2:
        came = "UINT8" if node.input(2) else "missing, which makes UINT8"
        yield UINT8.found(node.name, f"its zero point or its data is {came}")
    if step.zero is not None and np.any(step.zero != 0):
        yield ZERO.found(node.name, f"a zero point is {step.zero.flat[step.zero.argmax()]}")
    if step.scale is None:
        return
    if step.zero is not None and step.zero.size != step.scale.size:
        yield COUNT.found(node.name, f"{step.zero.size} zero points, {step.scale.size} scales")
    if step.constant is None:
        if step.per_channel:
            yield PER_TENSOR.found(node.name, f"an activation has {step.scale.size} scales")
        return
    dims = shape_of(step.constant)
    axis = node.integer("axis", 1)
    along = dims[axis] if -len(dims) <= axis < len(dims) else None
    if step.scale.ndim > 1 or (step.per_channel and step.scale.size != along):
        shape = list(step.scale.shape)
        yield WEIGHT.found(node.name, f"scales {shape} for weight {dims[:6]}, axis {axis}")
