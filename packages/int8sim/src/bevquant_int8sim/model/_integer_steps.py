"""Steps on integers: quantization, sums, products, pooling and sampling."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Annotated, Any, ClassVar, Literal

import torch
from msgspec import Meta
from torch import Tensor

from bevquant_int8sim._elementwise import rounded_sum
from bevquant_int8sim._matmul import exact_product
from bevquant_int8sim._quantize import dequantize, requantize
from bevquant_int8sim._rounding import Rounding, round_float
from bevquant_int8sim._sample import attention_sums, grid_sums
from bevquant_int8sim._scales import integer_range
from bevquant_int8sim.model._form import FLOAT, Form, Integers
from bevquant_int8sim.model._grid_operations import average, average_pool, max_pool, resize
from bevquant_int8sim.model._rowwise import add, dequantized, quantized, requantized
from bevquant_int8sim.model._step import Given, Step

Positive = Annotated[float, Meta(gt=0, le=1.7976931348623157e308)]
Axis = Annotated[int, Meta(ge=-8, le=7)]
Arithmetic = Literal["float64", "fixed_point"]


@dataclass(frozen=True, eq=False, kw_only=True)
class Rounds(Step):
    """A step that rounds."""

    # Rounding of stored integers, see `requantize`.
    rounding: Rounding = "half_even"
    # Multiplication of accumulators and sums, see `requantize`.
    arithmetic: Arithmetic = "float64"

    @property
    def is_default(self) -> bool:
        """Whether it rounds half to even, in float64."""
        return self.rounding == "half_even" and self.arithmetic == "float64"


@dataclass(frozen=True, eq=False, kw_only=True)
class Stored(Step):
    """A step that stores a result in a form."""

    # Form of the result: integers, accumulators or floats.
    form: Form
    # Whether the result includes a ReLU.
    relu: bool = False
    # Upper limit in units of the form, as of a ReLU6.
    ceiling: int | float | None = None  # a float would make floats of integers

    # Kinds of forms that it can make.
    rounds_to: ClassVar[tuple[type[Any], ...]] = (Integers, str)

    def _compute(self, args: Given, kwargs: dict[str, Any], backend: str) -> Given:
        """The outputs without the limits of the form, see `run`."""
        raise NotImplementedError

    def run(self, args: Given, kwargs: dict[str, Any], backend: str) -> Given:
        """The outputs."""
        made = self._compute(args, kwargs, backend)
        floor = self.floor
        if floor is None and self.ceiling is None:
            return made
        return (made[0].clamp(floor, self.ceiling), *made[1:])

    def check(self) -> None:
        """Check the type of the form, the limits and the factors."""
        super().check()
        form = self.form
        if not isinstance(form, self.rounds_to):
            raise ValueError(f"{self.op} does not make {form}")
        if isinstance(form, Integers) and not form.full:
            if self.ceiling is None or self.ceiling > form.high:
                raise ValueError(f"{self.op} stores up to {self.ceiling}, of {form!r}")
        for name, factors in self.tensors.items():
            if name.startswith(("multiplier", "scale")):
                if factors.dtype != torch.float64:
                    raise ValueError(f"{name} is {factors.dtype}, expected torch.float64")
                if not bool(((factors > 0) & factors.isfinite()).all()):
                    raise ValueError(f"{name} is not positive and finite everywhere")

    @property
    def clamps(self) -> tuple[bool, float | None]:
        """Whether the stored result includes a ReLU, and its ceiling in units of the form."""
        return self.relu, self.ceiling

    @property
    def floor(self) -> int | None:
        """Lower limit of integers that do not fill their type, as around a zero point."""
        form = self.form
        return form.low if isinstance(form, Integers) and not form.full else None

    @property
    def integers(self) -> Integers:
        """The form of stored integers."""
        if not isinstance(self.form, Integers):
            raise ValueError(f"{self.where}: {self.op} makes integers, not {self.form}")
        return self.form


@dataclass(frozen=True, eq=False, kw_only=True)
class Quantize(Stored, Rounds):
    """q = clamp(round(x / s)) of floats."""

    op = "quantize"
    reads = (1, 1)
    rounds_to = (Integers,)

    def _compute(self, args: Given, kwargs: dict[str, Any], backend: str) -> Given:
        form = self.integers
        q = quantized(
            args[0], form.scale, bits=form.bits, narrow=form.narrow, rounding=self.rounding,
            name=self.where,
        )  # fmt: skip
        return (q.clamp_(min=0) if self.relu else q,)


@dataclass(frozen=True, eq=False, kw_only=True)
class Requantize(Stored, Rounds):
    """q_y = clamp(round(q · multiplier)) of accumulators or integers."""

    # S_x / s_y, float64: a number or one per channel.
    multiplier: Tensor
    axis: Axis = -1

    op = "requantize"
    reads = (1, 1)
    rounds_to = (Integers,)

    def _compute(self, args: Given, kwargs: dict[str, Any], backend: str) -> Given:
        form = self.integers
        q = requantized(
            args[0], self.multiplier, self.axis, bits=form.bits, narrow=form.narrow,
            relu=self.relu, rounding=self.rounding, arithmetic=self.arithmetic, name=self.path,
        )  # fmt: skip
        return (q,)


@dataclass(frozen=True, eq=False, kw_only=True)
class Dequantize(Stored):
    """x = q · scale, in float32."""

    form: Form = FLOAT
    # Float64: a number or one per channel.
    scale: Tensor
    axis: Axis = -1

    op = "dequantize"
    reads = (1, 1)

    def _compute(self, args: Given, kwargs: dict[str, Any], backend: str) -> Given:
        return (dequantized(args[0], self.scale, self.axis, relu=self.relu),)


@dataclass(frozen=True, eq=False, kw_only=True)
class Relu(Stored):
    """A ReLU of integers, in their own form."""

    relu: bool = True

    op = "relu"
    reads = (1, 1)

    def _compute(self, args: Given, kwargs: dict[str, Any], backend: str) -> Given:
        return (args[0].clamp(min=0),)


@dataclass(frozen=True, eq=False, kw_only=True)
class Add(Stored, Rounds):
    """Σ q_i·s_i, rounded once to integers, or in floats.

    Operands of one scale: round((Σ q)·s/s_y); of several: round(Σ q_i·(s_i/s_y)).
    """

    # S of each operand, float64: a number or one per channel.
    scales: tuple[Tensor, ...] = ()
    axis: Axis = -1

    op = "add"
    reads = (1, 64)
    operands = 64

    def _compute(self, args: Given, kwargs: dict[str, Any], backend: str) -> Given:
        if not isinstance(self.form, Integers):
            return (self._floats(args),)
        scale, scales = self.form.scale, self.scales
        low, high = integer_range(self.form.bits, self.form.narrow)
        low = 0 if self.relu else low
        factors = [each / scale for each in scales]
        if not self.is_default:
            rounding: dict[str, Any] = {"rounding": self.rounding, "arithmetic": self.arithmetic}
            q = rounded_sum(args, factors, self.axis, name=self.path, **rounding)
            return (q.clamp_(low, high).to(self.form.dtype),)
        # Equal scales: the sum is exact, and one product is rounded.
        if all(s.dim() == 0 and float(s) == float(scales[0]) for s in scales):
            ones = [torch.ones((), dtype=torch.float64)] * len(args)
            return (add(list(args), ones, float(scales[0] / scale), self.axis, low, high),)
        return (add(list(args), factors, 1.0, self.axis, low, high),)

    def _floats(self, args: Given) -> Tensor:
        values = torch.zeros((), dtype=torch.float64)
        for operand, scale in zip(args, self.scales, strict=True):
            values = values + dequantize(operand, scale, axis=self.axis, dtype=torch.float64)
        return (values.clamp_(min=0) if self.relu else values).float()

    def check(self) -> None:
        """Check that each operand has a scale."""
        if len(self.scales) != len(self.args):
            raise ValueError(f"{len(self.scales)} scales of {len(self.args)} operands")
        super().check()


@dataclass(frozen=True, eq=False, kw_only=True)
class WeightedSum(Stored, Rounds):
    """Weighted sums of one tensor's integers, with weights that are not quantized; a base."""

    scale: Positive

    named = True

    @property
    def multiplier(self) -> float:
        """s_x / s_y of stored integers."""
        return self.scale / self.integers.scale


