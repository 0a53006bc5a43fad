"""What each runtime wants to find in a file."""

from __future__ import annotations

from dataclasses import dataclass, replace

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
        runner: What runs a file to check it: ``"onnxruntime"`` or ``"openvino"`` optimised as in
            use, ``"plain"`` for ONNX Runtime without optimisations.
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
    runner: str = "plain"


def profile_of(name: str, weights: str | None = None) -> Profile:
    """The profile of the target of this name.

    Args:
        name: Of a dense target.
        weights: ``"uint8"`` or ``"int8"``, where the target has a choice.

    Raises:
        ValueError: Another name, or weights that the target has no choice of.
    """
    from bevquant_export.targets._qdq import QdqTarget
    from bevquant_export.targets._registry import targets

    known = {n: t for t in targets() if isinstance(t, QdqTarget) for n in (t.name, *t.aliases)}
    if name not in known:
        raise ValueError(
            f"export_qdq_onnx: profile={name!r}: expected one of {', '.join(map(repr, known))}"
        )
    return replace(known[name].profile(weights), name=name)
