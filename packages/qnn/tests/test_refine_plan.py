"""Measured plans: against every plan of a small network, run in full one by one."""

from __future__ import annotations

import copy
import itertools
import math
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from torch import nn

from bevquant_qnn import (
    BIT_OPERATIONS,
    Budget,
    PrecisionPlan,
    apply_precision,
    assign_precision,
    precision_groups,
    quantize_model,
    refine_plan,
    sensitivity,
)
from bevquant_quantizers import calibrate

sys.path.insert(0, str(Path(__file__).parent))
from two_ranks import on_two_ranks

KINDS = ("int4", "int8", "float")
TIMES = (0.8, 1.3, 1.8, 2.4, 3.0)


def chain(seed):
    torch.manual_seed(seed)
    net = nn.Sequential()
    for i in range(5):
        net.append(nn.Conv2d(3 if i == 0 else 6, 6, 1 + 2 * (i % 2)))
        net.append(nn.ReLU())
    batches = [torch.randn(2, 3, 10, 10) for _ in range(2)]
    model = quantize_model(net.eval(), example_inputs=batches[0]).model
    calibrate(model, batches)
    return model, batches


def outputs(model, batches):
    with torch.no_grad():
        return [model(batch) for batch in batches]


def sqnr(got, exact):
    signal = sum(float(f.double().square().sum()) for f in exact)
    noise = sum(
        float((q.double() - f.double()).square().sum()) for q, f in zip(got, exact, strict=True)
    )
    return 10 * math.log10(signal / noise) if noise else 144.5


@pytest.fixture(scope="module", params=[1, 3])
def small(request):
    """A network, its table, and time and score of all 243 plans, each set and run in full."""
    model, batches = chain(request.param)
    table = sensitivity(model, batches, precisions=("int4", "int8"))
    copied, _ = chain(request.param)
    names = [group.name for group in precision_groups(copied)]
    apply_precision(copied, PrecisionPlan.by_hand(copied, {}, "float"))
    exact = outputs(copied, batches)
    whole = sum(row.operations for row in table)
    every = {}
    for kinds in itertools.product(KINDS, repeat=len(names)):
        apply_precision(copied, PrecisionPlan.by_hand(copied, dict(zip(names, kinds, strict=True))))
        pairs = zip(table, kinds, strict=True)
        time = sum(row.operations * BIT_OPERATIONS[kind] for row, kind in pairs) / whole
        every[kinds] = time, sqnr(outputs(copied, batches), exact)
    return SimpleNamespace(model=model, batches=batches, table=table, every=every)


def refined(small, budget, **options):
    plan = assign_precision(small.model, small.table, budget)
    return refine_plan(small.model, plan, small.batches, small.table, budget, **options)


def size_of(model, kinds):
    """Bits of weights at these precisions, of their bits in int8."""
    weights = [m.weight.numel() for m in model.modules() if hasattr(m, "_weight_quantizer")]
    bits = {"int4": 4, "int8": 8, "float": 16}
    return sum(map(math.prod, zip(weights, map(bits.get, kinds), strict=True))) / sum(weights) / 8


def kinds_of(plan):
    return tuple(group.precision for group in plan)


@pytest.mark.parametrize("time", TIMES)
def test_comes_to_the_best_of_all_plans_in_a_time(small, time):
    best = max(score for cost, score in small.every.values() if cost <= time + 1e-9)
    found = refined(small, Budget(time=time))
    assert found.plan.time <= time + 1e-9
    assert found.plan.score >= found.start.score
    assert found.plan.score > best - 0.15
    assert found.tried == len(found.measured) < len(small.every) / 4
    assert (found.plan.time, found.plan.score) in found.measured


def test_comes_to_the_best_of_all_plans_of_a_size(small):
    sizes = {kinds: size_of(small.model, kinds) for kinds in small.every}
    best = max(score for kinds, (_, score) in small.every.items() if sizes[kinds] <= 0.8)
    found = refined(small, Budget(size=0.8))
    assert found.plan.size == pytest.approx(sizes[kinds_of(found.plan)])
    assert found.plan.size <= 0.8
    assert found.plan.score > best - 0.15
    assert (found.plan.size, found.plan.score) in found.measured
    both = refined(small, Budget(size=0.8, time=1.0))
    assert (both.plan.size <= 0.8, both.plan.time <= 1.0 + 1e-9) == (True, True)
    assert both.start.score <= both.plan.score <= found.plan.score


