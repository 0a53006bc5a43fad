"""Integers of a calibrated quantizer."""

from __future__ import annotations

from collections.abc import Collection

from torch import Tensor, nn

from bevquant_graph import CallError
from bevquant_int8sim.model._form import Integers
from bevquant_quantizers import AffineQuantizer, Format, TensorQuantizer, format_of

# Fake quantization counts a range at or below this as zero.
SMALLEST_AMAX = 2.0**-24
_REMEDY = (
    "calibrate with batches that reach it and load the ranges (bevquant_quantizers.calibrate), or "
    "disable() the quantizer to leave its layer float"
)


class SimulateError(CallError):
    """A model that `simulate` cannot run in integers."""

    function = "simulate"


def is_active(quantizer: object) -> bool:
    """Whether it quantizes at all."""
    return (
        isinstance(quantizer, TensorQuantizer) and not quantizer._disabled and quantizer._if_quant
    )


def calibrated_range(quantizer: TensorQuantizer) -> Tensor | None:
    """The range that is quantized with: fixed, learned or scaled; None while it is dynamic."""
    amax = quantizer.amax_in_use
    if amax is None or quantizer._learn_amax or quantizer._scale_amax is None:
        return None if amax is None else amax.detach()
    return amax.detach() * quantizer._scale_amax


def unsupported(quantizer: TensorQuantizer) -> str:
    """Why an activation's quantizer has no integers of one scale; empty where it has."""
    if quantizer.axis is not None:
        return "its activations have a range per channel; integer kernels take one per tensor"
    form = format_of(quantizer.num_bits, quantizer.unsigned)
    most = 15 if quantizer.unsigned else 16
    if form.dtype is None and not 2 <= form.bits <= most:
        return f"its activations have {quantizer.num_bits} bits; integer kernels take 2 to {most}"
    return ""


def float8_of(quantizer: object) -> Format | None:
    """The format of a quantizer of FP8; None of any other."""
    if not isinstance(quantizer, TensorQuantizer):
        return None
    form = format_of(quantizer.num_bits, quantizer.unsigned)
    return None if form.dtype is None else form


def float8_scale(quantizer: TensorQuantizer, form: Format, path: str) -> float:
    """Scale of an FP8 activation: as given, or amax / 448 of E4M3, in float32 as files hold it.

    Of block formats amax, for NVFP4; 0 for MX formats, which need none.
    """
    if isinstance(quantizer, AffineQuantizer):
        return float(quantizer.step)
    if form.scale == "e8m0":
        return 0.0
    amax = _usable_range(quantizer, path).float()
    return float(amax if form.block else (amax / form.high).float())


def integers_of(quantizer: TensorQuantizer, path: str) -> Integers:
    """The integers of an activation's quantizer: scale = amax / (2^(bits−1) − 1), or as given."""
    unsigned = quantizer.unsigned
    form = format_of(quantizer.num_bits, unsigned, quantizer._narrow_range)
    if form.dtype is not None:
        raise SimulateError(
            f"{path}: {form.name} where integers are read; quantize it with num_bits=8"
        )
    if isinstance(quantizer, AffineQuantizer):
        low, high = int(quantizer.low), int(quantizer.high)
        return Integers(float(quantizer.step), form.bits, low, high)
    amax = _usable_range(quantizer, path)
    # Unsigned: 0…2^bits − 1, scale amax / (2^bits − 1), and one more bit as a signed type.
    return Integers(float(amax) / form.high, form.bits + unsigned, int(form.low), int(form.high))


def _usable_range(quantizer: TensorQuantizer, path: str) -> Tensor:
    amax = calibrated_range(quantizer)
    problem = _problem(amax)
    if problem or amax is None:
        raise SimulateError(f"{path}: {problem}; {_REMEDY}")
    return amax


def check_calibrated(model: nn.Module, reached: Collection[str]) -> None:
    """Refuse a model with activations that have no usable range, among the `reached` modules."""
    problems = []
    for path, module in model.named_modules():
        if isinstance(module, AffineQuantizer):
            continue  # its scale was checked when it was made
        if isinstance(module, TensorQuantizer) and is_active(module):
            owner = path.rpartition(".")[0]
            # Quantizers of modules that nothing calls have no part in it.
            if path not in reached and owner not in reached:
                continue
            # The range of a weight is its largest value where nobody says otherwise.
            weight = path.rpartition(".")[2] == "_weight_quantizer"
            amax = calibrated_range(module)
            problem = "" if weight and amax is None else _problem(amax, channels=weight)
            if problem:
                problems.append(f"{path} ({problem})")
    if problems:
        raise SimulateError(
            f"{len(problems)} quantizers have no usable range: {', '.join(problems)}; {_REMEDY}"
        )


def _problem(amax: Tensor | None, *, channels: bool = False) -> str:
    if amax is None:
        return "not calibrated"
    if not bool(amax.isfinite().all()):
        return "its range is NaN or infinite"
    if bool((amax < 0).any()):
        return "its range is negative"
    if channels:
        return ""
    if not bool((amax > SMALLEST_AMAX).all()):
        return f"its range {float(amax.min()):g} is zero or too small for a scale"
    return "" if amax.numel() == 1 else f"it has {amax.numel()} ranges where one is expected"
