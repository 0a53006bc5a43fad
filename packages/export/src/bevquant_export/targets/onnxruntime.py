"""ONNX Runtime on a CPU."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

import numpy as np

from bevquant_export._cpu import exact_everywhere
from bevquant_export._target import LintFile
from bevquant_export.dense.nodes._profile import Profile
from bevquant_export.lint._graph import Finding, Graph, Node, Rules, passed, quoted
from bevquant_export.lint._tensors import Pairs, Step, values
from bevquant_export.targets.qdq import QdqTarget

if TYPE_CHECKING:
    from onnx import TensorProto

    from bevquant_export.lint._graph import Finding
    from bevquant_export.lint._tensors import Pairs

__all__ = ["ONNXRUNTIME"]

_ADVICE = "use zero point 128, UINT8, for activations"


_rule = Rules("ORT", "onnxruntime", "warning")

# fmt: off
FLOAT = _rule(1, "between a quantized conv and its ReLU stands a pair, unless the zero point is "
    "the least integer: else conv and ReLU run in float",
    "put a pair with the scale of the ReLU's own before the ReLU")
INT8 = _rule(2, "activations are UINT8: INT8 pairs with several readers, or behind a ReLU, run in "
    "float on x86",
    f"{_ADVICE} (or set session.qdqisint8allowed=1, which runs them in integers)")
SCALES = _rule(3, "the pairs before and after a ReLU have one scale and zero point",
    "write the scale of the later pair into the earlier one")
MIXED = _rule(4, "in a file for any CPU, weights next to UINT8 activations are UINT8 with zero "
    "point 128, or INT8 from -64 to 64: others times UINT8 saturate on x86 without VNNI",
    "write them so (w + 128), quantize them to seven bits (QuantConfig(weight_bits=7)), or say "
    "that the file is for CPUs with VNNI (--cpu vnni)")
SIGNED = _rule(5, "MatMulInteger and ConvInteger do not multiply INT8 with INT8: exact, but four "
    "times slower",
    "add 128 to both, and make both UINT8 with zero point 128")
BIAS = _rule(6, "biases are float, or INT32 in steps of data scale times weight scale: else the "
    "conv runs in float",
    "write the bias in float, which the runtime quantizes itself, or in the steps of the sums")
SLOW = _rule(7, "in a file for CPUs with VNNI, weights are INT8 with zero point 0: UINT8 ones "
    "miss the fast kernels, and are slower than float32",
    "write them so (w - 128), which are the same integers (export --cpu vnni)")
RACES = _rule(8, "ScatterND does not sum: its threads write to a place of several values at once, "
    "and the result depends on the run",
    "sum by ScatterElements, which takes the values in order, or export again")
DROPPED = _rule(9, "no Relu or Clip stands right before a QuantizeLinear of FP8: ONNX Runtime 1.32 "
    "drops the Relu, and does not open a file with the Clip",
    "put a Max with -3.4e38 between the two, as export_qdq_onnx does", "error")
# fmt: on
RULES = tuple(_rule)
_LEAST = {2: 0, 3: -128}


def check_onnxruntime(pairs: Pairs, file: LintFile) -> Iterator[Finding]:
    """Check one graph of a file."""
    graph = pairs.graph
    for node in graph.nodes:
        if node.op == "Relu":
            yield from _relu(pairs, node)
        elif node.op in ("Conv", "Gemm"):
            yield from _bias(pairs, node)
        elif node.op in ("MatMulInteger", "ConvInteger"):
            yield from _integers(graph, node, file)
        elif node.op == "ScatterND" and node.text("reduction") not in (None, "none"):
            yield RACES.found(node.name, f"its reduction is {quoted(node.text('reduction'))}")
        if node.op in ("Conv", "Gemm", "MatMul"):
            data, weight = (pairs.dequantized(node.input(slot)) for slot in (0, 1))
            if data and weight and weight.constant is not None:
                yield from _weights(node, types_of(data, weight), [weight.constant], file)
    for step in pairs.steps:
        before = graph.producers.get(step.node.input(0))
        if step.quantizes and step.float8 and before is not None and before.op in ("Relu", "Clip"):
            yield DROPPED.found(step.node.name, f"it stands right behind {quoted(before.name)}")
        if step.quantizes and step.constant is None and step.zero_type == 3:
            yield INT8.found(step.node.name, "it makes INT8 of an activation")


def types_of(*steps: Step) -> list[int]:
    """Data types of steps' integers, UINT8 where nothing states one."""
    held = (None if step.quantizes else step.constant for step in steps)
    return [
        step.zero_type or (2 if constant is None else constant.data_type)
        for step, constant in zip(steps, held, strict=True)
    ]


