"""Sums of a row of the table, computed in pieces that fit a cache."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor

from bevquant_int8sim._backends import compiled_module
from bevquant_int8sim.model._form import Integers
from bevquant_int8sim.model._layer_table import LayerRow
from bevquant_int8sim.model._rowwise import contiguous
from bevquant_qnn import PairSums

_PAIR = len(PairSums().as_sums())
# A line of integers: four sums of each pair, then what is counted in steps.
_STEPS = "free_total free_off forced_total forced_off saturated free_largest forced_largest".split()
_FIELDS = 2 * (_PAIR - 1) + len(_STEPS)
_KEPT = ("kept_float", "kept_fake", "kept_integer")
_MATCHED = ("matched", "chosen_float", "chosen")
# Of all batches: `peak` in bits, `integers` 1 where the output is held in integers.
_COUNTS = ("values", "forced_values", *_KEPT, *_MATCHED, "peak", "integers")
_LARGEST = frozenset({*_STEPS[-2:], "peak", "integers"})
_ENERGY = 1e-4  # 40 dB: a difference below what any quantizer makes
# A quarter of a megabyte in float64. Whole feature maps would be read from memory and written back
# at each of two dozen operations.
_BLOCK = 1 << 15


def blocks(*tensors: Tensor) -> Iterator[tuple[Tensor, ...]]:
    """Tensors of one shape, flat, the same few values of each at a time."""
    flat = [tensor.detach().reshape(-1) for tensor in tensors]
    for start in range(0, flat[0].numel(), _BLOCK):
        yield tuple(values[start : start + _BLOCK] for values in flat)


def largest_steps(teacher_forced: Tensor, integer: Tensor, form: Integers) -> float:
    """``max |q − clamp(round(x / s))|`` over all values; infinite or NaN with a NaN in it."""
    if not integer.numel():
        return 0.0
    kernels = _kernels(teacher_forced) if integer.dtype == torch.int8 else None
    if kernels is not None:
        flat = _flat(teacher_forced, integer)
        return float(kernels.largest_steps(*flat, form.scale, float(form.low), float(form.high)))
    raw = (teacher_forced.double() / form.scale).round_().clamp_(form.low, form.high)
    return float((integer.double() - raw).abs().max())


def float_gaps(wanted: Tensor, got: Tensor) -> tuple[float, float, float, float]:
    """How far two tensors of floats are apart: largest gap and energy of all gaps.

    These are infinite or NaN where one is no number and the other is. Then largest value and energy
    of `wanted` where that is finite.
    """
    if not wanted.numel():
        return 0.0, 0.0, 0.0, 0.0
    kernels = _kernels(wanted, got)
    if kernels is not None:
        gaps: tuple[float, float, float, float] = kernels.float_gaps(*_flat(wanted, got))
        return gaps
    wanted, got = wanted.detach().double(), got.detach().double()
    same = (wanted == got) | (wanted.isnan() & got.isnan())
    apart = torch.where(same, torch.zeros_like(wanted), wanted - got).abs_()
    finite = torch.where(wanted.isfinite(), wanted, torch.zeros_like(wanted))
    sums = apart.max(), apart.square().sum(), finite.abs().max(), finite.square().sum()
    most, energy, top, power = (float(value) for value in sums)
    return most, energy, top, power


def alike(
    wanted: Tensor, got: Tensor, share: float, slack: float = 0.0, *, noise: bool = True
) -> bool:
    """Whether two tensors of floats are equal up to rounding.

    The allowed gap is `share` of the largest finite value of `wanted`, and `slack` beside that.
    With `noise`, noise 40 dB below `wanted` is allowed too.
    """
    if wanted.shape != got.shape:
        return False
    most, energy, top, power = float_gaps(wanted, got)
    return most <= slack + share * top or (noise and energy <= _ENERGY * power)


@dataclass(eq=False)
class LayerSums:
    """Sums of a row, batch after batch."""

    path: str
    op: str
    form: str
    why: str = ""
    fake: PairSums = field(default_factory=PairSums)  # against float, as `integer`
    integer: PairSums = field(default_factory=PairSums)
    sums: dict[str, float] = field(default_factory=lambda: dict.fromkeys((*_STEPS, *_COUNTS), 0.0))

    def add_floats(self, reference: Tensor, fake: Tensor, integer: Tensor) -> None:
        """Add one batch's float, fake-quant and integer output, all as floats."""
        if self._differ(reference, fake, integer):
            return
        self._note("values", reference.numel())
        self.fake.add(reference, fake)
        self.integer.add(reference, integer)

    def add_integers(
        self,
        reference: Tensor,
        fake: Tensor,
        teacher_forced: Tensor,
        integer: Tensor,
        form: Integers,
    ) -> None:
        """Add one batch's output that is held in integers of `form`.

        `teacher_forced` is the fake-quantized model's, given the integer model's inputs.
        """
        self._note("integers", 1)
        if self._differ(reference, fake, integer):
            self._add_forced(teacher_forced, integer, form)
            return
        self._note("values", reference.numel())
        self._note("forced_values", integer.numel())
        kernels = _kernels(reference, fake, teacher_forced) if integer.dtype == torch.int8 else None
        if kernels is not None:
            given = form.scale, float(form.low), float(form.high), _FIELDS
            self._add(kernels.integer_lines(*_flat(reference, fake, integer), *given))
            # Sums of integers, the same in any order: these two lie alike in memory.
            self._add(kernels.teacher_forced_lines(*_flat(teacher_forced, integer), *given))
            return
        for some in blocks(reference, fake, teacher_forced, integer):
            wanted, free, forced, made = (values.double() for values in some)
            self._add([_integer_line(wanted, free, forced, made, form)])

    def _differ(self, *made: Tensor) -> bool:
        """Whether values decide how many rows remain, and each run keeps others: count them."""
        if len({tensor.shape for tensor in made}) == 1:
            return False
        one_rank = len({tensor.dim() for tensor in made}) == 1
        axis = 0
        while one_rank and len({tensor.shape[axis] for tensor in made}) == 1:
            axis += 1
        for name, tensor in zip(_KEPT, made, strict=True):
            self._note(name, tensor.shape[axis] if one_rank else tensor.numel())
        return True

    def _add_forced(self, teacher_forced: Tensor, integer: Tensor, form: Integers) -> None:
        """Add what is left to compare: results on the same inputs."""
        if teacher_forced.shape != integer.shape:
            return
        self._note("forced_values", integer.numel())
        for some in blocks(teacher_forced, integer):
            forced, made = (values.double() for values in some)
            numbers = _integer_line(forced, forced, forced, made, form)[-len(_STEPS) :]
            line = dict(zip(_STEPS, numbers, strict=True))
            for name in ("forced_total", "forced_off", "saturated", "forced_largest"):
                self._note(name, line[name])

    def _add(self, lines: Any) -> None:
        columns = np.asarray(lines).T
        pairs, steps = columns[: -len(_STEPS)].sum(1), columns[-len(_STEPS) :]
        self.fake.add_sums([*pairs[: _PAIR - 1], 0])
        self.integer.add_sums([*pairs[_PAIR - 1 :], 0])
        for name, values in zip(_STEPS, steps, strict=True):
            self._note(name, values.max(initial=0) if name in _LARGEST else values.sum())

    def _note(self, name: str, value: Any) -> None:
        before = self.sums[name]
        self.sums[name] = max(before, float(value)) if name in _LARGEST else before + float(value)

    def add_matched(self, counts: Sequence[int]) -> None:
        """Add one batch's objects that both models choose upstream, and that each one chooses."""
        for name, count in zip(_MATCHED, counts, strict=True):
            self._note(name, count)

    def add_peak(self, accumulators: Tensor) -> None:
        """Note the largest accumulator."""
        if accumulators.numel():
            if torch.ops.aten.is_non_overlapping_and_dense(accumulators):
                # As it lies in memory: torch is ten times slower across channels-last strides.
                accumulators = accumulators.as_strided((accumulators.numel(),), (1,))
            low, high = (int(v) for v in torch.aminmax(accumulators))
            self._note("peak", 1 + max(high, -low - 1, 0).bit_length())

    def numbers(self) -> list[float]:
        """Everything added so far."""
        return [*self.fake.as_sums(), *self.integer.as_sums(), *self.sums.values()]

    def merge(self, numbers: Sequence[float]) -> None:
        """Add what `numbers` of other batches gave."""
        self.fake.add_sums(numbers[:_PAIR])
        self.integer.add_sums(numbers[_PAIR : 2 * _PAIR])
        for name, value in zip(self.sums, numbers[2 * _PAIR :], strict=True):
            self._note(name, value)

    def row(self) -> LayerRow:
        """The row over everything added so far."""
        exact = bool(self.sums["integers"])

        def mean(name: str, count: str) -> float | None:
            return self.sums[name] / max(self.sums[count], 1) if exact else None

        def counted(names: tuple[str, ...]) -> Any:
            return tuple(int(self.sums[name]) for name in names)

        forced = int(self.sums["forced_largest"])
        fake, integer = self.fake, self.integer
        return LayerRow(
            path=self.path,
            op=self.op,
            form=self.form,
            values=int(self.sums["values"]),
            fake_sqnr_db=fake.sqnr_db,
            integer_sqnr_db=integer.sqnr_db,
            fake_cosine=fake.cosine,
            integer_cosine=integer.cosine,
            max_steps=int(self.sums["free_largest"]) if exact else None,
            mean_steps=mean("free_total", "values"),
            off=mean("free_off", "values"),
            forced_max_steps=forced if exact else None,
            forced_mean_steps=mean("forced_total", "forced_values"),
            saturated=mean("saturated", "forced_values"),
            peak_bits=int(self.sums["peak"]) or None,
            why=self.why if forced > 1 else "",
            kept=counted(_KEPT) if any(counted(_KEPT)) else None,
            matched=counted(_MATCHED) if any(counted(_MATCHED)) else None,
            not_finite=(int(fake.not_finite), int(integer.not_finite)),
        )