@dataclass(frozen=True, eq=False, kw_only=True)
class AvgPool(WeightedSum):
    """Averages over windows; `kwargs` are those of torch's pooling."""

    op = "avg_pool"
    reads = (1, 1)

    def _compute(self, args: Given, kwargs: dict[str, Any], backend: str) -> Given:
        form = self.form
        if not isinstance(form, Integers):
            values = average(args[0].double(), **kwargs) * self.scale
            return ((values.clamp_(min=0) if self.relu else values).float(),)
        if form.dtype == args[0].dtype:
            q = average_pool(args[0], self.multiplier, rounding=self.rounding, **kwargs)
        else:
            values = average(args[0].double(), **kwargs) * self.multiplier
            q = round_float(values, self.rounding)
        return (q.clamp_(0 if self.relu else form.low, form.high).to(form.dtype),)


@dataclass(frozen=True, eq=False, kw_only=True)
class Sample(WeightedSum):
    """Samples at positions that stay floats; a base."""

    def _sums(self, args: Given, kwargs: dict[str, Any]) -> tuple[Tensor, int]:
        """Sums int32, and how many of their bits are a fraction."""
        raise NotImplementedError

    def _compute(self, args: Given, kwargs: dict[str, Any], backend: str) -> Given:
        sums, bits = self._sums(args, kwargs)
        form = self.form
        if not isinstance(form, Integers):
            scale = torch.tensor(self.scale / 2**bits, dtype=torch.float64)
            return (dequantized(sums, scale, -1, relu=self.relu),)
        q = requantize(
            sums, self.multiplier / 2**bits, bits=8 if form.dtype == torch.int8 else 16,
            relu=self.relu, rounding=self.rounding, arithmetic=self.arithmetic, name=self.where,
        )  # fmt: skip
        return (q.clamp_(form.low, form.high),)


