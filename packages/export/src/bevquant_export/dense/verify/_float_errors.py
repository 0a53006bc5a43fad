"""Rounding errors of float functions, found by random rounding."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Collection, Mapping
from contextlib import suppress
from types import MappingProxyType
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional

from bevquant_export.dense._source import QdqProgram, inputs_of
from bevquant_export.dense.nodes._graph import Array
from bevquant_export.dense.verify._rounding_boundary import UNIT, per_channel
from bevquant_graph import op_spec, refilled
from bevquant_int8sim import dequantize
from bevquant_int8sim.program import (
    ROUNDINGS,
    Add,
    Conv,
    ConvTranspose,
    Dense,
    Float8Layer,
    FloatCall,
    Integers,
    LayoutCall,
    Linear,
    Matmul,
    MaxPool,
    Program,
    Ref,
    Resize,
    Sample,
    Step,
    exact_samples,
    replaced,
)

RUNS = 6
"""Perturbed runs for a first estimate."""
_POOL = 1 << 16
_DRAWN = 1 << 25  # random numbers at most; larger tensors take them several times
_MOST = 1 << 27  # values of one step in all runs at a time: half a GiB
_ONE = torch.ones(())
_UNITS = 2  # a function's own steps each round
_DEVIATIONS = 4.0
_EFFECTS = 1.5  # times the largest: a swap of two near-equal scores is rare, and not normal
# Of norms: how many values one variance is summed from.
_TERMS: dict[str, Callable[..., int]] = {
    "group_norm": lambda x, groups, *_: x[0].numel() // groups,
    "instance_norm": lambda x, *_: x[0, 0].numel(),
    "layer_norm": lambda x, shape, *_: math.prod(shape),
}
# How many terms a sum has, of its result and its operands. On magnitudes each gives theirs.
_SUMS: dict[str, Callable[..., float]] = {
    **dict.fromkeys(
        ("sum", "mean", "var", "std"), lambda result, x, *_: x.numel() / max(result.numel(), 1)
    ),
    **dict.fromkeys(("matmul", "bmm", "mm", "linear"), lambda _, x, *__: x.shape[-1]),
}

# Runtimes compute these from a sum that cancels, σ(x) from the odd function σ(x) − 1/2: rounding of
# the sum is left, times a magnitude. Those of one operator compute in float32 in any file.
_CANCELLING: dict[str, Callable[..., Tensor]] = {
    "sigmoid": lambda x: torch.ones_like(x),
    "silu": lambda x: x,  # x·σ(x)
    "glu": lambda x, axis=-1: x.chunk(2, axis)[0],
    **dict.fromkeys(("elu", "celu", "selu"), lambda x, *_: (x < 0).to(x)),  # exp(x) − 1
    "gelu": lambda x, **_: x.clamp(max=0),  # x·(1 + erf(x/√2))/2
}


class FloatErrors:
    r"""Runs float functions with randomly rounded operands and results.

    A softmax, a norm, an attention or a sum loses digits where its terms cancel, and no formula
    covers all of them. Stochastic arithmetic does (J. Vignes, A stochastic arithmetic for reliable
    scientific computation, 1993): each float x that a function reads or computes becomes

    .. math:: x\,(1 + 2 u r), \quad r \text{ uniform in } [-1, 1)

    with u = 2⁻¹¹ in half precision and 2⁻²⁴ else, constants and downstream values alike, six times
    beside one run of the program, or beside several where that would take much memory. The error is
    four times the root mean square of the effect, and 1.5 times the largest effect at least.
    Integers are not perturbed: each piece of a file reads the model's. Float results of layers are
    perturbed by the spread of their sums (`_deviations`), which rounding of the result does not
    show where terms cancel, float sums and products by theirs, as runtimes add in orders of their
    own, and sums of integers by those of their terms. The random numbers are the same for each
    file.

    `wanted` are values whose errors are requested; those of integers are zero. `sizes` are the
    numbers of values of the program's tensors. `values` and `errors` are of the same shapes, for
    values that exist in every run.
    """

    def __init__(
        self,
        program: Program,
        wanted: Collection[str] = (),
        *,
        half: bool,
        sizes: Mapping[str, int] = MappingProxyType({}),
    ) -> None:
        self._program, self._half, self._sizes = program, half, sizes
        self._unit = _UNITS * (2.0**-11 if half else UNIT)
        self.runs = Counter[str]()  # of each value
        self.only(wanted)
        self._random, self._pool = np.random.default_rng(0), torch.empty(2, 0)
        self._moved: dict[str, list[Any]] = {}  # the perturbed values
        self._squares: dict[str, Tensor] = {}
        self._largest: dict[str, Tensor] = {}
        self._lost: set[str] = set()
        self._spreads: dict[str, Tensor] = {}  # of accumulators that are added
        self.values: dict[str, Array] = {}
        self.errors: dict[str, Array] = {}

    def only(self, wanted: Collection[str]) -> None:
        """Follow these values alone in further runs."""
        self._wanted, needed = set(wanted), set(wanted)
        self._last: dict[str, str] = {}  # what is read to the result of its last reader
        self._calls: set[str] = set()
        self._end = ""  # of the last step that is followed
        for step in reversed(self._program.steps):
            if not self._end and needed.intersection(step.outputs):
                self._end = step.outputs[0]
            floats = self._program.values[step.outputs[0]].form == "float"
            samples = isinstance(step, Sample) and floats
            if needed.intersection(step.outputs) and (samples or _is_call(step)):
                self._calls.add(step.outputs[0])
                needed.update(step.inputs)
                for name in step.inputs:
                    self._last.setdefault(name, step.outputs[0])
        self._added = {
            name
            for step in self._program.steps
            if isinstance(step, Add) and step.outputs[0] in needed
            for name in step.inputs
            if self._program.values[name].form == "int32"
        }
        self._most = max((self._sizes.get(name, 1) for name in needed), default=1)

    def run(self, integer: QdqProgram, args: Any, count: int = RUNS) -> None:
        """Add `count` perturbed runs on `args`, a multiple of six, beside runs of the model."""
        at_once = (many for many in (count, RUNS, 3, 2) if many * self._most <= _MOST)
        self._beside = range(next(at_once, 1))
        for _ in range(0, count, len(self._beside)):
            for name, value in inputs_of(self._program, args):
                self._take(name, value, [value for _ in self._beside])
            with suppress(_Complete):
                integer.run(args, observe=self._see)
            self.runs.update(dict.fromkeys(self._wanted, len(self._beside)))
        for name in (self._squares.keys() & self._wanted) - self._lost:
            deviation = (self._squares[name] / self.runs[name]).sqrt()
            error = torch.maximum(_DEVIATIONS * deviation, _EFFECTS * self._largest[name])
            self.errors[name] = error.cpu().numpy()

    def _see(self, step: Step, given: tuple[Any, ...], made: tuple[Any, ...]) -> None:
        if step.outputs[0] in self._calls:
            moved = [self._called(step, number) for number in self._beside]
        elif isinstance(step, Add | Dense | Matmul):
            moved = self._summed(step, given, made)
        else:
            moved = [made for _ in self._beside]
        for name, value, *others in zip(step.outputs, made, *moved, strict=False):
            self._take(name, value, others)
        for name in step.inputs:
            if self._last.get(name) == step.outputs[0]:
                self._moved.pop(name, None)
        if step.outputs[0] == self._end:
            raise _Complete

    def _take(self, name: str, value: Any, moved: list[Any]) -> None:
        # Sizes downstream are those of the rows that the model chose.
        other = [_is_other_rows(value, one) for one in moved]
        if name in self._last or name in self._wanted:
            pairs = zip(moved, other, strict=True)
            moved = [value if chosen else _defined(value, one) for one, chosen in pairs]
        if name in self._last:
            self._moved[name] = moved
        if name in self._wanted and any(other):  # rounding chose other rows
            self._lost.add(name)
        elif name in self._wanted and isinstance(value, Tensor):
            for one in moved:
                effect = one.float().sub(value).abs_()
                if name not in self._squares:
                    self._squares[name], self._largest[name] = effect.square(), effect
                else:
                    self._squares[name].addcmul_(effect, effect)
                    torch.maximum(self._largest[name], effect, out=self._largest[name])
            self.values[name] = value.cpu().numpy()

    def _called(self, step: Step, number: int) -> tuple[Any, ...]:
        """Result of a step on one set of perturbed inputs.

        Samples are in real arithmetic, as a file has them.
        """
        if isinstance(step, Sample):
            given = [self._moved[ref.name][number] for ref in step.args]
            samples = exact_samples(step.op, given, step.kwargs) * step.scale
            return ((samples.clamp(min=0) if step.relu else samples).float(),)
        call: Any = step.target
        called = "" if isinstance(call, nn.Module) else op_spec(call).name
        rounded = self._rounded if isinstance(step, FloatCall) else (lambda value: value)
        # Sampling positions of a resize are rounded too.
        resizes = "upsample" in called or step.kwargs.get("mode") == "bilinear"
        read = (lambda value: self._shifted(rounded(value))) if resizes else rounded
        args, kwargs = replaced(
            (step.args, dict(step.kwargs)), lambda ref: read(self._moved[ref.name][number])
        )
        # Whole exponents are not perturbed: (−3)² is real.
        if called in ("pow", "float_power") and isinstance(step.args[1], Ref):
            exponent = self._moved[step.args[1].name][number]
            args = (args[0], torch.where(exponent == exponent.round(), exponent, args[1]))
        if isinstance(call, Float8Layer):
            return self._summed_float8(call, args)
        result = rounded(call(*args, **kwargs))
        if called in _SUMS and isinstance(result, Tensor) and result.is_floating_point():
            result = self._reordered(result, called, call, args, kwargs)
        # The n terms of a norm's variance may be summed one by one.
        if terms := _TERMS.get(called):
            result = self._rounded(result, math.sqrt(terms(*args)) * UNIT)
        if magnitude := _CANCELLING.get(called):
            unit = 2 * self._unit if called == "gelu" else UNIT
            factor = magnitude(*args, **kwargs)
            result = torch.addcmul(result, factor, self._noise(result).to(factor), value=unit)
        return (result,) if len(step.outputs) == 1 else tuple(result)

    def _reordered(self, result: Tensor, called: str, call: Any, args: Any, kwargs: Any) -> Tensor:
        """A sum of n floats in another order: off by √n·2⁻²⁴ of the sum of their magnitudes."""
        spread = math.sqrt(3 * _SUMS[called](result, *args)) * UNIT
        if called in ("var", "std"):  # of squares: the result is their magnitude
            sizes = result
        else:
            sizes = call(*(v.abs() if isinstance(v, Tensor) else v for v in args), **kwargs)
        return torch.addcmul(result, sizes, self._noise(result), value=spread)

    def _summed(
        self, step: Add | Dense | Matmul, given: tuple[Any, ...], made: tuple[Any, ...]
    ) -> list[tuple[Any, ...]]:
        """Results of a layer, product or sum with perturbed terms; zeros of a ReLU stay zero."""
        name = step.outputs[0]
        form, to = (self._program.values[n].form for n in (step.inputs[0], name))
        if name in self._added and isinstance(step, Dense) and isinstance(form, Integers):
            self._spreads[name] = _deviations(step, given[0], form)
        read = name in self._last or name in self._wanted
        if not read or to != "float":
            return [made for _ in self._beside]
        if isinstance(step, Add):
            spread = self._of_terms(step, given) * (made[0] != 0)
        elif not isinstance(form, Integers):
            return [made for _ in self._beside]
        elif isinstance(step, Matmul):
            terms = given[0].shape[-1]
            spread = step.magnitudes(given) * (step.scale * math.sqrt(terms) * UNIT)
        else:
            spread = _deviations(step, given[0], form)
            if self._half and isinstance(step, ConvTranspose):
                # Its factors are in half precision: n errors of 2⁻¹¹ of the products.
                spread = self._unit * (spread / (_terms(step) * UNIT) + made[0].abs())
            spread = spread * (made[0] != 0)
        # Uniform numbers up to √3 have a spread of 1.
        spread = spread * 3**0.5
        return [(made[0] + spread * self._noise(spread),) for _ in self._beside]

    def _of_terms(self, step: Add, given: tuple[Any, ...]) -> Tensor:
        """Spread of a sum whose terms are rounded to floats before they are added."""
        squares = torch.zeros(())
        for name, operand, scale in zip(step.inputs, given, step.scales, strict=True):
            term = dequantize(operand, scale, axis=step.axis)
            squares = squares + (term * (self._unit / 3**0.5)).square()
            if name in self._spreads:
                squares = squares + self._spreads[name].square()
        return squares.sqrt()

    def _summed_float8(self, layer: Float8Layer, args: tuple[Any, ...]) -> tuple[Any, ...]:
        """Result of an FP8 layer with perturbed sums: by √n·2⁻²⁴ of the magnitudes.

        Transposed convolutions have factors in half precision, where other floats are.
        """
        made = layer(*args)
        made, *others = made if isinstance(made, tuple) else (made,)
        size = layer.bound(*args, bits=1) / (layer.products + 3)
        spread = size * (math.sqrt(layer.products) * UNIT)
        if self._half and layer.op == "conv_transpose":
            spread = self._unit * (size / math.sqrt(layer.products) + made.abs())
        return (made + (spread * 3**0.5 * self._noise(spread)).to(made), *others)

    def _shifted(self, value: Any) -> Any:
        """Result of a resize at perturbed positions, whose magnitude is the map's size."""
        if not isinstance(value, Tensor):  # a size that is computed
            return value
        for axis in range(2, value.dim()):
            last = value.shape[axis] - 1
            step = value.diff(dim=axis, append=value.narrow(axis, last, 1))
            value = value + _UNITS * UNIT * (last + 1) * self._noise(value) * step
        return value

    def _rounded(self, value: Any, unit: float | None = None) -> Any:
        if isinstance(value, list | tuple):
            return refilled(type(value), [self._rounded(item, unit) for item in value])
        if not isinstance(value, Tensor) or not value.is_floating_point():
            return value
        if unit is None:
            return value * self._part(value, 1)
        return value * torch.add(_ONE, self._noise(value), alpha=unit)

    def _noise(self, value: Tensor) -> Tensor:
        """Random numbers in [-1, 1), of the shape of a tensor and on its device; read only."""
        return self._part(value, 0)

    def _part(self, value: Tensor, row: int) -> Tensor:
        """Numbers of a row of the pool, random ones r or 1 + 2ur, at a random place.

        To draw each number takes most of the time.
        """
        count = value.numel()
        if count > _DRAWN:
            parts = [self._part(part, row) for part in value.reshape(-1).split(_DRAWN)]
            return torch.cat(parts).view(value.shape)
        if self._pool.shape[1] < count + _POOL:
            self._pool = torch.empty(2, 0)  # of the old one nothing is held
            self._pool = torch.empty(2, count + 2 * _POOL)
            drawn, factors = self._pool
            # numpy's take half of the time of torch's.
            self._random.random(dtype=np.float32, out=drawn.numpy())
            torch.add(_ONE, drawn.mul_(2).sub_(1), alpha=self._unit, out=factors)
        start = int(self._random.integers(self._pool.shape[1] - count + 1))
        return self._pool[row, start : start + count].view(value.shape).to(value.device)


