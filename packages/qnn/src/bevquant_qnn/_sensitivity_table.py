"""Quantization loss of every layer: the table that `sensitivity` returns."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Annotated, Any, Self

import msgspec
import torch

from bevquant_graph import HtmlTable
from bevquant_qnn._precision import check_precisions
from bevquant_qnn._scores import loss_of, score_after
from bevquant_quantizers.documents import Count, Finite, JsonDocument, parse_json, text_table

_SCHEMA = "bevquant-sensitivity/1"


@dataclass(frozen=True)
class SensitivityRow:
    """One group of layers.

    Attributes:
        modules: Paths of its layers; several where they share a quantizer.
        operations: Multiply-accumulates of the first batch; elements read, for layers without
            multiplication.
        alone: Score of the float model with this group alone quantized, by precision.
        without: Score of the quantized model with this group alone in float; None where it was not
            measured.
    """

    modules: Annotated[tuple[str, ...], msgspec.Meta(min_length=1)]
    operations: Count
    alone: Annotated[Mapping[str, Finite], msgspec.Meta(min_length=1)]
    without: Finite | None = None

    @property
    def name(self) -> str:
        """The first path."""
        return self.modules[0]


@dataclass(frozen=True)
class SensitivityTable(HtmlTable, JsonDocument):
    """Rows in model order, and the scores of the float and the quantized model.

    Larger scores are better: ``"sqnr"`` in dB, ``"kl"`` as minus the divergence in nats.

    Attributes:
        metric: Name of the score.
        float_score: Score with every quantizer disabled.
        quantized_score: Score of the model as given; None where it was not measured.
        rows: One per group.
        batches: Number of batches.
        estimated: Whether the rows are estimates (`estimate_sensitivity`) or measurements.
    """

    metric: str
    float_score: Finite
    quantized_score: Finite | None
    rows: tuple[SensitivityRow, ...]
    batches: Count
    estimated: bool = False

    def __iter__(self) -> Iterator[SensitivityRow]:
        return iter(self.rows)

    def __getitem__(self, path: str) -> SensitivityRow:
        """Return the row of the group that holds the layer at `path`."""
        for row in self.rows:
            if path in row.modules:
                return row
        raise KeyError(f"no row holds {path!r}; the first is {self.rows[0].name!r}")

    def loss(self, row: SensitivityRow, precision: str) -> float:
        """Loss of `row` at `precision`, in a unit that adds over rows; never negative.

        Noise over signal for ``"sqnr"``, differences of scores otherwise.
        """
        if precision == "float":
            return 0.0
        return max(0.0, loss_of(self.metric)(row.alone[precision], self.float_score))

    def score(self, loss: float) -> float:
        """Score of a model whose layers lose `loss` in total, if losses add."""
        return score_after(self.metric, loss, self.float_score)

    def worst_first(self, precision: str | None = None) -> tuple[SensitivityRow, ...]:
        """Rows by loss, the largest first: the bars of a chart.

        Args:
            precision: Precision of the loss; None for each row's worst measured one.

        Raises:
            KeyError: The precision was not measured.
        """

        def lost(row: SensitivityRow) -> float:
            return max(self.loss(row, name) for name in ([precision] if precision else row.alone))

        return tuple(sorted(self.rows, key=lost, reverse=True))

    def rank_correlation(self, other: SensitivityTable, precision: str = "int8") -> float:
        """Spearman's ρ of two tables' scores: 1 where both order the groups alike.

        ρ is the correlation of the ranks, equal scores with their mean rank.

        Args:
            other: Table of the same groups, such as an estimate (`estimate_sensitivity`).
            precision: Precision of the scores.

        Raises:
            KeyError: A group or a precision is missing from one of them.
            ValueError: Fewer than two groups, or all scores of a table are equal.
        """
        pairs = [(row.alone[precision], other[row.name].alone[precision]) for row in self.rows]
        scores = torch.tensor(pairs, dtype=torch.float64).reshape(-1, 2).T
        ranks = (scores[:, :, None] > scores[:, None]).double().sum(2)
        ranks += (scores[:, :, None] == scores[:, None]).double().sum(2) / 2
        if len(pairs) < 2 or bool((ranks.std(1) == 0).any()):
            raise ValueError(
                f"rank_correlation: {len(pairs)} groups with scores that do not differ have no "
                "order; compare tables of two groups or more"
            )
        return float(torch.corrcoef(ranks)[0, 1])

    def to_json(self) -> str:
        """Return the table as JSON text, with every score to the last bit."""
        names = ["metric", "float_score", "quantized_score", "batches", "rows"]
        names += ["estimated"] * self.estimated
        document = {"schema": _SCHEMA, **{name: getattr(self, name) for name in names}}
        return json.dumps(document, indent=2, allow_nan=False, default=_plain)

    @classmethod
    def from_json(cls, text: str) -> Self:
        """Read the text that `to_json` wrote.

        Raises:
            ValueError: Any other text.
        """
        table: Self = parse_json(
            text,
            cls,
            what="table that SensitivityTable.to_json wrote",
            head={"schema": _SCHEMA},
            remedy="measure again with this version",
        )
        check_precisions((name for row in table.rows for name in row.alone), "a row")
        return table

    def __str__(self) -> str:
        names = list(dict.fromkeys(name for row in self.rows for name in row.alone))
        head = ["layers", "operations", *(f"{name} alone" for name in names), "alone in float"]
        body = [
            [
                row.name + (f" +{len(row.modules) - 1}" if len(row.modules) > 1 else ""),
                f"{row.operations:,}",
                *(f"{row.alone[name]:.4g}" if name in row.alone else "" for name in names),
                "" if row.without is None else f"{row.without:.4g}",
            ]
            for row in self.rows
        ]
        whole = "" if self.quantized_score is None else f", quantized {self.quantized_score:.4g}"
        how = " (estimated)" if self.estimated else ""
        title = f"{self.metric}{how}: float {self.float_score:.4g}{whole}, {self.batches} batches"
        return f"{title}\n{text_table([head, *body], right=range(1, len(head)))}"


def _plain(row: SensitivityRow) -> dict[str, Any]:
    return {**vars(row), "alone": dict(row.alone)}
