"""Precisions of layers: formats of activations and weights, or float."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, Literal, cast, get_args

from torch import Tensor, nn

from bevquant_graph import layer_class
from bevquant_qnn._precision_groups import PrecisionGroup
from bevquant_quantizers import NumBits, TensorQuantizer, format_of
from bevquant_quantizers.calib import HistogramCalibrator

Precision = Literal["int4", "int8", "int16", "w4a4", "fp8", "mxfp8", "mxfp4", "nvfp4", "float"]

PRECISIONS: tuple[Precision, ...] = get_args(Precision)
BLOCKS = ("mxfp8", "mxfp4", "nvfp4")
"""Formats with a scale for each block of input channels."""

# (bits of activations, bits of weights). Integer kernels of 16 bits take weights of 8; FP8 is E4M3.
_BITS: Mapping[str, tuple[NumBits, NumBits]] = MappingProxyType(
    {"int8": (8, 8), "int4": (8, 4), "w4a4": (4, 4), "int16": (16, 8), "fp8": ((4, 3), (4, 3)),
     **{name: (name, name) for name in BLOCKS}}
)  # fmt: skip

REASONS: Mapping[str, str] = MappingProxyType(
    {
        "float": "the plan leaves it in float",
        "int16": "the plan gives it activations of 16 bits, weights of 8",
        "int4": "the plan gives it weights of 4 bits, activations of 8",
        "w4a4": "the plan gives it weights and activations of 4 bits",
        "fp8": "the plan gives it activations and weights of FP8 (E4M3)",
        **{name: f"the plan gives it activations and weights of {name.upper()}" for name in BLOCKS},
    }
)
"""What a plan does to a layer that is not int8."""


@dataclass(frozen=True)
class Setting:
    """Setting of one quantizer at a precision: bits, range, axis of blocks and sign, or off."""

    disabled: bool
    bits: NumBits
    amax: Tensor | None
    block_axis: int = -1
    unsigned: bool = False


def check_precisions(names: Iterable[str], where: str) -> None:
    """Refuse names that are no precision."""
    unknown = [name for name in names if name not in PRECISIONS]
    if unknown:
        raise ValueError(
            f"{where}: unknown precisions {', '.join(map(repr, unknown))}; expected "
            f"{', '.join(PRECISIONS)}"
        )


def weight_bits(precision: Precision) -> float:
    """Return the bits of a weight, with its share of a block's scale; 16 in float."""
    form = format_of(16 if precision == "float" else _BITS[precision][1])
    return form.bits + (8 / form.block if form.block else 0)


def own_precision(
    inputs: Iterable[TensorQuantizer], weights: Iterable[TensorQuantizer], where: str
) -> Precision:
    """Return the precision of quantizers as they are; refuses bits without a precision."""
    bits = [{q.num_bits for q in held if not q._disabled} for held in (inputs, weights)]
    for name, expected in _BITS.items():
        if all(found <= {want} for found, want in zip(bits, expected, strict=True)):
            return cast(Precision, name)
    texts = [" and ".join(sorted(map(str, found))) for found in bits]
    raise ValueError(
        f"{where}: activations of {texts[0]} bits with weights of {texts[1]} are no precision; "
        f"name those to measure, of {', '.join(_BITS)}"
    )


def block_axis_of(model: nn.Module, group: PrecisionGroup, precision: str) -> int:
    """Return the axis, from the end, over which the products of a group sum; -1 without blocks."""
    if precision not in BLOCKS:
        return -1
    axes: set[int] = set()
    for path in group.modules:
        layer: Any = model.get_submodule(path)
        linear = layer_class(layer, nn.Linear) is not None
        if not linear and (
            layer_class(layer, nn.Conv1d, nn.Conv2d, nn.Conv3d) is None
            or {*layer.kernel_size} != {1}
            or layer.groups != 1
        ):
            raise ValueError(
                f"{path}: {precision} is for linear layers and convolutions of 1×1 without groups, "
                f"and this is a {type(layer).__name__}; give it another precision"
            )
        # The input channels, from the end: the activation's rank may be another one.
        axes.add(1 - layer.weight.dim())
    if len(axes) > 1:
        raise ValueError(
            f"{', '.join(group.modules)}: {precision} has blocks along one axis, and linear layers "
            "and convolutions that read one tensor sum over several; give them another precision"
        )
    return axes.pop()


def settings_at(
    model: nn.Module,
    group: PrecisionGroup,
    precision: str,
    quantizers: Iterable[TensorQuantizer],
) -> dict[TensorQuantizer, Setting]:
    """Return the settings of a group's `quantizers` at `precision`.

    At other bits a range is searched again in its calibrator's histogram, if that has values.
    """
    axis = block_axis_of(model, group, precision)
    return {q: _setting_at(q, precision, q in group.weights, axis) for q in quantizers}


def _setting_at(
    quantizer: TensorQuantizer, precision: str, weight: bool, block_axis: int
) -> Setting:
    if precision == "float":
        return own_setting(quantizer, disabled=True)
    bits = _BITS[precision][1 if weight else 0]
    amax = quantizer.amax
    if bits != quantizer.num_bits and amax is not None:
        amax = _searched(quantizer, bits, amax)
    # Beyond 8 bits and in FP8 it is signed.
    unsigned = quantizer.unsigned and _may_be_unsigned(bits)
    return Setting(False, bits, amax, block_axis, unsigned)


def own_setting(quantizer: TensorQuantizer, *, disabled: bool) -> Setting:
    """Return the setting of `quantizer` as it is, on or off."""
    return Setting(
        disabled, quantizer.num_bits, quantizer.amax, quantizer.block_axis, quantizer.unsigned
    )


def _may_be_unsigned(bits: NumBits) -> bool:
    return isinstance(bits, int) and bits <= 8


def _searched(quantizer: TensorQuantizer, bits: NumBits, now: Tensor) -> Tensor:
    calibrator = quantizer._calibrator
    if not isinstance(calibrator, HistogramCalibrator):
        return now
    before = calibrator._num_bits, calibrator._unsigned
    calibrator._num_bits = bits
    calibrator._unsigned = before[1] and _may_be_unsigned(bits)
    try:
        # Above 8 bits rounding is finer than any clipping, and blocks have scales of their own.
        clips = not isinstance(bits, str) and format_of(bits).bits <= 8
        found = calibrator.compute_amax("mse" if clips else "max")
    finally:
        calibrator._num_bits, calibrator._unsigned = before
    if found is None or not bool(found.any()):
        return now
    return found.detach().to(now).reshape(now.shape)


@contextmanager
def set_for_now(settings: Mapping[TensorQuantizer, Setting]) -> Iterator[None]:
    """Run a block with other settings; every quantizer gets its own back."""
    own = {q: own_setting(q, disabled=q._disabled) for q in settings}
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
    quantizer._num_bits, quantizer._unsigned = setting.bits, setting.unsigned
    if quantizer.block_axis != setting.block_axis:
        # Set in vain, it would be another structure, whose graph is captured anew.
        quantizer.block_axis = setting.block_axis
    # A learned range is a parameter; it is left to its training.
    if setting.amax is not None and "_amax" in quantizer._buffers:
        quantizer._buffers["_amax"] = setting.amax
