"""From an estimated plan to the best of many measured ones."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import chain
from typing import Any, cast

from torch import nn

from bevquant_graph import Forward, on_batch
from bevquant_qnn._assign_precision import BIT_OPERATIONS, Budget, fitting
from bevquant_qnn._plan_space import Choice, PlanSpace, Precisions, front, plan_space
from bevquant_qnn._precision import Precision, Setting, own_precision, set_for_now, settings_at
from bevquant_qnn._precision_plan import PrecisionPlan
from bevquant_qnn._ranks import Kept, deal_out
from bevquant_qnn._replay import Replay, evaluation
from bevquant_qnn._scores import Metric, Reduce, Score, drawn_interval, loss_of, score_of
from bevquant_qnn._sensitivity_table import SensitivityTable
from bevquant_quantizers import TensorQuantizer

_POINTS = 512  # of each front: what is chosen is measured, so a hair's breadth does not matter
_SHARES_IN_COMPANY = (0.0, 0.25, 0.5, 0.75, 1.0)
# A change that gains less than this part of the largest gain is not made.
_LEAST_GAINS = (0.5, 0.25, 0.12, 0.06, 0.03, 0.015, 0.0)
# Of the loss that a budget of score allows: an estimate may be too low, or too high.
_PARTS_AT_FIRST = (1.25, 1.1, 1.0, 0.9, 0.8, 0.65, 0.5)
_PARTS_IN_ROUNDS = (1.25, 1.1, 1.0, 0.9)
_Settings = dict[TensorQuantizer, Setting]
Interval = Callable[[Sequence[Any]], tuple[float, float] | None]


@dataclass(frozen=True)
class RefinedPlan:
    """The best measured plan and its origin.

    Attributes:
        plan: Within the budget; its score is measured.
        start: The given plan, its score measured on the same batches.
        tried: Number of plans that were run.
        measured: Estimated time and measured score of each plan that was run; its size in place of
            the time where the budget is of size alone.
        intervals: 95 % interval of the score of those of `measured` that no other one beats in
            both; empty where it is not known, as of one batch.
    """

    plan: PrecisionPlan
    start: PrecisionPlan
    tried: int
    measured: tuple[tuple[float, float], ...] = ()
    intervals: Mapping[tuple[float, float], tuple[float, float]] = field(default_factory=dict)


def refine_plan(
    model: nn.Module,
    plan: PrecisionPlan,
    batches: Iterable[Any],
    table: SensitivityTable,
    budget: Budget,
    *,
    metric: str | Metric | None = None,
    outputs: Sequence[str] = (),
    rounds: int = 2,
    costs: Mapping[Precision, float] = BIT_OPERATIONS,
    forward: Forward | None = None,
    reduce: Reduce | None = None,
    interval: Interval | None = None,
    distributed: bool | None = None,
    kept: Kept | None = None,
) -> RefinedPlan:
    """Measure plans near the best known one, and keep the best measured plan.

    `assign_precision` adds the losses of groups measured alone. Together, errors add or cancel. So
    whole plans are run:

    1. the best plans by three losses per group: its loss alone, the gain of the quantized model
       with this group in float, and a weighted mean of both;
    2. in each round, the best plan so far with each single group changed, and then with all changes
       that are best by these measurements.

    Every plan is scored on all batches, with the bits of a full run; only the parts that its
    changes reach are run again. A round runs about as many plans as the model has groups, and as
    many again per further precision. Two rounds take up to 1.5 times as long as `sensitivity` with
    both halves.

    Args:
        model: The measured model. It is not changed.
        plan: Start, from `assign_precision` or by hand, within a budget of time or size.
        batches: Preferably those of the measurement; read several times, so a list, not an
            iterator.
        table: Loss of each group alone.
        budget: Limit of the score, as measured here, or of time and size.
        metric: The function for a table that was measured with one; else the table's own metric.
        outputs: As for `sensitivity`.
        rounds: Largest number of rounds; the search ends when a round finds nothing better. 0 runs
            the plans of step 1 alone.
        costs: As for `assign_precision`.
        forward: As for `sensitivity`.
        reduce: As for `sensitivity`.
        interval: The interval from the results of a metric function, as `reduce` is its score.
            Default: batches are drawn with replacement; unknown with a `reduce`.
        distributed: As for `sensitivity`.
        kept: As for `sensitivity`.

    Returns:
        The best of all measured plans. With a budget of time or size it is never worse than `plan`
        on these batches; with a budget of score it is the fastest that reaches the score.

    Raises:
        ValueError: `plan` or the table belongs to another model, the plan exceeds the budget,
            the table's metric is missing, the score exceeds the float model's, or `batches`
            is empty or an iterator.

    Example:
        >>> import torch
        >>> from torch import nn
        >>> from bevquant_quantizers import calibrate
        >>> from bevquant_qnn import assign_precision, quantize_model, sensitivity
        >>> net = nn.Sequential(nn.Conv2d(3, 8, 3), nn.ReLU(), nn.Conv2d(8, 4, 1))
        >>> images = [torch.randn(2, 3, 8, 8)]
        >>> net = quantize_model(net, example_inputs=images[0]).model
        >>> report = calibrate(net, images)
        >>> table, budget = sensitivity(net, images), Budget(time=1.6)
        >>> plan = assign_precision(net, table, budget)
        >>> found = refine_plan(net, plan, images, table, budget)
        >>> found.plan.measured, found.plan.score >= found.start.score, found.plan.time <= 1.6
        (True, True, True)
    """
    space = plan_space(model, table, costs, "refine_plan")
    start = _start(space, plan)
    _check(space, start, table, budget, metric, batches)
    score = score_of(table.metric if metric is None else metric, reduce)

    def cost(chosen: Precisions) -> float:
        time, size = space.costs(chosen)
        return size if budget.by_size else time

    trials = _Trials(
        model, space, cost, batches, score, tuple(outputs), on_batch(forward), distributed, kept
    )
    search = _Search(space, trials, budget)
    trials.measure(start, search.weighted(_own_precisions(space)))
    for _ in range(rounds):
        before = search.best()
        trials.measure(before, search.changed_alone(before))
        trials.measure(before, search.changed_together(before))
        if search.best() == before:
            break
    best = search.best()
    if budget.score is not None and trials.scores[best] < budget.score and "float" in costs:
        best = cast(Precisions, ("float",) * len(best))  # which reaches it, as was checked
        trials.measure(best)

    def planned(chosen: Precisions) -> PrecisionPlan:
        return space.plan(chosen, trials.scores[chosen], measured=True)

    measured = tuple((cost(chosen), score) for chosen, score in trials.scores.items())
    if interval is None and reduce is None:
        interval = partial(drawn_interval, reduce=score.reduce)
    intervals = {}
    for chosen in sorted(trials.front, key=cost):
        ends = None if interval is None else interval(trials.front[chosen])
        if ends is not None:
            intervals[cost(chosen), trials.scores[chosen]] = ends
    return RefinedPlan(planned(best), planned(start), len(measured), measured, intervals)


class _Trials:
    """Runs plans and remembers what they scored, by the precisions of the table's rows.

    A plan is run as a change of another one, the base: what comes before the first group that
    differs, and branches beside those that do, are answered from the base's recorded run. Results
    are those of full runs, bit for bit. The batches are gone through once a `measure`.
    """

    def __init__(
        self,
        model: nn.Module,
        space: PlanSpace,
        cost: Callable[[Precisions], float],
        batches: Iterable[Any],
        score: Score,
        outputs: tuple[str, ...],
        run: Forward,
        distributed: bool | None,
        kept: Kept | None = None,
    ) -> None:
        self._model, self._batches, self._score = model, batches, score
        self._outputs, self._run, self._distributed = outputs, run, distributed
        self._kept, self._times = kept, 0
        groups = {frozenset(group.modules): group for group in space.groups}
        self._at: list[dict[str, _Settings]] = []
        for row, choices in zip(space.table, space.choices, strict=True):
            group = groups[frozenset(row.modules)]
            active = [q for q in group.quantizers if not q._disabled]
            self._at.append(
                {
                    choice.precision: settings_at(model, group, choice.precision, active)
                    for choice in choices
                }
            )
        self.scores: dict[Precisions, float] = {}
        # Results of all batches, of plans that no other one beats in cost and score.
        self.front: dict[Precisions, Sequence[Any]] = {}
        self._cost = cost

    def measure(self, base: Precisions, others: Iterable[Precisions] = ()) -> None:
        """Run `base` and plans that differ from it, but for those that are known."""
        wanted = [p for p in dict.fromkeys((base, *others)) if p not in self.scores]
        if not wanted:
            return
        results = deal_out(
            self._batches,
            lambda batch: self._of_batch(batch, base, wanted),
            self._distributed,
            step=f"plans-{self._times}",
            kept=self._kept,
        )
        self._times += 1
        if not results:
            raise ValueError("refine_plan: there were no batches; give at least one")
        for precisions, of_batches in zip(wanted, zip(*results, strict=True), strict=True):
            self.scores[precisions] = float(self._score.reduce(of_batches))
            self.front[precisions] = of_batches
        best = -math.inf
        for plan in sorted(self.front, key=lambda p: (self._cost(p), -self.scores[p])):
            if self.scores[plan] <= best:
                del self.front[plan]
            best = max(best, self.scores[plan])

    def _of_batch(self, batch: Any, base: Precisions, plans: Sequence[Precisions]) -> list[Any]:
        """Score of one batch for each plan."""

        def run(model: nn.Module) -> Any:
            return self._run(model, batch)

        found = []
        with evaluation(self._model):  # quantizers are off there
            reference = Replay(self._model, run, self._outputs).output
            with set_for_now(self._settings(base)):
                replay = Replay(self._model, run, self._outputs)
                # Only the quantizers that differ: the replay answers all calls that these do not
                # reach.
                for plan in plans:
                    changed = self._settings(plan, base)
                    with set_for_now(changed):
                        output = replay(changed)
                        found.append(self._score.of_batch(output, reference, batch))
        return found

    def _settings(self, plan: Precisions, base: Precisions | None = None) -> _Settings:
        """Of all rows, or of those that differ from `base`."""
        parts = (
            at[name].items()
            for i, (at, name) in enumerate(zip(self._at, plan, strict=True))
            if base is None or name != base[i]
        )
        return dict(chain.from_iterable(parts))


class _Search:
    """Choice of the next plans from the measured ones."""

    def __init__(self, space: PlanSpace, trials: _Trials, budget: Budget) -> None:
        self._space, self._trials, self._budget = space, trials, budget
        self._loss_of = loss_of(space.table.metric)

    def best(self) -> Precisions:
        """The best plan that was run within the budget; the earliest of equals."""
        scores = self._trials.scores
        least = self._budget.score
        if least is None:
            # The plan to start from is one of them, as `_check` requires.
            within = [p for p in scores if self._budget.fits(*self._space.costs(p))]
            return max(within, key=lambda p: (scores[p], *(-c for c in self._space.costs(p))))
        reached = [p for p in scores if scores[p] >= least]
        if reached:
            return min(reached, key=lambda p: (self._space.costs(p)[0], -scores[p]))
        return max(scores, key=lambda p: scores[p])

    def weighted(self, own: Sequence[Precision | None]) -> Iterator[Precisions]:
        """The best by losses alone, by losses in company, and by means of both."""
        table = self._space.table
        for share in _SHARES_IN_COMPANY:
            groups = []
            for row, choices, name in zip(table, self._space.choices, own, strict=True):
                alone = {choice.precision: choice.loss for choice in choices}
                factor = 1.0
                if row.without is not None and table.quantized_score is not None:
                    factor = self._in_company(row.without, alone.get(name or "float", 0.0))
                mixed = 1 - share + share * factor
                groups.append([c._replace(loss=c.loss * mixed) for c in choices])
            yield from self._fitting(groups, 0.0, _PARTS_AT_FIRST)

    def _in_company(self, without: float, alone: float) -> float:
        """Ratio of a group's loss among quantized groups to its loss alone."""
        quantized = self._space.table.quantized_score
        assert quantized is not None
        gained = self._loss(quantized) - self._loss(without)
        return max(0.0, gained / alone) if alone > 0 else 1.0

    def changed_alone(self, base: Precisions) -> Iterator[Precisions]:
        """`base` with one group at another precision, whether in the budget or not."""
        for i, choices in enumerate(self._space.choices):
            for choice in choices:
                if choice.precision != base[i]:
                    yield (*base[:i], choice.precision, *base[i + 1 :])

    def changed_together(self, base: Precisions) -> Iterator[Precisions]:
        """The best plans by measured gains of changes of `base`, from few changes to many."""
        scores = self._trials.scores
        here = self._loss(scores[base])
        groups: list[list[Choice]] = []
        for i, choices in enumerate(self._space.choices):
            losses = (
                self._loss(scores[(*base[:i], choice.precision, *base[i + 1 :])]) - here
                for choice in choices
            )
            groups.append([c._replace(loss=loss) for c, loss in zip(choices, losses, strict=True)])
        largest = max(abs(choice.loss) for choices in groups for choice in choices)
        for part in _LEAST_GAINS:
            charged = [
                [
                    choice._replace(loss=choice.loss + part * largest * (choice.precision != name))
                    for choice in choices
                ]
                for choices, name in zip(groups, base, strict=True)
            ]
            yield from self._fitting(charged, here, _PARTS_IN_ROUNDS)

    def _fitting(
        self, groups: Sequence[Sequence[Choice]], known: float, parts: Sequence[float]
    ) -> Iterator[Precisions]:
        """The best choices within the budget; for a score, those for `parts` of its loss.

        `known` is added to their losses.
        """
        if self._budget.score is None:
            for point in fitting(groups, self._budget, _POINTS):
                yield point.precisions()
            return
        # Losses are estimates, so plans around the limit are tried.
        points, most = front(groups, _POINTS), self._loss(self._budget.score)
        for part in parts:
            reached = (point for point in points if known + point.loss <= part * most)
            point = next(reached, points[-1])
            yield point.precisions()

    def _loss(self, score: float) -> float:
        return self._loss_of(score, self._space.table.float_score)