def _bias(pairs: Pairs, node: Node) -> Iterator[Finding]:
    data, weight, bias = (pairs.dequantized(node.input(slot)) for slot in (0, 1, 2))
    if bias is None:
        return
    x, w, b = (step.scale if step is not None else None for step in (data, weight, bias))
    if x is not None and w is not None and b is not None and x.size == 1 and b.size in (1, w.size):
        if w.size and np.allclose(b.ravel(), float(x.flat[0]) * w.ravel(), rtol=1e-5, atol=0):
            return
    yield BIAS.found(node.name, f"its bias comes from {quoted(bias.node.name)}, in other steps")


def _relu(pairs: Pairs, node: Node) -> Iterator[Finding]:
    after = pairs.quantizers(node)
    conv = pairs.graph.producer(node.input(0), "Conv")
    if conv is not None and pairs.is_quantized(conv, "Conv"):
        for step in after:
            # INT8 is not fused at all, which is said at the pair.
            least = step.zero is None or bool((step.zero == _LEAST.get(step.zero_type, 0)).all())
            if not least and step.zero_type != 3:
                yield FLOAT.found(node.name, f"it stands right behind {quoted(conv.name)}")
    before = pairs.dequantized(node.input(0))
    if before is not None and before.constant is None:
        for step in after:
            if not step.same(before):
                yield SCALES.found(
                    node.name, f"{quoted(before.node.name)} and {quoted(step.node.name)} differ"
                )


def _weights(
    node: Node, types: list[int], held: Sequence[TensorProto | None], file: LintFile
) -> Iterator[Finding]:
    """Whether the types of data and weight, and the integers, suit the CPU."""
    if saturates(types, held, file):
        yield MIXED.found(node.name, "its data are UINT8, its weight INT8")
    elif types == [2, 2] and file.cpu == "vnni":
        yield SLOW.found(node.name, "its weight is UINT8, as its data")


def saturates(types: list[int], held: Sequence[TensorProto | None], file: LintFile) -> bool:
    """Whether sums of UINT8 data times an INT8 weight may saturate on a CPU for the file."""
    if types != [2, 3] or file.cpu != "any":
        return False
    integers = [values(tensor, file.path.parent) for tensor in held]
    # Of a float weight in front of both nodes of a pair the integers are not told.
    return not all(w is not None and w.dtype == np.int8 and exact_everywhere(w) for w in integers)


def _integers(graph: Graph, node: Node, file: LintFile) -> Iterator[Finding]:
    types = []
    for slot in (0, 1):
        tensors = (graph.constant(node.input(slot)), graph.constant(node.input(slot + 2)))
        types.append(next((t.data_type for t in tensors if t is not None), 0))
    if types == [3, 3]:
        yield SIGNED.found(node.name, "both its operands are INT8")
    else:
        yield from _weights(node, types, passed(node.input(1), graph, file.graphs), file)


class _OnnxRuntime(QdqTarget):
    name, title = "onnxruntime", "ONNX Runtime"
    sparse = "portable"
    quantized_outputs = True
    domains = frozenset({"com.microsoft", "ai.onnx.ml"})
    rules = RULES
    weights = ("uint8", "int8")
    command = 'onnxruntime.InferenceSession("{path.name}")'
    # What lies between uint8 with zero point 128 is fused; a ReLU on int8 or behind such a zero
    # point is a float one, where Clip runs on uint8.
    form = Profile(
        "onnxruntime", 13, np.uint8, 128, "uint8",
        integer_bias=True, integer_relu=True, axis=True,
        transposed_per_channel=True,
        repeats=True, one_scale=False, depth_to_space=True, voxels=True, scatter_sums=True,
        runner="onnxruntime", float8=("fp8_e4m3", "fp8_e5m2", "mxfp8"), int16=True,
    )  # fmt: skip

    def lint_pairs(self, pairs: Pairs, file: LintFile) -> Iterator[Finding]:
        """Integer types and pair positions that are needed to run as integers."""
        yield from check_onnxruntime(pairs, file)


ONNXRUNTIME = _OnnxRuntime()