class _Complete(Exception):
    """Ends a run of the program: no later step is followed."""


def _defined(value: Any, moved: Any) -> Any:
    """Outside of a function's domain, as √(1 − x²) at x = 1, the result is the model's."""
    if moved is value or not isinstance(moved, Tensor):
        return moved
    # A sum is NaN where a value is, and takes a tenth of the time of a search.
    return torch.where(moved.isnan(), value, moved) if moved.sum().isnan() else moved


def _is_other_rows(value: Any, moved: Any) -> bool:
    both = isinstance(value, Tensor) and isinstance(moved, Tensor)
    return both and value.shape != moved.shape


def _is_call(step: Step) -> bool:
    refs: list[Any] = []
    replaced((step.args, dict(step.kwargs)), refs.append)
    called = step.target is not None and step.target not in ROUNDINGS
    calls = isinstance(step, FloatCall | LayoutCall | MaxPool | Resize)
    return calls and called and all(isinstance(ref, Ref) for ref in refs)


def _deviations(step: Dense, x: Tensor, form: Integers) -> Tensor:
    r"""Spread of a layer's float32 sums about the exact ones, for every output.

    .. math:: \sqrt n\, 2^{-24} \sum_i |x_i w_i|

    This is a fourth of the error that `RoundingBoundary` allows for a sum of n products, bias
    included. Standard deviations, float32, of the output's shape.
    """
    weight = step.weight.float().abs()
    size = x.float().abs()  # of -128 too
    if isinstance(step, Linear):
        sums = functional.linear(size, weight)
    elif isinstance(step, Conv):
        sides = [side for pair in reversed(step.padding) for side in pair]
        convolution: Any = getattr(functional, f"conv{weight.dim() - 2}d")
        settings = {"stride": step.stride, "dilation": step.dilation, "groups": step.groups}
        sums = convolution(functional.pad(size, sides), weight, **settings)
    else:
        assert isinstance(step, ConvTranspose)
        sums = functional.conv_transpose2d(
            size, weight, None, step.stride, step.padding, step.output_padding, step.groups,
            step.dilation,
        )  # fmt: skip
    unit = torch.from_numpy(per_channel(step, form).copy())
    beside = (1,) * (weight.dim() - 2)
    sums = sums * unit.to(sums).view(-1, *beside)
    if step.bias is not None:
        bias = step.bias.abs()
        bias = bias if bias.is_floating_point() else bias * unit.to(bias.device)
        sums = sums + bias.to(sums).view(-1, *beside)
    return sums * (math.sqrt(_terms(step)) * UNIT)


def _terms(step: Dense) -> int:
    """The largest number of products in a sum of a layer."""
    shape = step.weight.shape
    if isinstance(step, ConvTranspose):
        return math.prod(shape) // shape[1] // step.groups
    return math.prod(shape[1:])
