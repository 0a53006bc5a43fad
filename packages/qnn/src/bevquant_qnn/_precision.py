"""What a precision means for a quantizer: bits of activations, bits of weights, or off."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from types import MappingProxyType
from typing import Literal, get_args

from torch import Tensor

from bevquant_quantizers import TensorQuantizer
from bevquant_quantizers.calib import HistogramCalibrator

Precision = Literal["int4", "int8", "int16", "float"]

PRECISIONS: tuple[Precision, ...] = get_args(Precision)

# (bits of activations, bits of weights). Integer kernels of 16 bits take weights of 8.
_BITS: Mapping[str, tuple[int, int]] = MappingProxyType(
    {"int4": (8, 4), "int8": (8, 8), "int16": (16, 8)}
)


@dataclass(frozen=True)
class Setting:
    """What one quantizer does at a precision: its bits and its range, or nothing."""

    disabled: bool
    bits: int
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
    for name in ("int8", "int4", "int16"):
        expected = _BITS[name]
        if all(found <= {want} for found, want in zip(bits, expected, strict=True)):
            return name
    raise ValueError(
        f"{where}: activations of {sorted(bits[0])} and weights of {sorted(bits[1])} bits are no "
        f"precision; name those to measure, of {', '.join(_BITS)}"
    )


def setting_at(quantizer: TensorQuantizer, precision: str, *, weight: bool) -> Setting:
    """Return what `quantizer` does at `precision`.

    At the bits that it has, its range stays. At others the range is searched again in what its
    calibrator holds: by mse up to 8 bits, the largest value above, where rounding is finer than
    any clipping. A quantizer whose calibrator holds nothing keeps its range.
    """
    if precision == "float":
        return Setting(True, quantizer.num_bits, quantizer.amax)
    bits = _BITS[precision][1 if weight else 0]
    amax = quantizer.amax
    if bits != quantizer.num_bits and amax is not None:
        amax = _searched(quantizer, bits, amax)
    return Setting(False, bits, amax)


def _searched(quantizer: TensorQuantizer, bits: int, now: Tensor) -> Tensor:
    calibrator = quantizer._calibrator
    if not isinstance(calibrator, HistogramCalibrator):
        return now
    before = calibrator._num_bits
    calibrator._num_bits = bits
    try:
        found = calibrator.compute_amax("mse" if bits <= 8 else "max")
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
