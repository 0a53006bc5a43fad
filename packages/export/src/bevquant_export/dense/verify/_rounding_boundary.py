"""Ties among differences: one step apart, where float32 cannot decide the nearer step."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional

from bevquant_export.dense.nodes._graph import Array
from bevquant_export.dense.nodes._profile import Profile
from bevquant_int8sim.program import (
    Add,
    AvgPool,
    Conv,
    ConvTranspose,
    Dense,
    Integers,
    Linear,
    Program,
    Quantize,
    Ref,
    Requantize,
    Resize,
    Sample,
    Step,
    Weighted,
    WeightedSum,
    exact_samples,
    sampling_error,
)

UNIT = 2.0**-24  # largest relative error of one rounding to float32
_ROUNDINGS = 8  # of a rescaled value: sum, three scales, their product and quotient, the result
_LEVELS = 256  # of OpenVINO's FakeQuantize, which rounds (x - low) / (high - low) · levels
_HALVES = 4 * 2.0**-11  # of a float tensor in half precision, two operations behind integers
_SPREAD = 4.0  # standard deviations of a float32 sum's error
_MOST, _AT_ONCE = 100_000, 2048


@dataclass(frozen=True)
class _Real:
    """Values in their own unit, float64, and their distance from float32 results."""

    value: Array
    error: Array


class RoundingBoundary:
    r"""Recomputes the real values of integers, by sums of its own.

    An integer model rounds a real number v, in float64, to the nearest integer. A runtime has v in
    float32: onnxruntime's QLinearConv takes float32(Σ q_x q_w) · float32(s_x s_w / s_y). Two such
    integers may differ only where v lies between them,

    .. math:: |v - (k + \tfrac12)| \le 8 \cdot 2^{-24} |v|

    and nowhere else; in OpenVINO, which counts levels from the lowest value, |v| + 256 stands for
    |v| here. Where a file runs in float, a sum of n products rounds each of them too, by 4·√n·2⁻²⁴
    of the sum of their magnitudes (N. Higham and T. Mary, A new approach to probabilistic rounding
    error analysis, 2019). `FloatErrors` finds the errors of float functions, such as x·(1 +
    erf(x/√2))/2.

    Args:
        program: Its steps and forms.
        values: Integers by name, and floats that are quantized.
        errors: Largest errors of floats by the functions that make them; other floats have none.
        profile: The file's.
    """

    def __init__(
        self,
        program: Program,
        values: Mapping[str, Array],
        errors: Mapping[str, Array],
        profile: Profile,
    ) -> None:
        self._forms = {name: value.form for name, value in program.values.items()}
        self._makers = {name: step for step in program.steps for name in step.outputs}
        self._values, self._errors, self._profile = values, errors, profile

    def reads(self, name: str) -> set[str]:
        """Values from which `count` computes a value again."""
        step = self._makers.get(name)
        found: set[str] = set()
        for read in step.inputs if step else ():
            maker = self._makers.get(read)
            # A sum of accumulators is computed from what their layers read.
            found.update(maker.inputs if self._forms.get(read) == "int32" and maker else (read,))
        return found

    def rounds_floats(self, name: str) -> bool:
        """Whether a value is rounded from floats, which functions may have computed."""
        step = self._makers.get(name)
        if not isinstance(step, Quantize | Add | Sample):
            return False
        return any(self._forms[read] == "float" for read in step.inputs)

    def count(self, name: str, places: Array, borders: Array, shape: tuple[int, ...]) -> int:
        """Number of values, different by one step, that are ties.

        `places` are their positions, [values, axes], `borders` half of the sum of the two integers
        there, without zero points.
        """
        form, step = self._forms.get(name), self._makers.get(name)
        if not isinstance(form, Integers) or step is None:
            return 0
        found = 0
        sums = not isinstance(step, Resize | WeightedSum)  # which are computed as a whole
        at_once = _AT_ONCE if sums else len(places) or 1
        for start in range(0, len(places), at_once):
            if start >= _MOST and found < start:
                break  # some are no ties: further ones change no verdict
            at = places[start : start + at_once]
            real = self._made(step, form, at, shape)
            if real is None:
                return 0
            border = borders[start : start + at_once]
            value = real.value / form.scale
            size = np.abs(value) + (_LEVELS if self._profile.runner == "openvino" else 0)
            slack = real.error / form.scale + _ROUNDINGS * UNIT * size
            found += int(np.count_nonzero(np.abs(value - border) <= slack))
        return found

    def _made(
        self, step: Step, form: Integers, places: Array, shape: tuple[int, ...]
    ) -> _Real | None:
        """The real value that a step rounds to integers; None where unknown here."""
        refs = [arg for arg in step.args if isinstance(arg, Ref)]
        if len(refs) != len(step.args) or not refs:
            return None
        if isinstance(step, Sample):
            return self._sampled(step, [ref.name for ref in refs], places, shape)
        if isinstance(step, Dense) and len(refs) == 1:
            return self._layer(step, places)
        if isinstance(step, Quantize | Requantize) and len(refs) == 1:
            return self._read(refs[0].name, places, shape)
        if isinstance(step, Resize) and len(refs) == 1:
            return self._resized(step, places, shape)
        if isinstance(step, AvgPool) and len(refs) == 1:
            return self._averaged(step, places, shape)
        if step.called == "Where" and len(refs) == 3:
            mask, one, two = (self._read(ref.name, places, shape) for ref in refs)
            if mask is None or one is None or two is None:
                return None
            first = mask.value != 0
            value, error = (
                np.where(first, one.value, two.value),
                np.where(first, one.error, two.error),
            )
            return _Real(value, error)
        if not isinstance(step, Add):
            return None
        parts = [self._read(ref.name, places, shape) for ref in refs]
        known = [part for part in parts if part is not None]
        if len(known) < len(parts):
            return None
        scales = [form.scale, *(self._scale(ref.name) for ref in refs)]
        size = np.sum([np.abs(part.value) for part in known], axis=0)
        size = size + self._profile.zero * sum(scales)
        error = np.sum([part.error for part in known], axis=0) + _ROUNDINGS * UNIT * size
        return _Real(np.sum([part.value for part in known], axis=0), error)

    def _read(self, name: str, places: Array, shape: tuple[int, ...]) -> _Real | None:
        """A value that a step reads."""
        maker = self._makers.get(name)
        if self._forms[name] == "int32":
            layer = isinstance(maker, Dense) and len(maker.args) == 1
            return self._layer(maker, places) if layer and isinstance(maker, Dense) else None
        if name not in self._values:
            return None
        try:
            values = np.broadcast_to(self._values[name], shape)
        except ValueError:
            return None
        read = values[tuple(places.T)] * self._scale(name)
        half = self._profile.half and not isinstance(self._forms[name], Integers)
        error = (_HALVES if half else 2 * UNIT) * np.abs(read)
        if name in self._errors:
            error = error + np.broadcast_to(self._errors[name], shape)[tuple(places.T)]
        return _Real(read, error)

    def _resized(self, step: Step, places: Array, shape: tuple[int, ...]) -> _Real | None:
        """Bilinear resizing by torch, in float64. Coordinates are float32 elsewhere."""
        name, factor = step.args[0].name, step.kwargs.get("scale_factor")
        if step.kwargs.get("mode") != "bilinear" or name not in self._values:
            return None
        factor = None if isinstance(factor, Ref) else factor
        if any(isinstance(f, Ref) for f in (factor if isinstance(factor, list | tuple) else ())):
            return None
        x = self._values[name]
        resized = functional.interpolate(
            torch.from_numpy(x).double(),
            None if factor else shape[2:],
            factor,
            "bilinear",
            align_corners=bool(step.kwargs.get("align_corners")),
        )
        farthest = max(shape[2:]) + max(x.shape[2:])
        return self._whole(name, resized, places, shape, 1 + farthest)

    def _sampled(
        self, step: Step, names: list[str], places: Array, shape: tuple[int, ...]
    ) -> _Real | None:
        """Samples in float64, with the error of positions and weights in fixed point.

        Errors of the floats that make positions count with the largest difference of two pixels.
        """
        if any(name not in self._values for name in names):
            return None
        args = [torch.from_numpy(self._values[name]) for name in names]
        made = exact_samples(step.op, args, step.kwargs)
        real = self._whole(names[0], made, places, shape, max(args[0].shape[1:]))
        if real is None:
            return None
        error = sampling_error(step.op, args, step.kwargs.get("mode", ""))
        moved = sum(float(np.max(self._errors.get(name, 0.0), initial=0.0)) for name in names[1:])
        error += moved * max(args[0].shape[1:]) * 2.0**8
        return _Real(real.value, real.error + error * self._scale(names[0]))

    def _averaged(self, step: Step, places: Array, shape: tuple[int, ...]) -> _Real | None:
        """Average pooling by torch, in float64."""
        name, given = step.args[0].name, dict(step.kwargs)
        if name not in self._values or any(isinstance(v, Ref) for v in given.values()):
            return None
        adaptive = given.get("kernel_size") is None
        pool = getattr(functional, f"{'adaptive_' if adaptive else ''}avg_pool{len(shape) - 2}d")
        x = self._values[name]
        averages = pool(
            torch.from_numpy(x).double(), **{k: v for k, v in given.items() if v is not None}
        )
        return self._whole(name, averages, places, shape, 1)

    def _whole(
        self, name: str, made: Tensor, places: Array, shape: tuple[int, ...], errors: int
    ) -> _Real | None:
        """Positions of a value computed from all of another, with `errors` times its rounding."""
        if made.shape != shape:
            return None
        read = made.numpy()[tuple(places.T)] * self._scale(name)
        most = float(np.abs(self._values[name].astype(np.int32)).max(initial=0))
        # With a zero point z, sums are made of numbers up to |q| + z.
        most += self._profile.zero
        error = _ROUNDINGS * UNIT * errors * most * self._scale(name)
        return _Real(read, np.full(len(read), error))

    def _scale(self, name: str) -> float:
        form = self._forms[name]
        return form.scale if isinstance(form, Integers) else 1.0

    def _layer(self, step: Dense, places: Array) -> _Real | None:
        x = step.args[0].name
        form, made = self._forms[x], self._forms[step.outputs[0]]
        if not isinstance(form, Integers) or x not in self._values:
            return None
        total, size, squares, terms = products_at(step, self._values[x], places)
        channels = places[:, step.channel_axis]
        unit = per_channel(step, form)[channels]
        value, largest = total * unit, size * unit
        rounded = np.zeros_like(value)
        if step.bias is not None:
            bias = step.bias.double().cpu().numpy()[channels]
            if not step.bias.is_floating_point():
                bias = bias * unit
            elif self._profile.integer_bias:
                rounded = unit / 2  # to int32, by the file or by onnxruntime itself
            value, largest = value + bias, largest + np.abs(bias)
        transposed = isinstance(step, ConvTranspose)
        integer = self._profile.integer_bias and not transposed
        # ONNX Runtime has no integer kernel with 16 bits on either side.
        integer = integer and all(
            kind.bits == 8 or kind.unsigned for kind in (form, made) if isinstance(kind, Integers)
        )
        if self._profile.runner == "openvino":  # adds the bias to rounded products of the sums
            rounded = rounded + _ROUNDINGS * UNIT * (np.abs(total * unit) + np.abs(value))
        if integer and isinstance(made, Integers):
            return _Real(value, rounded)
        if self._profile.half and transposed:  # each factor is a half
            rounded = rounded + _HALVES * (np.abs(value) + unit * np.sqrt(squares))
        return _Real(value, rounded + _SPREAD * math.sqrt(terms) * UNIT * largest)


# Sums of products of a layer, exactly, at single places


def products_at(step: Dense, x: Array, places: Array) -> tuple[Array, Array, Array, int]:
    """Sums of a layer's kernel for some of its outputs, int [places, axes].

    Neither the simulator's kernels nor a runtime's are used. Returns Σ x·w, Σ |x·w| and Σ (x·w)²,
    int64 [places], and the largest number of products in a sum.
    """
    weight = step.weight.cpu().numpy()
    if isinstance(step, Linear):
        picked = x[tuple(places[:, :-1].T)].astype(np.int64) * weight[places[:, -1]]
        return picked.sum(1), np.abs(picked).sum(1), (picked**2).sum(1), weight.shape[1]
    first, out = places[:, :1], places[:, 1]
    assert isinstance(step, Conv | ConvTranspose)
    groups, transposed = step.groups, isinstance(step, ConvTranspose)
    # Channels that an output reads: those of its group.
    each = weight.shape[0] // groups if transposed else weight.shape[1]
    outputs = weight.shape[1] if transposed else weight.shape[0] // groups
    channels = (out // outputs)[:, None] * each + np.arange(each)
    total, size, squares = (np.zeros(len(places), np.int64) for _ in range(3))
    for offset in np.ndindex(*weight.shape[2:]):
        at, inside = _read_at(step, places[:, 2:], np.asarray(offset), np.asarray(x.shape[2:]))
        values = x[(first, channels, *(axis[:, None] for axis in at.T))].astype(np.int64)
        if transposed:
            factors = weight[(channels, (out % outputs)[:, None], *offset)]
        else:
            factors = weight[(out, slice(None), *offset)]
        terms = values * factors * inside[:, None]
        total += terms.sum(1)
        size += np.abs(terms).sum(1)
        squares += (terms**2).sum(1)
    return total, size, squares, each * math.prod(weight.shape[2:])


def _read_at(
    step: Conv | ConvTranspose, places: Array, offset: Array, sizes: Array
) -> tuple[Array, Array]:
    """Input position of the kernel's entry `offset` for each output, and whether it is inside."""
    stride, dilation = np.asarray(step.stride), np.asarray(step.dilation)
    if isinstance(step, Conv):
        before = np.asarray([low for low, _ in step.padding])
        at = places * stride - before + offset * dilation
        inside = np.ones(len(places), bool)
    else:
        shifted = places + np.asarray(step.padding) - offset * dilation
        at, inside = shifted // stride, (shifted % stride == 0).all(1)
    inside &= ((at >= 0) & (at < sizes)).all(1)
    return np.clip(at, 0, sizes - 1), inside


def per_channel(step: Weighted, form: Integers) -> Array:
    """Value of one step of each output channel's sum, float64."""
    if step.weight_scale is not None:
        unit: Array = step.weight_scale.double().cpu().numpy() * form.scale
    else:
        unit = step.unit.double().cpu().numpy()
    return np.broadcast_to(unit.reshape(-1), (step.out_channels,))
