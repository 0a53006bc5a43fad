"""What each runtime wants to find in a file."""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import DTypeLike

__all__ = ["Profile", "profile_of"]


@dataclass(frozen=True)
class Profile:
    """One runtime's form of quantization nodes.

    Attributes:
        name: What users call it.
        opset: Version of the standard operators.
        dtype: Of quantized activations.
        zero: Zero point of activations.
        weight: How weights are stored: ``"int8"`` or ``"uint8"`` in front of a DequantizeLinear,
            ``"float"`` in front of a QuantizeLinear and a DequantizeLinear.
        integer_bias: A bias is int32 behind a DequantizeLinear; else float.
        integer_relu: A ReLU clips integers, between the two nodes of a pair; else it stands in
            front of the pair.
        axis: Scales per channel name their axis, which operator set 11 cannot.
        transposed_per_channel: Weights of transposed convolutions may have a scale per channel.
        numbered: Nodes are named ``<operator>_<place>``, and scales are nodes of their own; else
            nodes are named after their modules, and scales are initializers.
        repeats: What keeps its input's scale, like pooling, gets a pair of its own; else it hands
            its input's on.
        one_scale: What is concatenated is brought to the result's scale before.
    """

    name: str
    opset: int
    dtype: DTypeLike
    zero: int
    weight: str
    integer_bias: bool
    integer_relu: bool
    axis: bool
    transposed_per_channel: bool
    numbered: bool
    repeats: bool
    one_scale: bool


_PROFILES = {
    # TensorRT takes zero points of 0 only, no uint8 and a float bias.
    "tensorrt": Profile(
        "tensorrt", 13, np.int8, 0, "float",
        integer_bias=False, integer_relu=False, axis=True,
        transposed_per_channel=False, numbered=False,
        repeats=True, one_scale=True,
    ),
    # onnxruntime fuses what lies between uint8 with zero point 128, and its ReLU on int8 or behind
    # such a zero point is a float one, where Clip runs on uint8.
    "onnxruntime": Profile(
        "onnxruntime", 13, np.uint8, 128, "uint8",
        integer_bias=True, integer_relu=True, axis=True,
        transposed_per_channel=True, numbered=False,
        repeats=True, one_scale=False,
    ),
    "horizon": Profile(
        "horizon", 11, np.int8, 0, "float",
        integer_bias=False, integer_relu=False, axis=False,
        transposed_per_channel=True, numbered=True,
        repeats=False, one_scale=False,
    ),
}  # fmt: skip


def profile_of(name: str, weights: str | None = None) -> Profile:
    """The profile of this name.

    Args:
        name: ``"tensorrt"``, ``"onnxruntime"`` or ``"horizon"``.
        weights: ``"uint8"`` or ``"int8"``, for onnxruntime alone.

    Raises:
        ValueError: Another name, or weights that the profile has no choice of.
    """
    if name not in _PROFILES:
        raise ValueError(
            f"export_qdq_onnx: profile={name!r}: expected one of {', '.join(map(repr, _PROFILES))}"
        )
    profile = _PROFILES[name]
    if weights is None:
        return profile
    if name != "onnxruntime" or weights not in ("int8", "uint8"):
        raise ValueError(
            f"export_qdq_onnx: weights={weights!r} with profile={name!r}: expected None, or "
            "'uint8' or 'int8' with profile='onnxruntime'"
        )
    return replace(profile, weight=weights)
