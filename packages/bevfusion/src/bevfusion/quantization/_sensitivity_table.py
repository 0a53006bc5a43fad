"""Result of measuring the sensitivity as text, table and record; mean average precision."""

from __future__ import annotations

import json
import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from types import MappingProxyType
from typing import Any, Literal

import msgspec
import numpy as np

from bev_data import InputError
from bev_data.datasets import labelled_region
from bev_data.metrics import (
    Bootstrap,
    DetectionAccumulator,
    interval_of_mean_ap,
    metrics_of,
    or_dash,
)
from bev_data.tables import Cell, CellParts, Column, Row, Table
from bevfusion.evaluation import FrameBatches, detection_rules, detections_of, detections_record
from bevfusion.model import Detector
from bevfusion.model.head import Detections
from bevquant_qnn import Budget, PrecisionPlan, RefinedPlan, SensitivityRow, SensitivityTable
from bevquant_quantizers.ranks import Record, Shards

_WIDE, _HIGH, _GAP = 100.0, 7.0, 2.0  # of a bar, in its own units
_DIGITS = {"sqnr": ".1f", "kl": ".2e", "mAP": ".2f"}
_TITLES = {"sqnr": "SQNR", "kl": "KL divergence, negative,", "mAP": "mAP"}
_UNITS = {"sqnr": "dB", "kl": "nats", "mAP": "points"}
_SCORED = {
    "": "the model's own output",
    "decoder.neck": "the decoder's map",
    "pts_neck": "the decoder's map",
    "heads.object.heatmap_head": "the head's heat map",
}


@dataclass(frozen=True, eq=False)
class SensitivityOutcome:
    """The table, the scored output, and the plan if a budget was given.

    Attributes:
        table: Quantization loss of every group of layers.
        output: Path of the module whose output was scored; "" for the model's own.
        precisions: Precisions at which groups were measured alone, in that order.
        plan: Plan within the budget; None without one.
        budget: The budget as given, such as "time=1.2" or "size=0.7"; "" without one.
        refusal: Reason why there is no plan although a budget was given; else "".
        estimated: The plan from added losses, with which the measurement started.
        refined: The measured plan, the measured first plan, and the number of measured plans.
        front: The best plans of several times by estimate, from fast to slow; of several sizes
            where the budget is of size alone.
    """

    table: SensitivityTable
    output: str
    precisions: tuple[str, ...]
    plan: PrecisionPlan | None = None
    budget: str = ""
    refusal: str = ""
    estimated: PrecisionPlan | None = None
    refined: RefinedPlan | None = None
    front: tuple[PrecisionPlan, ...] = ()

    @property
    def measured(self) -> tuple[tuple[float, float], ...]:
        """Estimated cost (`cost`) and measured score of each plan that was run."""
        return () if self.refined is None else self.refined.measured

    @property
    def intervals(self) -> Mapping[tuple[float, float], tuple[float, float]]:
        """95 % interval of the score, by cost and score of the best plans that were run."""
        return {} if self.refined is None else self.refined.intervals

    @property
    def cost(self) -> Literal["time", "size"]:
        """The cost over which plans are shown, as a multiple of the int8 model's."""
        return "size" if self.budget and Budget.parse(self.budget).by_size else "time"

    def cost_of(self, plan: PrecisionPlan) -> float:
        """That cost of a plan."""
        return (plan.size if self.cost == "size" else plan.time) or 0.0

    @property
    def unit(self) -> str:
        """The unit of scores."""
        return _UNITS[self.table.metric]

    @property
    def scored(self) -> str:
        """The scored output, as text."""
        return "the boxes" if self.table.metric == "mAP" else _SCORED[self.output]

    @property
    def operations(self) -> int:
        """Operations of all groups on the first frame."""
        return sum(row.operations for row in self.table)

    def share(self, row: SensitivityRow, precision: str) -> float:
        """A group's share of the loss of all groups at that precision; 0 without loss."""
        there = (other for other in self.table if precision in other.alone)
        whole = sum(self.table.loss(other, precision) for other in there)
        return self.table.loss(row, precision) / whole if whole else 0.0

    def gain(self, row: SensitivityRow) -> float | None:
        """Gain of the score if this group alone is left in float."""
        if row.without is None or self.table.quantized_score is None:
            return None
        return row.without - self.table.quantized_score

    def chosen(self, row: SensitivityRow) -> str | None:
        """The plan's precision for a group."""
        return None if self.plan is None else self.plan[row.name]

    def summary(self) -> dict[str, Any]:
        """All results, as JSON."""
        return {
            "scored": self.scored,
            "output": self.output,
            "unit": self.unit,
            "precisions": self.precisions,
            "budget": self.budget or None,
            "refusal": self.refusal or None,
            "table": json.loads(self.table.to_json()),
            "plan": None if self.plan is None else json.loads(self.plan.to_json()),
            "plan_from": self._plan_from(),
            "front": [
                {"time": p.time, "size": p.size, "estimated_score": p.score} for p in self.front
            ],
            "measured": [
                {self.cost: point[0], "score": point[1]}
                | dict(zip(("low", "high"), self.intervals.get(point, ()), strict=False))
                for point in self.measured
            ],
        }

    def _plan_from(self) -> dict[str, Any] | None:
        if self.refined is None or self.estimated is None:
            return None
        start = self.refined.start
        return {
            "plans_measured": self.refined.tried,
            "first": {
                "time": start.time,
                "size": start.size,
                "estimated_score": self.estimated.score,
                "measured_score": start.score,
            },
        }


