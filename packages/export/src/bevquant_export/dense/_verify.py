"""A file run on the example inputs before it gets its name."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np

from bevquant_export.dense._compare import compared
from bevquant_export.dense._graph import Array
from bevquant_export.dense._profile import profile_of
from bevquant_export.dense._program_of import QdqProgram, integer_model
from bevquant_export.dense._runnable import any_session
from bevquant_export.dense._written import QdqFile

_FEW = 4
_FLOAT = 2.0**-10  # of an output's largest value: float32 functions of the same integers
_HALF = 2.0**-6  # float16 functions
_ENERGY = 1e-4
_PIECE = 1 << 15  # values that are looked at in float64 at a time: they stay in the cache
_NOTHING = 1e-4  # what normalising a constant makes of rounding
# Of models that round floats themselves (`bevquant_hybrid`), whose values are float32 sums: the
# share a step off, and where the file's biases are int32, which theirs are not.
_FLOAT_SUMS, _FLOAT_BIASES = 0.01, 0.25
_HALVES = 1e-4  # of values behind functions in half precision, whose errors are estimates


def verified(
    file: QdqFile, content: bytes, integer: QdqProgram, args: Any, *, integer_sums: bool
) -> QdqFile:
    """Run the file on `args`, and say of it what ran it, what it makes of each quantized tensor.

    Every operation reads the integer model's integers. A quantized tensor may differ by ties (see
    `compare_qdq_onnx`), and behind functions in float by one step in a few values; one of a model
    that rounds floats itself by one step in a hundredth of the values, and in a quarter where the
    file rounds its biases to int32; a sum that `integer_sums` quantizes before by one step. An
    output in float, which is computed from the same integers, may differ by 2⁻¹⁰ of its largest
    value, or by noise 40 dB below it.

    Raises:
        ValueError: It differs by more; the first node that does is named.
    """
    ran = ""

    def run_in(proto: Any, runner: str) -> Any:
        nonlocal ran
        made, ran = any_session(proto, runner)
        return made

    try:
        rows, outputs, returned = compared(file, content, integer, args, run_in, outputs=True)
    except Exception as error:
        if not type(error).__module__.startswith("onnxruntime"):
            raise
        raise ValueError(
            f"export_qdq_onnx: onnxruntime does not run the file on the example inputs: {error}; "
            "nothing was written. verify=False writes it all the same"
        ) from error
    profile = profile_of(file.profile)
    share = _HALVES if profile.half else 0.0
    if integer_model(integer) is None:
        share = _FLOAT_BIASES if profile.integer_bias else _FLOAT_SUMS
    rounded_sums = integer_sums and integer_model(integer) is None
    for row in rows:
        most = 1.0 if rounded_sums and row.op == "add" else share
        few = row.largest <= 1 and row.unexplained <= max(_FEW, most * row.elements)
        if row.is_wrong and not (most and few):
            raise ValueError(
                f"export_qdq_onnx: {row.path or 'the input'} ({row.op}, {row.tensor} in the file): "
                f"{row.unexplained:,} of {row.elements:,} integers are others than the model's, by "
                f"up to {row.largest} steps, when {ran} runs the file on the example inputs; "
                "nothing was written. verify=False writes it all the same"
            )
    for name, (want, got) in outputs.items():
        if not _alike(want, got, _HALF if profile.half else _FLOAT):
            raise ValueError(
                f"export_qdq_onnx: output {name}: what {ran} makes of it on the example inputs is "
                "not what the integer model returns, though every quantized tensor before it is: "
                "an operation in float behind the last of them is written as something else; "
                "nothing was written. verify=False writes it all the same"
            )
    exact = integer_model(integer) is not None and not profile.half
    return replace(file, verified=ran, differences=rows, returned=returned if exact else None)


def _alike(want: Array, got: Array, tolerance: float) -> bool:
    if want.shape != got.shape:
        return False
    flat = want.reshape(-1), got.reshape(-1)
    found = [
        _gaps(*(values[first : first + _PIECE].astype(np.float64) for values in flat))
        for first in range(0, want.size, _PIECE)
    ]
    sums = np.array(found).reshape(-1, 4)
    (most, top), (energy, power) = sums[:, :2].max(0, initial=0.0), sums[:, 2:].sum(0)
    return bool(most <= tolerance * top + _NOTHING or energy <= _ENERGY * power)


def _gaps(want: Array, got: Array) -> tuple[float, float, float, float]:
    """Largest gap, largest finite value wanted, energy of the gaps and of these values."""
    same = (want == got) | (np.isnan(want) & np.isnan(got))
    with np.errstate(invalid="ignore"):
        apart = np.where(same, 0.0, np.abs(want - got))
    finite = np.where(np.isfinite(want), np.abs(want), 0.0)
    return apart.max(), finite.max(), (apart**2).sum(), (finite**2).sum()
