"""Precisions of layers: formats of activations and weights, or float."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from types import MappingProxyType
from typing import Literal, cast, get_args

from torch import Tensor

from bevquant_quantizers import NumBits, TensorQuantizer, format_of
from bevquant_quantizers.calib import HistogramCalibrator

Precision = Literal["int4", "int8", "int16", "fp8", "float"]

PRECISIONS: tuple[Precision, ...] = get_args(Precision)

# (bits of activations, bits of weights). Integer kernels of 16 bits take weights of 8; FP8 is E4M3.
_BITS: Mapping[str, tuple[NumBits, NumBits]] = MappingProxyType(
    {"int8": (8, 8), "int4": (8, 4), "int16": (16, 8), "fp8": ((4, 3), (4, 3))}
)

REASONS: Mapping[str, str] = MappingProxyType(
    {
        "float": "the plan leaves it in float",
        "int16": "the plan gives it activations of 16 bits, weights of 8",
        "int4": "the plan gives it weights of 4 bits, activations of 8",
        "fp8": "the plan gives it activations and weights of FP8 (E4M3)",
    }
)
"""What a plan does to a layer that is not int8."""


@dataclass(frozen=True)
class Setting:
    """Setting of one quantizer at a precision: its bits and its range, or off."""

    disabled: bool
    bits: NumBits
    amax: Tensor | None


def check_precisions(names: Iterable[str], where: str) -> None:
    """Refuse names that are no precision.

    Raises:
        ValueError: They are listed.
    """
    unknown = [name for name in names if name not in PRECISIONS]
    if unknown:
        raise ValueError(
            f"{where}: unknown precisions {', '.join(map(repr, unknown))}; expected "
            f"{', '.join(PRECISIONS)}"
        )


def own_precision(
    inputs: Iterable[TensorQuantizer], weights: Iterable[TensorQuantizer], where: str
) -> Precision:
    """Return the precision of quantizers as they are.

    Raises:
        ValueError: Their bits are those of none.
    """
    bits = [{q.num_bits for q in held if not q._disabled} for held in (inputs, weights)]
    for name, expected in _BITS.items():
        if all(found <= {want} for found, want in zip(bits, expected, strict=True)):
            return cast(Precision, name)
    texts = [" and ".join(sorted(map(str, found))) for found in bits]
    raise ValueError(
        f"{where}: activations of {texts[0]} bits with weights of {texts[1]} are no precision; "
        f"name those to measure, of {', '.join(_BITS)}"
    )


def setting_at(quantizer: TensorQuantizer, precision: str, *, weight: bool) -> Setting:
    """Return the setting of `quantizer` at `precision`.

    At its own bits its range stays. At other bits the range is searched again in its calibrator's
    histogram: by mse up to 8 bits, above that the largest value, where rounding is finer than any
    clipping. A quantizer with an empty calibrator keeps its range.
    """
    if precision == "float":
        return Setting(True, quantizer.num_bits, quantizer.amax)
    bits = _BITS[precision][1 if weight else 0]
    amax = quantizer.amax
    if bits != quantizer.num_bits and amax is not None:
        amax = _searched(quantizer, bits, amax)
    return Setting(False, bits, amax)


def _searched(quantizer: TensorQuantizer, bits: NumBits, now: Tensor) -> Tensor:
    calibrator = quantizer._calibrator
    if not isinstance(calibrator, HistogramCalibrator):
        return now
    before = calibrator._num_bits
    calibrator._num_bits = bits
    try:
        found = calibrator.compute_amax("mse" if format_of(bits).bits <= 8 else "max")
    finally:
        calibrator._num_bits = before
    if found is None or not bool(found.any()):
        return now
    return found.detach().to(now).reshape(now.shape)


@contextmanager
def set_for_now(settings: Mapping[TensorQuantizer, Setting]) -> Iterator[None]:
    """Run a block with other settings; every quantizer gets its own back."""
    own = {q: Setting(q._disabled, q._num_bits, q.amax) for q in settings}
    try:
        for quantizer, setting in settings.items():
            put(quantizer, setting)
        yield
    finally:
        for quantizer, setting in own.items():
            put(quantizer, setting)


def put(quantizer: TensorQuantizer, setting: Setting) -> None:
    """Set the quantizer."""
    quantizer._disabled = setting.disabled
    quantizer._num_bits = setting.bits
    # A learned range is a parameter; it is left to its training.
    if setting.amax is not None and "_amax" in quantizer._buffers:
        quantizer._buffers["_amax"] = setting.amax