class SensitivitySummary(msgspec.Struct):
    """Fields of `SensitivityOutcome.summary` about the layers, read from JSON."""

    precisions: list[str]
    unit: str
    scored: str
    table: SensitivityTable


def sensitivity_text(outcome: SensitivityOutcome) -> tuple[str, ...]:
    """Headline, one line for each group of layers, the largest loss first; the plan in a line."""
    plan = [sensitivity_plan(outcome)] if outcome.plan is not None else []
    front = [front_table(outcome).text()] if outcome.front else []
    return (
        sensitivity_headline(outcome),
        sensitivity_table(outcome).text(without="encoders."),
        *plan,
        *front,
    )


def front_table(outcome: SensitivityOutcome) -> Table:
    """The best plans of several costs: estimated score, precisions, and the best measured score.

    The latter is of any plan that was run and costs more than the line above allows.
    """
    form, cost = _DIGITS[outcome.table.metric], outcome.cost
    columns = [Column(f"Best plan in {cost}"), Column(f"estimated {outcome.unit}")]
    columns += [Column(f"best measured {outcome.unit}")] * bool(outcome.measured)
    rows, above = [], -math.inf
    for plan in outcome.front:
        limit = outcome.cost_of(plan) + 1e-9
        within = [point for point in outcome.measured if above < point[0] <= limit]
        best, above = max(within, key=lambda point: (point[1], -point[0]), default=None), limit
        text = or_dash(best and best[1], form)
        if best is not None and best in outcome.intervals:
            low, high = outcome.intervals[best]
            text += f" ({low:{form}} to {high:{form}})"
        measured = [text] * bool(outcome.measured)
        first = f"{outcome.cost_of(plan):.2f}"
        rows.append(Row([first, or_dash(plan.score, form), *measured, _counts(plan)]))
    return Table(f"The best plan for each {cost}", [*columns, Column("Groups")], rows)


_ACROSS, _UP = 600.0, 200.0  # of the picture, in its own units


def front_picture(outcome: SensitivityOutcome) -> dict[str, Any] | None:
    """Estimated scores over their cost as a line, measured plans as dots; None without two plans.

    The plan with all groups in float is left out: its score is float's own.
    """
    quantized = (p for p in outcome.front if any(g.precision != "float" for g in p))
    line = [(outcome.cost_of(plan), plan.score or 0.0) for plan in quantized]
    ends = [[(cost, end) for end in found] for (cost, _), found in outcome.intervals.items()]
    every = [*line, *outcome.measured, *chain.from_iterable(ends)]
    costs, scores = ({point[axis] for point in every} for axis in (0, 1))
    if len(costs) < 2 or len(scores) < 2:
        return None
    (left, right), (low, high) = ((min(values), max(values)) for values in (costs, scores))

    def placed(points: Sequence[tuple[float, float]]) -> list[tuple[float, float]]:
        return [
            (_ACROSS * (cost - left) / (right - left), _UP * (high - score) / (high - low))
            for cost, score in points
        ]

    form, unit = _DIGITS[outcome.table.metric], outcome.unit
    return {
        "width": _ACROSS,
        "height": _UP,
        "line": placed(line),
        "dots": placed(outcome.measured),
        "intervals": [placed(pair) for pair in ends],
        "cost": outcome.cost,
        "label": f"Score over estimated {outcome.cost}: {low:{form}} to {high:{form}} {unit}",
        "ends": [f"{left:.2f}", f"{right:.2f}", f"{low:{form}}", f"{high:{form}} {unit}"],
    }


