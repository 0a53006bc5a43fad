"""OpenVINO on a CPU."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from bevquant_export._target import LintFile
from bevquant_export.lint._graph import Finding, Rules
from bevquant_export.lint._tensors import Pairs, Step
from bevquant_export.targets.onnxruntime import ONNXRUNTIME, saturates, types_of
from bevquant_export.targets.qdq import QdqTarget

__all__ = ["OPENVINO"]


_rule = Rules("OVN", "openvino", "warning")

# fmt: off
WEIGHTS = _rule(1, "weights are INT8 with zero point 0: others make the layer run in float",
    "write them so (w - 128 of UINT8 with zero point 128): the same integers (weights='int8'; for "
    "x86 without VNNI quantize them to seven bits, QuantConfig(weight_bits=7))")
DATA = _rule(2, "what a layer with quantized weights reads is quantized, with one scale: else it "
    "runs in float",
    "calibrate the quantizer in front of it, per tensor, or leave the layer float")
TRANSPOSED = _rule(3, "a transposed convolution whose windows lie side by side is written as one "
    "of 1×1 and a DepthToSpace: faster, and with a scale for each channel",
    "export it again with profile='openvino'")
SATURATES = _rule(4, "in a file for any CPU, INT8 weights next to UINT8 data are from -64 to 64: "
    "others saturate on x86 without VNNI",
    "quantize them to seven bits (QuantConfig(weight_bits=7)), or say that the file is for CPUs "
    "with VNNI (--cpu vnni)")
# fmt: on
RULES = tuple(_rule)
_INT8 = 3


def check_openvino(pairs: Pairs, file: LintFile) -> Iterator[Finding]:
    """Check one graph."""
    for node in pairs.graph.nodes:
        if node.op not in ("Conv", "ConvTranspose", "Gemm", "MatMul"):
            continue
        weight = pairs.dequantized(node.input(1))
        if weight is None or weight.constant is None or weight.float8:
            continue
        if not _is_signed(weight):
            yield WEIGHTS.found(node.name, "its weight is UINT8 or has a zero point")
        data = pairs.dequantized(node.input(0))
        if data and saturates(types_of(data, weight), [weight.constant], file):
            yield SATURATES.found(node.name, "its data are UINT8, its weight INT8")
        if data is None:
            yield DATA.found(node.name, "its weight is quantized, and its data are not")
        elif data.per_channel:
            yield DATA.found(node.name, "its data have several scales")
        strides = node.integers("strides")
        side_by_side = bool(strides) and strides == node.integers("kernel_shape")
        if node.op == "ConvTranspose" and side_by_side and not any(node.integers("pads")):
            yield TRANSPOSED.found(node.name, f"its kernel and its strides are {strides}")


def _is_signed(step: Step) -> bool:
    zero = step.zero is None or not step.zero.any()
    # A float weight behind both nodes of a pair is what the pair makes of it.
    return types_of(step)[0] in (_INT8, 1) and zero


class _OpenVino(QdqTarget):
    name, title = "openvino", "OpenVINO"
    sparse = "portable"
    quantized_outputs = True
    rules = RULES
    weights = ("int8", "uint8")
    command = 'openvino.Core().compile_model("{path.name}", "CPU")'
    # Of FP8 its CPU plugin (2026.4) rounds to float16 first, and not as ONNX near a tie. Pairs of
    # int16 it drops ("qdq_stripping"): values are neither rounded nor clipped.
    form = replace(
        ONNXRUNTIME.form, name="openvino", weight="int8", runner="openvino", fuses_norms=False,
        voxels=False, float8=(), int16=False,
    )  # fmt: skip

    def lint_pairs(self, pairs: Pairs, file: LintFile) -> Iterator[Finding]:
        """Convolutions that its plugin takes as integers."""
        yield from check_openvino(pairs, file)


OPENVINO = _OpenVino()