def _kernels(*floats: Tensor) -> Any:
    if any(t.dtype != torch.float32 or t.device.type != "cpu" for t in floats):
        return None
    return compiled_module("layer_sums", floats[0].numel())


def _flat(*tensors: Tensor) -> list[Any]:
    """The values of tensors of one shape, flat, in the order of memory where that is one."""
    one = {tensor.stride() for tensor in tensors if tensor.numel() > 1}
    if len(one) == 1 and torch.ops.aten.is_non_overlapping_and_dense(tensors[0]):
        return [t.detach().as_strided((t.numel(),), (1,)).numpy() for t in tensors]
    return [contiguous(tensor.detach()).reshape(-1).numpy() for tensor in tensors]


def _integer_line(
    wanted: Tensor, fake: Tensor, teacher_forced: Tensor, made: Tensor, form: Integers
) -> list[float]:
    expected = (fake / form.scale).round_().clamp_(form.low, form.high)
    raw = (teacher_forced / form.scale).round_()
    clamped = raw.clamp(form.low, form.high)
    free, forced = (made - expected).abs_(), (made - clamped).abs_()
    line = []
    for q in (expected * form.scale, made * form.scale):
        for values in (wanted * wanted, q * q, q * wanted, (q - wanted).square_()):
            line.append(float(values.sum()))
    for apart in (free, forced):
        line += [float(apart.sum()), float(apart.count_nonzero())]
    return [*line, float((raw != clamped).sum()), float(free.max()), float(forced.max())]