def _start(space: PlanSpace, plan: PrecisionPlan) -> Precisions:
    """The plan's precision for each row of the table; refuses another model's plan."""
    planned = {frozenset(group.modules): group.precision for group in plan}
    if {frozenset(group.modules) for group in space.groups} != planned.keys():
        raise ValueError(
            "refine_plan: the plan is another model's: its groups of layers are not this one's. "
            "Make it from this model"
        )
    start = tuple(planned[frozenset(row.modules)] for row in space.table)
    for row, choices, name in zip(space.table, space.choices, start, strict=True):
        if name not in {choice.precision for choice in choices}:
            raise ValueError(
                f"refine_plan: the plan has {row.name} in {name}, which was not measured or has no "
                f"cost; possible are {', '.join(choice.precision for choice in choices)}"
            )
    return start


def _check(
    space: PlanSpace,
    start: Precisions,
    table: SensitivityTable,
    budget: Budget,
    metric: str | Metric | None,
    batches: Iterable[Any],
) -> None:
    if isinstance(batches, Iterator):
        raise ValueError("refine_plan: batches are gone through several times; give a list of them")
    time, size = space.costs(start)
    if not budget.fits(time, size):
        raise ValueError(
            f"refine_plan: the plan takes {time:.4g} of the int8 model's time and {size:.4g} of "
            f"its size, more than {budget.text()}; give assign_precision's for that budget"
        )
    if budget.score is not None and budget.score > table.float_score:
        raise ValueError(
            f"refine_plan: no plan reaches {table.metric} {budget.score:g}; float has "
            f"{table.float_score:.4g}"
        )
    if metric is None and table.metric not in ("sqnr", "kl"):
        raise ValueError(
            f"refine_plan: the table was measured with a function, {table.metric}; give it as "
            "metric, and its reduce"
        )


def _own_precisions(space: PlanSpace) -> list[Precision | None]:
    """Precision of each row of the table in the quantized model; None for bits without one."""
    groups = {frozenset(group.modules): group for group in space.groups}
    own: list[Precision | None] = []
    for row in space.table:
        group = groups[frozenset(row.modules)]
        try:
            own.append(own_precision(group.inputs, group.weights, "refine_plan"))
        except ValueError:
            own.append(None)
    return own
