"""The description of how one tensor is quantized."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from ._format import NumBits, check_bits, format_of

_log = logging.getLogger(__name__)
_LARGEST = float(np.finfo(np.float32).max)
_DEFAULTS: dict[str, Any] = {
    "fake_quant": True,
    "axis": None,
    "learn_amax": False,
    "amax": None,
    "scale_amax": None,
    "calib_method": "max",
    "unsigned": False,
    "narrow_range": False,
}

Axis = int | tuple[int, ...] | None


def kept_axes(axis: int | Sequence[int] | None, shape: Sequence[int], who: str) -> list[int]:
    """Axes of a tensor that keep a range of their own, counted from the front.

    Raises:
        TypeError: They are no integers.
        ValueError: The tensor has not so many axes.
    """
    if axis is None:
        return []
    axes: Sequence[Any] = axis if isinstance(axis, list | tuple) else [axis]
    if any(not isinstance(a, int) for a in axes):
        raise TypeError(f"{who}: axis {axis!r}: expected an integer, several, or None")
    if any(not -len(shape) <= a < len(shape) for a in axes):
        raise ValueError(f"{who}: axis {axis} is out of range for a tensor of shape {tuple(shape)}")
    return sorted({a % len(shape) for a in axes})


class ScaledQuantDescriptor:
    """Bits, range and granularity of a quantized tensor; read-only, as in pytorch-quantization.

    Args:
        num_bits: Bits of the integer, 0 to 32; 0 quantizes everything to zero. (4, 3) is FP8 E4M3
            and (5, 2) FP8 E5M2, as in ModelOpt.
        name: A name for messages, or None.
        fake_quant: Return floats that lie on the integer grid (True), or integers and a scale.
        axis: Axis or axes of the tensor that each have their own range; None is one range for the
            whole tensor. ``axis=0`` on a weight [out, in, k, k] is one range per output channel.
        amax: A fixed range: a float, or a list or array of floats. None takes the range from
            calibration, and until then from each tensor itself.
        learn_amax: Learn the range by gradient descent; per tensor only.
        scale_amax: A factor applied to the range wherever it is used.
        calib_method: ``"max"`` or ``"histogram"``: which calibrator a quantizer creates.
        unsigned: Integers 0…2^num_bits − 1 instead of signed ones.
        narrow_range: Leave out the most negative integer.

    Raises:
        TypeError: `num_bits` is no int or pair, `name` no string, `amax` neither float, list nor
            array, `axis` no axes, `scale_amax` no number, an unknown keyword, or `axis` together
            with `learn_amax`.
        ValueError: `num_bits` is negative, above 32 or another pair, 1 without `unsigned`,
            `unsigned` with FP8, or `amax` holds no finite numbers.

    Examples:
        >>> str(ScaledQuantDescriptor(8, axis=0))
        'QuantDescriptor(8bit fake axis=0)'
        >>> ScaledQuantDescriptor(4, unsigned=True).dict()
        {'num_bits': 4, 'name': None, 'unsigned': True}
    """

    def __init__(self, num_bits: NumBits = 8, name: str | None = None, **kwargs: Any) -> None:
        num_bits = check_bits(num_bits)
        if num_bits == 0:
            _log.error("num_bits is 0: every value will be quantized to zero, for debugging only")
        if name is not None and not isinstance(name, str):
            raise TypeError(f"name must be a string or None, not {type(name)}.")
        unknown = sorted(kwargs.keys() - _DEFAULTS.keys())
        if unknown:
            raise TypeError(f"Unused keys: {unknown}; known are {sorted(_DEFAULTS)}")
        values = _DEFAULTS | kwargs
        if values["learn_amax"] and values["axis"] is not None:
            raise TypeError(
                "axis must be None when learn_amax is true: a learned range is per tensor, "
                f"got axis={values['axis']!r}"
            )
        format_of(num_bits, bool(values["unsigned"]))
        amax = values["amax"]
        if amax is not None:
            if not isinstance(amax, float | list | np.ndarray):
                raise TypeError(f"amax must be float, list or ndarray, not {type(amax)}")
            try:
                amax = np.array(amax, dtype=np.float32)
            except (TypeError, ValueError, OverflowError) as error:
                raise ValueError(f"amax must be numbers that float32 holds: {error}") from error
            if not np.isfinite(amax).all():
                raise ValueError(f"amax must be numbers that float32 holds, got {values['amax']}")
        axis, factor = values["axis"], values["scale_amax"]
        axes = axis if isinstance(axis, list | tuple) else [] if axis is None else [axis]
        if any(not isinstance(a, int) for a in axes):
            raise TypeError(f"axis must be an integer, a tuple of them or None, not {axis!r}")
        size: Any = abs(factor) if isinstance(factor, int | float | np.floating) else np.inf
        if factor is not None and not size <= _LARGEST:
            raise TypeError(f"scale_amax must be a finite number or None, not {factor!r}")
        self._num_bits = num_bits
        self._name = name
        self._fake_quant = bool(values["fake_quant"])
        self._axis: Axis = values["axis"]
        self._learn_amax = bool(values["learn_amax"])
        self._amax: npt.NDArray[np.float32] | None = amax
        self._scale_amax: float | None = values["scale_amax"]
        self._calib_method: str | None = values["calib_method"]
        self._unsigned = bool(values["unsigned"])
        self._narrow_range = bool(values["narrow_range"])

    @property
    def num_bits(self) -> NumBits:
        """Bits of the integer, or exponent and mantissa bits of FP8."""
        return self._num_bits

    @property
    def name(self) -> str | None:
        """Name used in messages."""
        return self._name

    @property
    def fake_quant(self) -> bool:
        """Whether a quantizer returns floats on the integer grid, or integers."""
        return self._fake_quant

    @property
    def axis(self) -> Axis:
        """Axes with a range of their own, None for one range."""
        return self._axis

    @property
    def amax(self) -> npt.NDArray[np.float32] | None:
        """Fixed range as a float32 array, or None."""
        return self._amax

    @property
    def learn_amax(self) -> bool:
        """Whether the range is learned."""
        return self._learn_amax

    @property
    def scale_amax(self) -> float | None:
        """Factor applied to the range, or None."""
        return self._scale_amax

    @property
    def calib_method(self) -> str | None:
        """Which calibrator a quantizer creates."""
        return self._calib_method

    @property
    def unsigned(self) -> bool:
        """Whether the integers start at 0."""
        return self._unsigned

    @property
    def narrow_range(self) -> bool:
        """Whether the most negative integer is left out."""
        return self._narrow_range

    def __str__(self) -> str:
        words = [f"{'unsigned ' if self._unsigned else ''}{self._num_bits}bit"]
        words.append("fake" if self._fake_quant else "real")
        words.append(f"axis={' per-tensor' if self._axis is None else self._axis}")
        if self._amax is not None:
            words.append(f"amax={self._amax} full_range")
        if self._learn_amax:
            words.append("learn_amax")
        if self._scale_amax:
            words.append(f"scale_amax={self._scale_amax}")
        head = "QuantDescriptor" if self._name is None else f"{self._name}: "
        return f"{head}({' '.join(words)})"

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, ScaledQuantDescriptor):
            return NotImplemented
        mine, theirs = dict(self.__dict__), dict(other.__dict__)
        a, b = mine.pop("_amax"), theirs.pop("_amax")
        same_amax = (a is None and b is None) or (
            a is not None and b is not None and np.array_equal(a, b, equal_nan=True)
        )
        return same_amax and mine == theirs

    # Mutable arrays inside: equal descriptors cannot promise equal hashes, as upstream.
    __hash__ = None  # type: ignore[assignment]

    def dict(self) -> dict[str, Any]:
        """Return the arguments that rebuild this descriptor, defaults left out."""
        out: dict[str, Any] = {"num_bits": self._num_bits, "name": self._name}
        for key, default in _DEFAULTS.items():
            value = getattr(self, f"_{key}")
            if key == "amax" and value is not None:
                out[key] = value.tolist()
            elif value is not None and value != default:
                out[key] = value
        if self._calib_method is None:
            out["calib_method"] = None
        return out

    def to_yaml(self) -> str:
        """Return `dict()` as YAML, tuples as lists; needs PyYAML."""
        out = {k: list(v) if isinstance(v, tuple) else v for k, v in self.dict().items()}
        text: str = _yaml().dump(out, width=120)
        return text

    @classmethod
    def from_yaml(cls, yaml_str: str) -> ScaledQuantDescriptor:
        """Build a descriptor from the text that `to_yaml` wrote.

        Raises:
            TypeError: The text is not a mapping, or has an unknown key or a value of another type.
            ValueError: The text is not YAML, or a value is out of range.
        """
        yaml = _yaml()
        try:
            values = yaml.safe_load(yaml_str)
        except (yaml.YAMLError, ValueError, TypeError, RecursionError) as error:
            reason = " ".join(str(error).split())[:200]
            raise ValueError(f"a descriptor's YAML cannot be read: {reason}") from error
        if not isinstance(values, dict):
            raise TypeError(f"a descriptor in YAML is a mapping, got {type(values).__name__}")
        if any(not isinstance(key, str) for key in values):
            raise TypeError(f"a descriptor in YAML has names for keys, got {list(values)}")
        if isinstance(values.get("axis"), list):
            values["axis"] = tuple(values["axis"])
        return cls(**values)


def _yaml() -> Any:
    try:
        import yaml
    except ImportError as error:
        raise ImportError("YAML descriptors need PyYAML: pip install pyyaml") from error
    return yaml


QuantDescriptor = ScaledQuantDescriptor