def sensitivity_table(outcome: SensitivityOutcome) -> Table:
    """One line for each group of layers, the largest loss first."""
    columns = [Column("Layers"), Column("Loss", "bars", only="page"), Column("Operations", "minor")]
    for name in outcome.precisions:
        share = Column("share of loss", only="terminal")
        columns += [Column(f"{name} alone {outcome.unit}"), share]
    if outcome.table.quantized_score is not None:
        columns.append(Column("Gain in float", "minor"))
    if outcome.plan is not None:
        columns.append(Column("Plan"))
    worst = outcome.table.worst_first()
    rows = [Row(_cells(outcome, row)) for row in worst]
    title = "Loss of each group of layers"
    return Table(title, columns, rows, "long", "sensitivity-bars", "dense")


def _cells(outcome: SensitivityOutcome, row: SensitivityRow) -> list[Cell]:
    form = _DIGITS[outcome.table.metric]
    cells: list[Cell] = [
        CellParts(path=row.name, more=row.modules[1:]),
        CellParts(bars=_bars(outcome, row)),
        f"{row.operations / max(1, outcome.operations):.1%}",
    ]
    for name in outcome.precisions:
        share = outcome.share(row, name) if name in row.alone else None
        cells += [or_dash(row.alone.get(name), form), or_dash(share, ".1%")]
    if outcome.table.quantized_score is not None:
        cells.append(or_dash(outcome.gain(row), f"+z{form}"))
    chosen = outcome.chosen(row)
    if chosen is not None:
        cells.append(CellParts(text=chosen, badge=f"precision {chosen}"))
    return cells


def _bars(outcome: SensitivityOutcome, row: SensitivityRow) -> dict[str, object]:
    """One bar for each precision, as long as its loss beside the largest of all."""
    losses = {name: outcome.table.loss(row, name) for name in row.alone}
    table = outcome.table
    largest = max((table.loss(other, name) for other in table for name in other.alone), default=0.0)
    share_text = ", ".join(f"{name} {outcome.share(row, name):.1%}" for name in losses)
    blocks = [
        {
            "kind": name,
            "left": 0.0,
            "top": index * (_HIGH + _GAP),
            "width": _WIDE * loss / largest if largest else 0.0,
            "height": _HIGH,
        }
        for index, (name, loss) in enumerate(losses.items())
    ]
    high = len(losses) * (_HIGH + _GAP) - _GAP
    return {"height": high, "label": f"Share of loss: {share_text}", "blocks": blocks}


def sensitivity_headline(outcome: SensitivityOutcome) -> str:
    """The scored output, and the scores of the float and the quantized model."""
    table, form = outcome.table, _DIGITS[outcome.table.metric]
    frames = f"{table.batches} frame{'s' * (table.batches != 1)}"
    groups = len(table.rows)
    title = _TITLES[table.metric] + (" (layers estimated)" if table.estimated else "")
    text = f"{title} of {outcome.scored}, {frames}, {groups} group{'s' * (groups != 1)}"
    text += f" of layers: float {format(table.float_score, form)}"
    if table.quantized_score is not None:
        text += f", quantized {format(table.quantized_score, form)}"
    return f"{text} {outcome.unit}"


def sensitivity_plan(outcome: SensitivityOutcome) -> str:
    """The plan in a line: number of groups by precision, estimated time and size, score."""
    plan = outcome.plan
    if plan is None:
        return ""
    chosen = _counts(plan)
    score = or_dash(plan.score, _DIGITS[outcome.table.metric])
    how = "measured" if plan.measured else "estimated"
    text = (
        f"Plan for {outcome.budget}: {chosen}; estimated time {or_dash(plan.time, '.3g')} and size "
        f"{or_dash(plan.size, '.3g')} times int8's, {how} score {score} {outcome.unit}"
    )
    if outcome.refined is not None:
        first = or_dash(outcome.refined.start.score, _DIGITS[outcome.table.metric])
        text += f", the best of {outcome.refined.tried} measured; the search began at {first}"
    return text