def test_comes_nearer_to_the_best_than_the_estimate(small):
    losses = {"estimated": 0.0, "measured": 0.0}
    for time in TIMES:
        best = max(score for cost, score in small.every.values() if cost <= time + 1e-9)
        found = refined(small, Budget(time=time))
        losses["estimated"] += best - found.start.score
        losses["measured"] += best - found.plan.score
    assert losses["measured"] < 0.3 * losses["estimated"]


@pytest.mark.parametrize("score", [28.0, 32.0, 40.0, 45.0, 50.0])
def test_comes_to_the_fastest_of_all_plans_with_a_score(small, score):
    fastest = min(cost for cost, got in small.every.values() if got >= score)
    found = refined(small, Budget(score=score))
    assert found.plan.score >= score
    assert found.plan.time <= 1.05 * fastest


def test_scores_are_those_of_full_runs(small):
    found = refined(small, Budget(time=1.3))
    for plan in (found.plan, found.start):
        time, score = small.every[kinds_of(plan)]
        assert plan.score == pytest.approx(score, abs=1e-9)
        assert plan.time == pytest.approx(time, rel=1e-12)
        assert plan.measured
    estimate = assign_precision(small.model, small.table, Budget(time=1.3))
    assert kinds_of(found.start) == kinds_of(estimate)
    assert not estimate.measured
    assert "measured" in str(found.plan)
    assert "estimated" in str(estimate)
    assert PrecisionPlan.from_json(found.plan.to_json()) == found.plan


def test_the_best_plans_have_intervals_over_the_batches(small):
    """Of two batches drawn with replacement both ends are those of one batch alone."""
    found = refined(small, Budget(time=1.3))
    points = sorted(found.measured, key=lambda p: (p[0], -p[1]))
    front = [p for i, p in enumerate(points) if all(p[1] > other[1] for other in points[:i])]
    assert list(found.intervals) == front
    assert len(front) > 2
    model = copy.deepcopy(small.model)
    names = [group.name for group in precision_groups(model)]
    for point, ends in found.intervals.items():
        kinds = min(small.every, key=lambda k: math.dist(small.every[k], point))
        plans = {
            "float": dict.fromkeys(names, "float"),
            "plan": dict(zip(names, kinds, strict=True)),
        }
        made = {}
        for name, plan in plans.items():
            apply_precision(model, PrecisionPlan.by_hand(model, plan))
            made[name] = outputs(model, small.batches)
        alone = [sqnr([q], [f]) for q, f in zip(made["plan"], made["float"], strict=True)]
        assert ends == pytest.approx((min(alone), max(alone)), abs=1e-9)


def test_a_bad_plan_by_hand_is_left_behind_and_a_good_one_kept(small):
    (worst, _), *_, (best, _) = sorted(
        ((kinds, score) for kinds, (time, score) in small.every.items() if time <= 1.3),
        key=lambda pair: pair[1],
    )
    groups = [group.name for group in precision_groups(small.model)]
    for kinds in (worst, best):
        hand = PrecisionPlan.by_hand(small.model, dict(zip(groups, kinds, strict=True)))
        found = refine_plan(small.model, hand, small.batches, small.table, Budget(time=1.3))
        assert found.start.score == pytest.approx(small.every[kinds][1], abs=1e-9)
        assert found.plan.score > small.every[best][1] - 0.15
    assert kinds_of(found.plan) == best


def test_without_rounds_only_weighted_means_are_run(small):
    some, more = (refined(small, Budget(time=1.3), rounds=n) for n in (0, 1))
    assert some.tried <= 6
    assert more.tried > some.tried
    assert more.plan.score >= some.plan.score >= some.start.score


def test_the_model_stays_as_it_was(small):
    before, text = outputs(small.model, small.batches), repr(small.model)
    refined(small, Budget(time=1.3), rounds=1)
    after = outputs(small.model, small.batches)
    assert all(torch.equal(a, b) for a, b in zip(before, after, strict=True))
    assert repr(small.model) == text


