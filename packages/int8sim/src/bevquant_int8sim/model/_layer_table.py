"""The table of a comparison: float, fake-quant and integer results of each layer."""

from __future__ import annotations

import json
from dataclasses import dataclass

from bevquant_graph import HtmlTable
from bevquant_quantizers.documents import filled, plain, text_table

_SCHEMA = 1
_COLUMNS = {
    "layer": "{path}", "op": "{op}", "form": "{form}", "fake dB": "{fake_sqnr_db:.1f}",
    "int dB": "{integer_sqnr_db:.1f}", "max": "{max_steps:.0f}", "mean": "{mean_steps:.4f}",
    "off %": "{off:100*.2f}", "forced max": "{forced_max_steps:.0f}",
    "sat %": "{saturated:100*.2f}", "acc bits": "{peak_bits:.0f}",
}  # fmt: skip


@dataclass(frozen=True)
class LayerRow:
    """One step of the integer model, over all batches.

    Outputs are compared as the next layer reads them: fake-quantized, or in integers times their
    scale; as floats where the output stays float. A step is one integer of the output.

    Attributes:
        path: Module.
        op: Operation of the step.
        form: ``"int8"`` and the like, or ``"float"``; ``"fp8_e4m3"`` and ``"fp8_e5m2"`` of tensors
            on that grid, and of layers that multiply it.
        values: Number of output values.
        fake_sqnr_db: 10·log10(Σ float² / Σ (fake-quant − float)²); None for equal outputs, an
            all-zero float output, minus infinity where `not_finite`.
        integer_sqnr_db: The same for the integer result.
        fake_cosine: Cosine of fake-quant and float output, each as one vector; None where one is
            zero or not finite.
        integer_cosine: The same for the integer result.
        max_steps: Largest difference between integer and fake-quant result in steps, where both
            models run from the same input; None for an output in float or FP8.
        mean_steps: Mean absolute difference.
        off: Share of values that differ at all.
        forced_max_steps: Largest difference where the fake-quant layer reads the integer model's
            inputs.
        forced_mean_steps: Mean absolute difference in that case.
        saturated: Share of values beyond the output's range.
        peak_bits: Bits, sign included, of the largest accumulator; None where there is none.
        why: Cause of a difference of more than one step on the same inputs.
        kept: Rows of the float, the fake-quant and the integer result, where a module that is one
            node decides which rows remain and the numbers differ. Such results are compared on
            the same inputs alone; None where no batch has them.
        matched: Downstream of a choice by value (``topk``, ``sort``, ``argmax``, ``x[score > 0]``),
            objects that the float and the integer model both choose, and the number that each
            chooses; of several choices, the one with the fewest in common. The float and the
            fake-quant result are then those of the integer model's objects, in its order. None
            without a choice.
        not_finite: Of an output in float, number of values that are infinite or NaN in the
            fake-quant and in the integer result, and finite in float's.
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
    kept: tuple[int, int, int] | None = None
    matched: tuple[int, int, int] | None = None
    not_finite: tuple[int, int] = (0, 0)


@dataclass(frozen=True)
class LayerTable(HtmlTable):
    """Result of `compare`: rows in order of execution.

    Attributes:
        rows: One per step of the integer model that computes values.
        notes: From `calibrate`: channels that a range erases, and channels with ranges of their
            own. Of a useless result, the text of `bevquant_qnn.float_remedy`.
    """

    rows: tuple[LayerRow, ...]
    notes: tuple[str, ...] = ()

    @property
    def first_departure(self) -> LayerRow | None:
        """First layer whose integers and fake-quantized values differ by more than one step."""
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
            "rows": plain(self.rows),
            "notes": list(self.notes),
        }
        return json.dumps(data, indent=2, allow_nan=False)

    def __str__(self) -> str:
        head = (*_COLUMNS, "")
        rows = [head, *((*filled(row, _COLUMNS.values()), _notes(row)) for row in self.rows)]
        table = text_table(rows, right=range(3, len(head) - 1))
        return "\n".join((table, self._verdict(), *self.notes))

    def _verdict(self) -> str:
        lines = [self._departure()]
        if (kept := next((row for row in self.rows if row.kept), None)) is not None:
            lines.append(
                f"from {kept.path} on, values decide which rows remain: the float, fake-quant and "
                "integer model keep different ones, which are compared on the same inputs alone"
            )
        if (chosen := next((row for row in self.rows if row.matched), None)) is not None:
            lines.append(
                f"from {chosen.path} on, rows are those that the integer model chooses, in all "
                "models; matched: objects that float chooses too, of those of the integer model"
            )
        if (broken := next((row for row in self.rows if any(row.not_finite)), None)) is not None:
            lines.append(
                f"{broken.path} is not finite: {broken.not_finite[0]:,} fake-quant and "
                f"{broken.not_finite[1]:,} integer of {broken.values:,} values are infinite or "
                "NaN, which float has finite: keep its input in float"
            )
        return "\n".join(lines)

    def _departure(self) -> str:
        first = self.first_departure
        if not any(row.values for row in self.rows):
            return "nothing was compared: no result has values; give a frame as in use"
        if all(row.max_steps is None for row in self.rows):
            return "no result is held in integers: FP8 and float are compared in dB"
        if first is None:
            return "integer and fake-quant results agree within one step everywhere"
        return (
            f"{first.path} departs first by more than one step: by up to {first.max_steps} from "
            f"the fake-quant result, {100 * (first.off or 0):.2f} % of its values differ"
        )


def _notes(row: LayerRow) -> str:
    kept = "" if row.kept is None else "keeps {:,} / {:,} / {:,} rows".format(*row.kept)
    matched = "" if row.matched is None else "{0:,} of {2:,} matched".format(*row.matched)
    return "; ".join(filter(None, (row.why, kept, matched)))