@dataclass(frozen=True, eq=False, kw_only=True)
class GridSample(Sample):
    """`int8_grid_sample`; `kwargs` are its settings."""

    op = "grid_sample"
    reads = (2, 2)

    def _sums(self, args: Given, kwargs: dict[str, Any]) -> tuple[Tensor, int]:
        return grid_sums(*args, **kwargs, name=self.where)


@dataclass(frozen=True, eq=False, kw_only=True)
class DeformableAttention(Sample):
    """`int8_deformable_attention`."""

    op = "deformable_attention"
    reads = (5, 5)

    def _sums(self, args: Given, kwargs: dict[str, Any]) -> tuple[Tensor, int]:
        return attention_sums(*args, name=self.where)


@dataclass(frozen=True, eq=False, kw_only=True)
class Matmul(Step):
    """Products of two tensors of integers: exact sums, times s in float64, stored as float32.

    Attributes:
        scale: s = s_a·s_b.
        equation: Of `torch.einsum`; empty for the rules of `torch.matmul`.
    """

    scale: Positive
    equation: str = ""

    op = "matmul"
    reads = (2, 2)
    operands = 2

    def run(self, args: Given, kwargs: dict[str, Any], backend: str) -> Given:
        """The products."""
        sums = exact_product(args[0], args[1], self.equation)
        return ((sums.double() * self.scale).float(),)

    def magnitudes(self, args: Given) -> Tensor:
        """Σ|a·b| in units of `scale`, float32: sums of floats are off by a share of it."""
        a, b = (value.double().abs() for value in args)
        return exact_product(a, b, self.equation).float()


@dataclass(frozen=True, eq=False)
class MaxPool(Step):
    """Maximum over windows, of integers or floats; `kwargs` are those of torch's pooling."""

    op = "max_pool"
    reads = (1, 1)
    named = True

    def run(self, args: Given, kwargs: dict[str, Any], backend: str) -> Given:
        """The maxima."""
        return (max_pool(*args, **kwargs),)

    @property
    def target(self) -> Callable[..., Any] | None:
        """The function of `args` and `kwargs`."""
        return max_pool


@dataclass(frozen=True, eq=False, kw_only=True)
class Resize(Rounds):
    """Nearest or bilinear resizing, of integers or floats; `kwargs` are those of `interpolate`."""

    op = "resize"
    reads = (1, 1)
    named = True

    def run(self, args: Given, kwargs: dict[str, Any], backend: str) -> Given:
        """The resized map."""
        return (resize(*args, **{**kwargs, "rounding": self.rounding}),)

    @property
    def target(self) -> Callable[..., Any] | None:
        """The function of `args` and `kwargs`, on floats."""
        return resize