def least(output, batch):
    return -float(output.double().abs().sum())


def test_a_metric_of_ones_own_and_groups_that_are_off():
    model, batches = chain(1)
    off = precision_groups(model)[1]
    for quantizer in off.quantizers:
        quantizer.disable()
    table = sensitivity(model, batches, least, reduce=min)
    budget = Budget(time=1.5)
    plan = assign_precision(model, table, budget)
    with pytest.raises(ValueError, match="measured with a function, least; give it as metric"):
        refine_plan(model, plan, batches, table, budget)
    found = refine_plan(model, plan, batches, table, budget, metric=least, reduce=min)
    assert found.plan[off.name] == "float"
    assert not found.intervals  # it is unknown how such a score varies
    own = {"metric": least, "reduce": min, "interval": lambda results: (min(results), max(results))}
    ends = refine_plan(model, plan, batches, table, budget, **own).intervals
    assert ends.keys() <= set(found.measured)
    assert all(low == score <= high for (_, score), (low, high) in ends.items())
    apply_precision(model, found.plan)
    got = min(least(output, None) for output in outputs(model, batches))
    assert found.plan.score == got
    assert found.plan.metric == "least"


def test_outputs_inside_the_model_are_scored(small):
    table = sensitivity(small.model, small.batches, outputs=["5"])
    budget = Budget(time=1.3)
    plan = assign_precision(small.model, table, budget)
    found = refine_plan(small.model, plan, small.batches, table, budget, outputs=["5"])
    # What lies behind does not show, so nothing is spent on it.
    assert kinds_of(found.plan)[3:] == ("int8", "int8")
    assert found.plan.score >= found.start.score


def test_two_processes_find_what_one_does(small):
    budget = Budget(time=1.3)
    plan = assign_precision(small.model, small.table, budget)
    copies = [copy.deepcopy(small.model) for _ in range(3)]

    def work(rank):
        return refine_plan(copies[rank], plan, small.batches, small.table, budget, rounds=1)

    assert on_two_ranks(work) == [work(2)] * 2


class Kept(dict):
    """What each batch gave, by the number of the measurement."""

    def load(self, step, index):
        return self.get((step, index))

    def save(self, step, index, results):
        self[step, index] = results


def test_what_is_kept_is_not_run_again(small):
    runs, kept = [], Kept()

    def forward(model, batch):
        runs.append(batch)
        return model(batch)

    found = refined(small, Budget(time=TIMES[0]), forward=forward, kept=kept)
    assert found == refined(small, Budget(time=TIMES[0]))
    assert len({step for step, _ in kept}) * len(small.batches) == len(kept)
    last = max(kept)
    del kept[last]  # as if the run had ended there
    runs.clear()
    assert refined(small, Budget(time=TIMES[0]), forward=forward, kept=kept) == found
    # Forwards get copies.
    assert runs
    assert all(torch.equal(batch, small.batches[last[1]]) for batch in runs)
    assert sum(torch.equal(batch, small.batches[last[1]]) for batch in small.batches) == 1


def test_mistakes_are_refused(small):
    model, table, batches = small.model, small.table, small.batches
    time = Budget(time=1.3)
    plan = assign_precision(model, table, time)
    with pytest.raises(ValueError, match="several times; give a list"):
        refine_plan(model, plan, iter(batches), table, time)
    with pytest.raises(ValueError, match="there were no batches"):
        refine_plan(model, plan, [], table, time)
    with pytest.raises(ValueError, match=r"takes 1\.2.* more than 1\.1 of the int8"):
        refine_plan(model, plan, batches, table, Budget(time=1.1))
    with pytest.raises(ValueError, match="no plan reaches sqnr 200"):
        refine_plan(model, plan, batches, table, Budget(score=200))
    with pytest.raises(ValueError, match="the plan is another model's"):
        refine_plan(model, PrecisionPlan(plan.groups[:2]), batches, table, time)
    wide = PrecisionPlan.by_hand(model, {"0": "int16"})
    with pytest.raises(ValueError, match="has 0 in int16, which was not measured"):
        refine_plan(model, wide, batches, table, time)
