"""Requirements of each runtime on a file."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import DTypeLike

from bevquant_export._cpu import chosen_weights
from bevquant_export._errors import QdqError
from bevquant_export._target import targets
from bevquant_int8sim.program import Integers

if TYPE_CHECKING:
    import onnx_ir as ir

INT16_OPSET = 21  # the first one with pairs of int16
FP4_OPSET = 23  # the first one with FP4


@dataclass(frozen=True)
class Profile:
    """One runtime's form of quantization nodes."""

    name: str
    # Version of the standard operators.
    opset: int
    dtype: DTypeLike
    zero: int
    # How weights are stored: ``"int8"``, or ``"uint8"`` where int8 would saturate on some CPU
    # (`stored_weights`), in front of a DequantizeLinear, ``"float"`` in front of a QuantizeLinear
    # and a DequantizeLinear.
    weight: str
    # A bias is int32 behind a DequantizeLinear; else float.
    integer_bias: bool
    # A ReLU clips integers, between the two nodes of a pair; else it stands in front of the pair.
    integer_relu: bool
    # Scales per channel name their axis, which operator set 11 cannot.
    axis: bool
    # Weights of transposed convolutions may have a scale per channel.
    transposed_per_channel: bool
    # Layers that keep their input's scale, such as pooling, get a pair of their own; else they pass
    # the input's on.
    repeats: bool
    # Operands of a concatenation are first brought to the result's scale.
    one_scale: bool
    # Unquantized tensors are float16, inputs and outputs too; else all floats are float32.
    half: bool = False
    # A transposed convolution whose windows lie side by side is one of 1×1 whose channels become
    # pixels; else it stays, and runs in float.
    depth_to_space: bool = False
    # Norms have a form that the runtime fuses; else one that it does not: OpenVINO does not scale
    # the ε of a norm of integers.
    fuses_norms: bool = True
    # Sparse convolutions may be among a model's layers, as functions of the file.
    voxels: bool = False
    # Version of the engine's own plugins, which are nodes of their names; "" without.
    plugins: str = ""
    # Scatters may sum; else a sum over places is a product of matrices.
    scatter_sums: bool = False
    # Inputs may be integers and truth values; else all are float32.
    integer_inputs: bool = True
    # Formats of FP8 that it takes, and those of blocks.
    float8: tuple[str, ...] = ()
    # Operators that it does not import, with a reduction as `Node.reducing` names it; a step that
    # needs one is refused.
    absent: frozenset[str] = frozenset()
    # Activations may have 16 bits; layers that read them run in float.
    int16: bool = False
    # Runtime of the check: ``"onnxruntime"`` or ``"openvino"`` optimised as in use, ``"plain"`` for
    # ONNX Runtime without optimisations.
    runner: str = "plain"
    # Finishing steps of a file, in order.
    passes: tuple[Callable[[ir.Model], None], ...] = ()

    def stored(self, form: Integers) -> tuple[DTypeLike, int]:
        """Type and zero point of quantized activations; ONNX Runtime clips no int16."""
        if form.unsigned:
            return np.uint8, 0
        return (self.dtype, self.zero) if form.bits == 8 else (np.int16, 0)

    @property
    def unsigned(self) -> bool:
        """Whether activations may be 0…255 without a zero point."""
        return np.dtype(self.dtype) == np.uint8

    def clips(self, form: Integers) -> bool:
        """Whether a ReLU clips integers, between the two nodes of a pair."""
        return self.integer_relu and (form.bits == 8 or form.unsigned)


def profile_of(name: str, weights: str = "auto") -> Profile:
    """The profile of a dense target, with ``"uint8"`` or ``"int8"`` weights where it has both."""
    dense: list[Any] = [t for t in targets() if isinstance(getattr(t, "form", None), Profile)]
    known = {called: t for t in dense for called in (t.name, *t.aliases)}
    if name not in known:
        raise QdqError(f"profile={name!r}: expected one of {', '.join(map(repr, known))}")
    form: Profile = known[name].form
    choice = known[name].weights
    try:
        weight = chosen_weights(weights, choice)
    except ValueError as error:
        more = "" if choice else "; 'uint8' or 'int8' go with profile='onnxruntime'"
        raise QdqError(f"profile={name!r}: {error}{more}") from None
    return replace(form, name=name, weight=weight if choice else form.weight)
