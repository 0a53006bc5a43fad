"""Quantization settings of weights and outputs under their documented names."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch.ao.quantization import QConfig

from bevquant_hybrid._fake_quant._fake_quantize import (
    CalibFakeQuantize,
    FakeQuantize,
    LSQFakeQuantize,
    PACTFakeQuantize,
    unknown_settings,
)
from bevquant_hybrid.dtype import as_quant_dtype, qint8, qint16
from bevquant_hybrid.quantization.observer import (
    CalibObserver,
    ClipObserver,
    ClipStdObserver,
    FixedScaleObserver,
    KLObserver,
    MixObserver,
    MovingAverageMinMaxObserver,
    MovingAveragePerChannelMinMaxObserver,
    MSEObserver,
    NoopObserver,
    PercentileObserver,
)

_FAKE_QUANTS = {"fake_quant": FakeQuantize, "lsq": LSQFakeQuantize, "pact": PACTFakeQuantize}
_OBSERVERS = {
    "min_max": MovingAverageMinMaxObserver,
    "fixed_scale": FixedScaleObserver,
    "clip": ClipObserver,
    "percentile": PercentileObserver,
    "clip_std": ClipStdObserver,
    "mse": MSEObserver,
    "kl": KLObserver,
    "mix": MixObserver,
}
_PER_CHANNEL = {"qscheme": torch.per_channel_symmetric, "ch_axis": 0}


def _chosen(what: str, name: str, known: dict[str, Any]) -> Any:
    if name not in known:
        raise ValueError(f"{what}={name!r}: expected one of {', '.join(map(repr, known))}")
    return known[name]


def _factory(
    part: str, kind: str, observer: Any, settings: dict[str, Any], given: Any
) -> Callable[..., Any]:
    """A fake quantizer's constructor; the caller's arguments take precedence."""
    cls = _chosen(f"{part}_fake_quant", kind, _FAKE_QUANTS)
    return _checked(f"{part}_qkwargs", cls, {"observer": observer, **settings}, given)


def _checked(what: str, cls: Any, settings: dict[str, Any], given: Any) -> Callable[..., Any]:
    """The constructor of `cls`, after a check of its arguments."""
    if given is not None and not isinstance(given, Mapping):
        raise TypeError(
            f"{what}={given!r}: expected a dictionary of what the observer and the fake quantizer "
            'take, such as {"averaging_constant": 0}'
        )
    merged = {**settings, **(given or {})}
    if not callable(merged["observer"]):
        raise TypeError(
            f"{what}: observer={merged['observer']!r}: expected a class such as MSEObserver; by "
            "name, observers are chosen in get_default_qconfig(activation_observer=…)"
        )
    unknown = unknown_settings(merged, cls, merged["observer"])
    if unknown:
        raise TypeError(f"{what}: {unknown}")
    if "dtype" in merged:
        merged["dtype"] = as_quant_dtype(merged["dtype"])
    return _made_by(cls, **merged)


def _qconfig(activation: Any, weight: Any) -> QConfig:
    made: QConfig = QConfig(activation=activation, weight=weight)
    return made


def _made_by(cls: Any, **settings: Any) -> Callable[..., Any]:
    made: Callable[..., Any] = cls.with_args(**settings)
    return made


def _of_bits(bits: int, caller: str) -> str:
    if bits not in (8, 16):
        raise ValueError(f"{caller}: bits={bits!r}: expected 8 or 16")
    return qint8 if bits == 8 else qint16


def get_default_qat_qconfig(
    dtype: str | int = "qint8",
    weight_dtype: str = "qint8",
    activation_fake_quant: str = "fake_quant",
    weight_fake_quant: str = "fake_quant",
    activation_qkwargs: dict[str, Any] | None = None,
    weight_qkwargs: dict[str, Any] | None = None,
    backend: str = "",
    *,
    bits: int | None = None,
) -> QConfig:
    """Settings for QAT: averaged ranges, one per activation and one per weight channel.

    Args:
        dtype: Type of the output, ``"qint8"`` or ``"qint16"``; or its bits, for the older form
            ``(bits, backend)``.
        weight_dtype: Of the weight.
        activation_fake_quant: ``"fake_quant"``, ``"lsq"`` or ``"pact"``.
        weight_fake_quant: ``"fake_quant"`` or ``"lsq"``.
        activation_qkwargs: Arguments of the observer and the fake quantizer, and ``observer``
            itself.
        weight_qkwargs: The same for the weight.
        backend: Accepted for old scripts.
        bits: ``dtype`` in old scripts: 8 or 16.

    Raises:
        TypeError: A setting that neither the observer nor the fake quantizer takes.
        ValueError: A name that is not known, or another number of bits.

    Example:
        >>> get_default_qat_qconfig(dtype="qint16").activation().dtype
        qint16
    """
    if isinstance(dtype, int):  # bits, and a backend behind it
        bits, dtype, weight_dtype = dtype, qint8, qint8
    if bits is not None:
        dtype = _of_bits(bits, "get_default_qat_qconfig")
    return _qconfig(
        activation=_factory(
            "activation",
            activation_fake_quant,
            MovingAverageMinMaxObserver,
            {"dtype": as_quant_dtype(dtype)},
            activation_qkwargs,
        ),
        weight=_factory(
            "weight",
            weight_fake_quant,
            MovingAveragePerChannelMinMaxObserver,
            {"dtype": as_quant_dtype(weight_dtype), **_PER_CHANNEL},
            weight_qkwargs,
        ),
    )


def get_default_qat_out_qconfig(
    dtype: str | int = "qint8",
    weight_fake_quant: str = "fake_quant",
    weight_qkwargs: dict[str, Any] | None = None,
    backend: str = "",
    *,
    bits: int | None = None,
) -> QConfig:
    """Settings of a last layer: the output is the 32-bit accumulators.

    Args:
        dtype: Type of the weight; or bits of the output, for the older form ``(bits, backend)``.
            The output has 32 bits.
        weight_fake_quant: As in `get_default_qat_qconfig`.
        weight_qkwargs: As in `get_default_qat_qconfig`.
        backend: Accepted for old scripts.
        bits: As `dtype`: 8 or 16.

    Raises:
        ValueError: Another number of bits.

    Example:
        >>> get_default_qat_out_qconfig().activation is None
        True
    """
    if isinstance(dtype, int):
        bits, dtype, weight_fake_quant = dtype, qint8, "fake_quant"
    if bits is not None:
        _of_bits(bits, "get_default_qat_out_qconfig")
    inner = get_default_qat_qconfig(
        weight_dtype=dtype, weight_fake_quant=weight_fake_quant, weight_qkwargs=weight_qkwargs
    )
    return _qconfig(activation=None, weight=inner.weight)


def get_default_calib_qconfig(
    dtype: str = "qint8", calib_qkwargs: dict[str, Any] | None = None, backend: str = ""
) -> QConfig:
    """Settings for calibration: histograms of outputs, without rounding.

    Args:
        dtype: Type of the output.
        calib_qkwargs: Arguments of the observer, and ``observer`` itself.
        backend: Accepted for old scripts.

    Example:
        >>> get_default_calib_qconfig().weight()
        CalibFakeQuantize(
          (activation_post_process): NoopObserver()
        )
    """
    settings = {"observer": CalibObserver, "dtype": as_quant_dtype(dtype)}
    return _qconfig(
        activation=_checked("calib_qkwargs", CalibFakeQuantize, settings, calib_qkwargs),
        weight=_made_by(CalibFakeQuantize, observer=NoopObserver, dtype=qint8),
    )


def get_default_qconfig(
    activation_fake_quant: str | None = "fake_quant",
    weight_fake_quant: str | None = "fake_quant",
    activation_observer: str | None = "min_max",
    weight_observer: str | None = "min_max",
    activation_qkwargs: dict[str, Any] | None = None,
    weight_qkwargs: dict[str, Any] | None = None,
) -> QConfig:
    """Settings by name, for calibration and training alike (`set_fake_quantize` switches).

    Args:
        activation_fake_quant: ``"fake_quant"``, ``"lsq"``, ``"pact"``, or None for a 32-bit output.
        weight_fake_quant: The same for weights.
        activation_observer: ``"min_max"``, ``"fixed_scale"``, ``"clip"``, ``"percentile"``,
            ``"clip_std"``, ``"mse"``, ``"kl"`` or ``"mix"``.
        weight_observer: The same for weights. ``"min_max"`` measures per output channel.
        activation_qkwargs: Arguments of the observer and the fake quantizer.
        weight_qkwargs: The same for weights.

    Raises:
        TypeError: A setting that neither the observer nor the fake quantizer takes.
        ValueError: A name that is not known.

    Example:
        >>> qconfig = get_default_qconfig(activation_observer="mse")
        >>> type(qconfig.activation().activation_post_process).__name__
        'MSEObserver'
    """
    activation = weight = None
    if activation_fake_quant is not None and activation_observer is not None:
        observer = _chosen("activation_observer", activation_observer, _OBSERVERS)
        activation = _factory(
            *("activation", activation_fake_quant, observer, {}, activation_qkwargs)
        )
    if weight_fake_quant is not None and weight_observer is not None:
        observer = _chosen("weight_observer", weight_observer, _OBSERVERS)
        settings: dict[str, Any] = {}
        if weight_observer == "min_max":
            observer, settings = MovingAveragePerChannelMinMaxObserver, dict(_PER_CHANNEL)
        _refuse_one_range(weight_observer, weight_qkwargs)
        weight = _factory("weight", weight_fake_quant, observer, settings, weight_qkwargs)
    return _qconfig(activation=activation, weight=weight)


def _refuse_one_range(observer: str, given: Mapping[str, Any] | None) -> None:
    """Refuse weight observers without the requested per-channel ranges."""
    settings = given or {}
    per_channel = settings.get("qscheme") == torch.per_channel_symmetric
    if observer == "kl" and per_channel:
        raise ValueError(
            "get_default_qconfig: weight_observer='kl' has one histogram, of the whole weight, and "
            "ranges per channel are asked for (qscheme=torch.per_channel_symmetric); use "
            "'min_max', 'mse' or 'mix', which measure each channel, or leave qscheme out"
        )
    if observer == "fixed_scale" and "scale" not in settings:
        raise ValueError(
            "get_default_qconfig: weight_observer='fixed_scale' measures nothing, and the ranges "
            "of weights are per channel, which no default knows: give weight_qkwargs={'scale': "
            "...}, one number, or with qscheme=torch.per_channel_symmetric and ch_axis one per "
            "channel; or use 'min_max'"
        )


def get_qconfig(
    observer: Any = MovingAverageMinMaxObserver,
    in_dtype: Any = None,
    weight_dtype: Any = qint8,
    out_dtype: Any = qint8,
    fix_scale: bool = False,
) -> QConfig:
    """Settings of an operator in the newer generation of the API.

    Args:
        observer: Class, or name as in `get_default_qconfig`, of the output's observer: MinMax for
            training, MSE for calibration. Weights are measured per channel.
        in_dtype: None: an input has the type of its producer's output.
        weight_dtype: Of the weight.
        out_dtype: Of the output; None for 32 bits.
        fix_scale: Keep the scale that calibration found (an averaging constant of 0).

    Raises:
        ValueError: A type that is not an integer type, or an `in_dtype`.

    Example:
        >>> get_qconfig(out_dtype=qint16).activation().dtype
        qint16
    """
    if in_dtype is not None:
        raise ValueError(
            f"get_qconfig: in_dtype={in_dtype!r}: expected None: give it to what makes the input"
        )
    cls = _chosen("observer", observer, _OBSERVERS) if isinstance(observer, str) else observer
    constant = {"averaging_constant": 0.0} if fix_scale else {}
    activation = None
    if out_dtype is not None:
        settings = {**constant, "dtype": as_quant_dtype(out_dtype)}
        activation = _factory("activation", "fake_quant", cls, settings, None)
    weight = _factory(
        *("weight", "fake_quant", MovingAveragePerChannelMinMaxObserver),
        *({**_PER_CHANNEL, "dtype": as_quant_dtype(weight_dtype)}, None),
    )
    return _qconfig(activation=activation, weight=weight)


default_8bit_fake_quant = _made_by(
    FakeQuantize, observer=MovingAverageMinMaxObserver, dtype=qint8, averaging_constant=0.01
)
default_weight_8bit_fake_quant = _made_by(
    FakeQuantize,
    observer=MovingAveragePerChannelMinMaxObserver,
    dtype=qint8,
    averaging_constant=0.01,
    **_PER_CHANNEL,
)
_16_BITS = {"dtype": qint16}
default_qat_8bit_fake_quant_qconfig = get_default_qconfig()
default_qat_8bit_weight_32bit_out_fake_quant_qconfig = get_default_qconfig(None)
default_qat_out_8bit_fake_quant_qconfig = default_qat_8bit_weight_32bit_out_fake_quant_qconfig
default_qat_8bit_weight_16bit_act_fake_quant_qconfig = get_default_qconfig(
    activation_qkwargs=_16_BITS
)
_LSQ = {"use_grad_scaling": True, "averaging_constant": 1.0}
default_qat_8bit_lsq_quant_qconfig = get_default_qconfig(
    "lsq", "lsq", activation_qkwargs=_LSQ, weight_qkwargs=_LSQ
)
default_calib_8bit_fake_quant_qconfig = get_default_qconfig(activation_observer="percentile")
default_calib_out_8bit_fake_quant_qconfig = get_default_qconfig(None)
default_calib_8bit_weight_32bit_out_fake_quant_qconfig = default_calib_out_8bit_fake_quant_qconfig
default_calib_8bit_weight_16bit_act_fake_quant_qconfig = get_default_qconfig(
    activation_observer="percentile", activation_qkwargs=_16_BITS
)