def _counts(plan: PrecisionPlan) -> str:
    """Number of groups by precision."""
    counts = Counter(group.precision for group in plan)
    return ", ".join(f"{count} {name}" for name, count in sorted(counts.items()))


class KeptScores:
    """`bevquant_qnn.Kept` in a run's shards: pairs of numbers, or boxes.

    Args:
        shards: Shards of the run.
    """

    def __init__(self, shards: Shards) -> None:
        self._shards = shards

    def load(self, step: str, index: int) -> list[Any] | None:
        """The results of a frame, if it was finished before."""
        record = self._shards.load(step, index)
        if record is None:
            return None
        if "numbers" in record:
            return [tuple(row) for row in record["numbers"].tolist()]
        return _boxes(record)

    def save(self, step: str, index: int, results: list[Any]) -> None:
        """Keep the results of a frame, whole or not at all."""
        if not isinstance(results[0], Detections):
            self._shards.save(step, index, {"numbers": np.array(results, np.float64)})
            return
        together = Detections(*(np.concatenate(arrays) for arrays in zip(*results, strict=True)))
        sizes = np.array([len(found.scores) for found in results], np.int64)
        self._shards.save(step, index, {"sizes": sizes, **detections_record("found", together)})


def _boxes(record: Record) -> list[Detections]:
    ends = np.cumsum(record["sizes"])[:-1]
    together = detections_of("found", record)
    parts = zip(*(np.split(array, ends) for array in together), strict=True)
    return [Detections(*arrays) for arrays in parts]


class MeanAp:
    """nuScenes' mean average precision over the labelled frames, in points of 100.

    Called with a batch's outputs, it returns the detections; `reduce` scores those of all batches,
    in order. Frames without labels are skipped.

    Args:
        model: The model; its head decodes.
        batches: The frames, for their labels.
        shards: Storage of finished results while several ranks share the frames.

    Attributes:
        advice: Remedy in errors; a program names its own options.

    Raises:
        InputError: The model has no head, or no frame has labels.
    """

    __name__ = "mAP"  # what the table calls it
    advice: Mapping[str, str] = MappingProxyType(
        {
            "no head": "metric='mAP': the model is {} alone and makes no boxes: measure with "
            "metric='sqnr'",
            "no labels": "metric='mAP': none of the frames has labels: give frames that have "
            "(street, pandaset, kitti, nuscenes), or measure with metric='sqnr'",
            "none counts": "metric='mAP': no label of these frames counts (too far away, or "
            "without a point): give other frames, or more of them",
        }
    )

    def __init__(
        self, model: Detector, batches: FrameBatches, *, shards: Shards | None = None
    ) -> None:
        if not model.finds_boxes:
            raise InputError(self.advice["no head"].format(" and ".join(model.parts)))
        if all(batches.frame_labels(index) is None for index in range(len(batches))):
            raise InputError(self.advice["no labels"])
        self._model, self._batches, self._shards = model, batches, shards
        self._classes = batches.sizes.head.classes
        self._rules = detection_rules(batches)
        self._region = labelled_region(batches.dataset)

    def __call__(self, output: Any, batch: object) -> Detections:
        """Boxes of one frame."""
        return self._batches.boxes(self._model, output, batch)

    def reduce(self, found: Sequence[Detections]) -> float:
        """Judge the boxes of all frames.

        Raises:
            InputError: No label counts.
        """
        mean_ap = metrics_of(self._judged(found)).mean_ap
        if mean_ap is None:
            raise InputError(self.advice["none counts"])
        return 100 * mean_ap

    def interval(self, found: Sequence[Detections]) -> tuple[float, float] | None:
        """95 % interval of `reduce` over frames drawn with replacement; None for one frame."""
        ends = interval_of_mean_ap(self._judged(found), Bootstrap())
        return None if ends is None else (100 * ends.low, 100 * ends.high)

    def _judged(self, found: Sequence[Detections]) -> DetectionAccumulator:
        self._batches.share_notes(self._shards)
        accumulator = DetectionAccumulator(self._classes, self._rules)
        for index, detections in enumerate(found):
            labels = self._batches.frame_labels(index)
            if labels is not None:
                accumulator.add(detections, labels, region=self._region)
        return accumulator
