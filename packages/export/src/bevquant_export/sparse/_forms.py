"""One form per tensor, which all its consumers agree on."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from bevquant_export.sparse._follow import Followed, Reading
from bevquant_export.sparse._half_precision import LARGEST_HALF

_STEPS = 127


@dataclass(frozen=True)
class TensorForm:
    """Form of a tensor in a file.

    Attributes:
        relu: After the ReLU of its producer.
        precision: ``"int8"`` where every consumer needs integers, else ``"fp16"``.
        amax: The range, where any consumer needs integers.
    """

    relu: bool
    precision: str
    amax: float | None


def agreed_forms(followed: Followed) -> Mapping[str, TensorForm]:
    """Return the form of every tensor.

    Raises:
        ValueError: Consumers need a tensor with and without a ReLU, in several ranges, or in
            integers that the engine does not have; the message names them.
    """
    readings: dict[str, list[Reading]] = {followed.input: []}
    readings |= {draft.y: [] for draft in followed.drafts}
    for reading in followed.outputs:
        readings[reading.tensor].append(reading)
    parts: dict[str, list[Reading]] = {}
    for draft in reversed(followed.drafts):
        # Selected channels have the form of the whole, if that is the form of their consumers,
        # and steps between layers read each tensor in the form that they need.
        own = [_stated(r.form) for r in draft.reads]
        passes = draft.kind == "select" and all(_stated(r.form) in own for r in readings[draft.y])
        passes = passes or draft.kind == "steps"
        for reading in draft.reads:
            (parts.setdefault(reading.tensor, []) if passes else readings[reading.tensor]).append(
                reading
            )
    forms = {t: _form(t, found, parts.get(t, [])) for t, found in readings.items()}
    sums = [[r.tensor for r in draft.reads] for draft in followed.drafts if draft.kind == "add"]
    while mixed := [pair for pair in sums if len({forms[t].precision for t in pair}) > 1]:
        # The engine adds two int8 tensors or two of fp16, and rounds the latter to its ranges.
        forms |= {t: replace(forms[t], precision="fp16") for pair in mixed for t in pair}
    return forms


def _stated(form: Any) -> object:
    return "float" if isinstance(form, str) else float(form.scale)


def _form(tensor: str, readings: list[Reading], parts: list[Reading]) -> TensorForm:
    """`parts` read some channels, which have their own ranges."""
    readings = readings[::-1]
    readers = ", ".join(dict.fromkeys(r.by for r in (*readings, *parts)))
    both = (*readings, *parts)
    # A part may have its own ReLU, which the whole tensor does not have.
    relu = bool(both) and all(r.relu for r in both)
    if any(r.relu != relu for r in readings):
        raise ValueError(
            f"export_sparse_onnx: {readers} read the tensor {tensor!r}, some of them before and "
            "some behind its ReLU; the file folds the ReLU into the layer, so all must read behind "
            "it"
        )
    integers = [r for r in readings if not isinstance(r.form, str)]
    for reading in integers:
        _check_integers(reading, relu)
    ranges = sorted({float(r.form.scale) * _STEPS for r in integers})
    if len(ranges) > 1:
        raise ValueError(
            f"export_sparse_onnx: {readers} read the tensor {tensor!r} in different ranges "
            f"{', '.join(f'{r:g}' for r in ranges)}; a file holds one range per tensor. "
            "bevquant_qnn.quantize_model with example_inputs gives all readers one quantizer"
        )
    if ranges and ranges[0] > LARGEST_HALF:
        raise ValueError(
            f"export_sparse_onnx: {readers} read the tensor {tensor!r} with a range of "
            f"{ranges[0]:g}, beyond float16 (largest {LARGEST_HALF:g}), in which the engine's "
            "unquantized layers compute; calibrate again, or scale the layers before it"
        )
    for reading in parts:
        if not isinstance(reading.form, str):
            _check_integers(reading, reading.relu)
    wanted = {_stated(r.form) for r in both}
    whole = len(wanted) == 1 and "float" not in wanted
    if whole and not ranges:
        ranges = [float(parts[0].form.scale) * _STEPS]
    return TensorForm(relu, "int8" if whole else "fp16", ranges[0] if ranges else None)


def _check_integers(reading: Reading, relu: bool) -> None:
    form = reading.form
    if form.bits != 8 or not form.full:
        raise ValueError(
            f"export_sparse_onnx: {reading.by} reads integers of {form.bits} bits, {form.low} to "
            f"{form.high}; the engine has 8, -128 to 127: quantize it with num_bits=8, or "
            "disable() its quantizers"
        )
    if form.low != -128 and not relu:
        raise ValueError(
            f"export_sparse_onnx: {reading.by} reads integers from {form.low} on "
            "(narrow_range=True); the engine's reach down to -128: quantize with "
            "narrow_range=False"
        )
