"""The table of a comparison: float, fake-quant and integer results of each layer."""

from __future__ import annotations

import json
import math
from dataclasses import asdict, dataclass, field

import torch
from torch import Tensor

__all__ = ["LayerRow", "LayerSums", "LayerTable"]

_SCHEMA = 1


@dataclass(frozen=True)
class LayerRow:
    """One step of the integer model, over all batches.

    Outputs are compared as the next layer reads them: fake-quantized, or in integers times their
    scale; as floats where the output stays float. A step is one integer of the output.

    Attributes:
        path: Module.
        op: Operation of the step.
        form: ``"int8"`` and the like, or ``"float"``.
        values: Number of output values.
        fake_sqnr_db: 10·log10(Σ float² / Σ (fake-quant − float)²); ``None`` where they are equal
            or the float output is all zero.
        integer_sqnr_db: The same of the integer result.
        fake_cosine: Cosine of fake-quant and float output, each seen as one vector; ``None`` where
            one is zero.
        integer_cosine: The same of the integer result.
        max_steps: Largest difference between integer and fake-quant result when both models run
            from the same input, in steps; ``None`` for a float output.
        mean_steps: Mean of its size.
        off: Share of values that differ at all.
        forced_max_steps: Largest difference when the fake-quant layer is given the integer
            model's own inputs.
        forced_mean_steps: Mean of its size.
        saturated: Share of values beyond the output's range.
        peak_bits: Bits, sign included, of the largest accumulator; ``None`` where there is none.
        why: What explains a difference of more than one step on the same inputs.
    """

    path: str
    op: str
    form: str
    values: int
    fake_sqnr_db: float | None
    integer_sqnr_db: float | None
    fake_cosine: float | None
    integer_cosine: float | None
    max_steps: int | None
    mean_steps: float | None
    off: float | None
    forced_max_steps: int | None
    forced_mean_steps: float | None
    saturated: float | None
    peak_bits: int | None
    why: str


@dataclass(frozen=True)
class LayerTable:
    """Rows in order of execution.

    Attributes:
        rows: One per step of the integer model that computes.
    """

    rows: tuple[LayerRow, ...]

    @property
    def first_departure(self) -> LayerRow | None:
        """The first layer whose integers leave the fake-quantized ones by more than one step."""
        return next((row for row in self.rows if (row.max_steps or 0) > 1), None)

    @property
    def wrong(self) -> tuple[LayerRow, ...]:
        """Layers that differ by more than one step on the same inputs, without a known reason."""
        return tuple(r for r in self.rows if (r.forced_max_steps or 0) > 1 and not r.why)

    def to_json(self) -> str:
        """The rows and the first departure as JSON text."""
        first = self.first_departure
        data = {
            "schema": _SCHEMA,
            "first_departure": None if first is None else first.path,
            "rows": [asdict(row) for row in self.rows],
        }
        return json.dumps(data, indent=2, allow_nan=False)

    def __str__(self) -> str:
        head = (
            "layer", "op", "form", "fake dB", "int dB", "max", "mean", "off %", "forced max",
            "sat %", "acc bits", "",
        )  # fmt: skip
        rows = [head, *(_cells(row) for row in self.rows)]
        widths = [max(len(row[i]) for row in rows) for i in range(len(head))]
        lines = [
            "  ".join(
                cell.ljust(width) if i < 3 or i == len(head) - 1 else cell.rjust(width)
                for i, (cell, width) in enumerate(zip(row, widths, strict=True))
            ).rstrip()
            for row in rows
        ]
        return "\n".join([*lines, self._verdict()])

    def _verdict(self) -> str:
        first = self.first_departure
        if first is None:
            return "integer and fake-quant results agree within one step everywhere"
        return (
            f"{first.path} departs first: up to {first.max_steps} steps from the fake-quant "
            f"result, {100 * (first.off or 0):.2f} % of its values differ"
        )


def _cells(row: LayerRow) -> tuple[str, ...]:
    def text(value: float | None, form: str, factor: float = 1.0) -> str:
        return "–" if value is None else format(value * factor, form)

    return (
        row.path,
        row.op,
        row.form,
        text(row.fake_sqnr_db, ".1f"),
        text(row.integer_sqnr_db, ".1f"),
        text(row.max_steps, ".0f"),
        text(row.mean_steps, ".4f"),
        text(row.off, ".2f", 100),
        text(row.forced_max_steps, ".0f"),
        text(row.saturated, ".2f", 100),
        text(row.peak_bits, ".0f"),
        row.why,
    )


@dataclass(eq=False)
class LayerSums:
    """What is added up for a row, batch after batch."""

    path: str
    op: str
    form: str
    why: str = ""
    values: int = 0
    float_power: float = 0.0
    powers: dict[str, float] = field(default_factory=dict)
    errors: dict[str, float] = field(default_factory=dict)
    dots: dict[str, float] = field(default_factory=dict)
    steps: dict[str, tuple[int, float, int]] = field(default_factory=dict)
    saturated: int = 0
    peak: int | None = None

    def add_values(self, reference: Tensor, fake: Tensor, integer: Tensor) -> None:
        """Add one batch's float, fake-quant and integer output as floats."""
        reference = reference.double()
        self.values += reference.numel()
        self.float_power += float(reference.square().sum())
        for name, other in (("fake", fake.double()), ("integer", integer.double())):
            self.powers[name] = self.powers.get(name, 0.0) + float(other.square().sum())
            error = float((other - reference).square().sum())
            self.errors[name] = self.errors.get(name, 0.0) + error
            self.dots[name] = self.dots.get(name, 0.0) + float((other * reference).sum())

    def add_steps(self, name: str, integer: Tensor, fake: Tensor) -> None:
        """Add differences of integers."""
        apart = (integer.to(torch.int32) - fake.to(torch.int32)).abs()
        largest, total, off = self.steps.get(name, (0, 0.0, 0))
        if apart.numel():
            largest = max(largest, int(apart.max()))
        self.steps[name] = (largest, total + float(apart.sum()), off + int((apart > 0).sum()))

    def add_peak(self, accumulators: Tensor) -> None:
        """Note the largest accumulator."""
        if accumulators.numel():
            low, high = (int(v) for v in accumulators.aminmax())
            bits = 1 + max(high, -low - 1, 0).bit_length()
            self.peak = max(self.peak or 0, bits)

    def row(self) -> LayerRow:
        """The row over everything added so far."""
        free, forced = self.steps.get("free"), self.steps.get("forced")
        count = max(self.values, 1)
        return LayerRow(
            path=self.path,
            op=self.op,
            form=self.form,
            values=self.values,
            fake_sqnr_db=self._sqnr("fake"),
            integer_sqnr_db=self._sqnr("integer"),
            fake_cosine=self._cosine("fake"),
            integer_cosine=self._cosine("integer"),
            max_steps=None if free is None else free[0],
            mean_steps=None if free is None else free[1] / count,
            off=None if free is None else free[2] / count,
            forced_max_steps=None if forced is None else forced[0],
            forced_mean_steps=None if forced is None else forced[1] / count,
            saturated=None if free is None else self.saturated / count,
            peak_bits=self.peak,
            why=self.why if forced is not None and forced[0] > 1 else "",
        )

    def _sqnr(self, name: str) -> float | None:
        error = self.errors.get(name, 0.0)
        if error <= 0 or self.float_power <= 0:
            return None
        return 10 * math.log10(self.float_power / error)

    def _cosine(self, name: str) -> float | None:
        size = math.sqrt(self.float_power * self.powers.get(name, 0.0))
        return self.dots[name] / size if size > 0 else None
