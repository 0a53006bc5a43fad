"""Mixed precision: the best plan of all, obeyed whole, and better than a hand list."""

from __future__ import annotations

import itertools
import json
import math

import pytest
import torch
from torch import nn

from bevquant_qnn import (
    BIT_OPERATIONS,
    Budget,
    PlannedGroup,
    PrecisionPlan,
    SensitivityRow,
    SensitivityTable,
    apply_precision,
    assign_precision,
    freeze,
    plan_front,
    precision_groups,
    quantize_model,
    sensitivity,
)
from bevquant_quantizers import calibrate


def chain(layers=4):
    torch.manual_seed(1)
    net = nn.Sequential()
    for i in range(layers):
        net.append(nn.Conv2d(3 if i == 0 else 6, 6, 1 + 2 * (i % 2)))
        net.append(nn.ReLU())
    images = [torch.randn(4, 3, 16, 16) for _ in range(2)]
    model = quantize_model(net.eval(), example_inputs=images[0]).model
    calibrate(model, images)
    return model, images


@pytest.fixture(scope="module")
def measured():
    model, images = chain()
    table = sensitivity(model, images, precisions=("int4", "int8", "fp8", "int16"), without=False)
    return model, images, table


def every_plan(table, costs, operations=None):
    """(time, loss) of all plans of measured precisions and float."""
    operations = operations or [row.operations for row in table]
    costs = {name: cost for name, cost in costs.items() if name in {*table.rows[0].alone, "float"}}
    whole = sum(operations) * costs["int8"]
    for names in itertools.product(costs, repeat=len(table.rows)):
        pairs = list(zip(table.rows, names, strict=True))
        time = sum(n * costs[name] for n, name in zip(operations, names, strict=True)) / whole
        yield time, sum(table.loss(row, name) for row, name in pairs)


@pytest.mark.parametrize("time", [0.5, 0.9, 1.0, 1.3, 2.2, 4.0])
def test_no_plan_of_the_same_time_is_better(measured, time):
    model, _, table = measured
    plan = assign_precision(model, table, Budget(time=time))
    best = min(loss for cost, loss in every_plan(table, BIT_OPERATIONS) if cost <= time + 1e-9)
    assert plan.time <= time * (1 + 1e-9)
    assert plan.score == pytest.approx(table.score(best), abs=1e-9)


BITS = {"int4": 4, "int8": 8, "fp8": 8, "int16": 8, "float": 16}  # of a weight


@pytest.mark.parametrize("size", [0.5, 0.7, 1.0, 1.5, 2.0])
def test_no_plan_of_the_same_size_is_better(measured, size):
    model, _, table = measured
    weights = [model.get_submodule(row.name).weight.numel() for row in table]
    plan = assign_precision(model, table, Budget(size=size))
    best = min(loss for cost, loss in every_plan(table, BITS, weights) if cost <= size + 1e-9)
    assert plan.size <= size * (1 + 1e-9)
    assert plan.score == pytest.approx(table.score(best), abs=1e-9)


@pytest.mark.parametrize(("time", "size"), [(0.8, 0.9), (1.2, 0.7), (1.8, 0.8), (2.5, 1.5)])
def test_two_limits_are_kept_and_cost_little(measured, time, size):
    model, _, table = measured
    weights = [model.get_submodule(row.name).weight.numel() for row in table]
    both = zip(every_plan(table, BIT_OPERATIONS), every_plan(table, {**BITS}, weights), strict=True)
    best = min(loss for (t, loss), (s, _) in both if t <= time and s <= size)
    plan = assign_precision(model, table, Budget(time=time, size=size))
    assert (plan.time <= time, plan.size <= size) == (True, True)
    assert plan.score > table.score(best) - 0.5


def test_a_front_by_size_has_the_best_plan_of_each_size(measured):
    model, _, table = measured
    plans = plan_front(model, table, 5, by_size=True)
    assert [plan.size for plan in plans] == sorted({plan.size for plan in plans})
    assert (plans[0].size, plans[-1].size) == (pytest.approx(0.5), pytest.approx(2.0))
    for plan in plans:
        assert plan.score == pytest.approx(
            assign_precision(model, table, Budget(size=plan.size)).score
        )


def test_the_front_has_the_best_plan_of_each_time(measured):
    model, _, table = measured
    plans = plan_front(model, table, 6)
    assert [plan.time for plan in plans] == sorted({plan.time for plan in plans})
    assert (plans[0].time, plans[-1].time) == (pytest.approx(0.5), pytest.approx(4.0))
    every = list(every_plan(table, BIT_OPERATIONS))
    for plan in plans:
        best = min(loss for cost, loss in every if cost <= plan.time + 1e-9)
        assert plan.score == pytest.approx(table.score(best), abs=1e-9)
    with pytest.raises(ValueError, match="expected 2 points or more, got 1"):
        plan_front(model, table, 1)


@pytest.mark.parametrize("score", [15.0, 30.0, 45.0, 60.0, 144.0])
def test_no_plan_of_the_same_score_is_faster(measured, score):
    model, _, table = measured
    plan = assign_precision(model, table, Budget(score=score))
    fitting = [c for c, loss in every_plan(table, BIT_OPERATIONS) if table.score(loss) >= score]
    assert plan.score >= score
    assert plan.time == pytest.approx(min(fitting), rel=1e-9)


def test_many_layers_stay_near_the_best():
    # More partial plans than are kept; the best is known where every layer is the same.
    rows = tuple(
        SensitivityRow((f"{i}",), 1000 + i, {"int8": 30.0 - i % 7, "int16": 50.0 - i % 5})
        for i in range(60)
    )
    table = SensitivityTable("sqnr", 144.5, None, rows, 1)
    model = nn.Sequential(*(nn.Conv2d(1, 1, 1) for _ in rows))
    model = quantize_model(model).model
    plan = assign_precision(model, table, Budget(time=1.5))
    assert 1.49 < plan.time <= 1.5
    # The relaxation that may split one layer between two precisions is a bound on any plan.
    whole = sum(row.operations for row in rows)
    loss = sum(table.loss(row, "int8") for row in rows)
    steps = sorted(
        ((table.loss(r, "int8") - table.loss(r, "int16")) / r.operations, r) for r in rows
    )
    left = 0.5 * whole
    for gain, row in reversed(steps):
        loss -= gain * min(left, row.operations)
        left = max(0.0, left - row.operations)
    assert table.score(loss) + 0.2 > plan.score


def test_costs_of_a_chip_decide(measured):
    model, _, table = measured
    costs = {"int8": 3.0, "float": 6.0}  # in any unit; no int16 there
    plan = assign_precision(model, table, Budget(time=2.0), costs=costs)
    assert {group.precision for group in plan} == {"float"}
    tight = assign_precision(model, table, Budget(time=1.2), costs=costs)
    assert {group.precision for group in tight} <= {"int8", "float"}


def test_accuracy_adds_up_as_differences(measured):
    model, _, _ = measured
    rows = tuple(
        SensitivityRow(group.modules, 100, {"int8": 0.9 - 0.01 * i})
        for i, group in enumerate(precision_groups(model))
    )
    table = SensitivityTable("accuracy", 0.9, None, rows, 1)
    plan = assign_precision(model, table, Budget(score=0.87))
    assert [group.precision for group in plan] == ["int8", "int8", "int8", "float"]
    assert plan.score == pytest.approx(0.87)


def test_applied_plan_is_the_model_that_was_measured(measured):
    _, images, table = measured
    for name in ("int4", "int16"):
        copied, _ = chain()
        path = table.rows[2].name
        hand = {row.name: "float" for row in table} | {path: name}
        apply_precision(copied, PrecisionPlan.by_hand(copied, hand))
        again = [copied(batch).detach() for batch in images]
        apply_precision(copied, PrecisionPlan.by_hand(copied, {}, "float"))
        exact = [copied(batch).detach() for batch in images]
        signal = sum(float(f.double().square().sum()) for f in exact)
        noise = sum(
            float((f.double() - q.double()).square().sum())
            for f, q in zip(exact, again, strict=True)
        )
        expected = 10 * math.log10(signal / noise)
        assert table[path].alone[name] == pytest.approx(expected, abs=1e-6)


def test_applying_changes_what_the_plan_names_and_can_be_undone():
    model, images = chain()
    before, text = model(images[0]), repr(model)
    plan = PrecisionPlan.by_hand(model, {"0": "float", "2": "int16", "4": "int4"})
    assert apply_precision(model, plan) == ("0", "2", "4")
    assert apply_precision(model, plan) == ()
    bits = [(m.input_quantizer.num_bits, m.weight_quantizer.num_bits) for m in model[2:6:2]]
    assert bits == [(16, 8), (8, 4)]
    assert model[0].input_quantizer._disabled
    assert model[0].weight_quantizer._disabled
    # 16 bits round finer than any clipping is worth.
    assert model[2].input_quantizer.amax > 0
    freeze(model)
    assert apply_precision(model, PrecisionPlan.by_hand(model, {})) == ("0", "2", "4")
    assert torch.equal(model(images[0]), before)
    assert repr(model) == text


def test_calibration_obeys_the_plan():
    model, images = chain()
    apply_precision(model, PrecisionPlan.by_hand(model, {"0": "float", "2": "int16"}))
    before = model[0].input_quantizer.amax.clone()
    eight = model[2].input_quantizer.amax.clone()
    report = calibrate(model, [batch * 3 for batch in images])
    assert torch.equal(model[0].input_quantizer.amax, before)  # off: not touched
    assert "0._input_quantizer" not in {name for row in report.quantizers for name in row.names}
    assert model[2].input_quantizer.amax > 2 * eight
    assert model[2].input_quantizer._calibrator._num_bits == 16


def test_layers_that_share_a_quantizer_get_one_precision(nets):
    images = torch.randn(1, 3, 64, 64)
    model = quantize_model(nets.ResNetFPN().eval(), example_inputs=images).model
    calibrate(model, [images])
    table = sensitivity(model, [images], precisions=("int8", "int16"), without=False)
    plan = assign_precision(model, table, Budget(time=1.3))
    apply_precision(model, plan)
    assert len({group.precision for group in plan}) > 1
    for holder in model.modules():
        for child in holder.children():
            if hasattr(child, "input_quantizer"):
                weight = getattr(child, "weight_quantizer", None)
                if weight is not None:
                    assert weight._disabled == child.input_quantizer._disabled
    with pytest.raises(ValueError, match="share a quantizer"):
        PrecisionPlan.by_hand(model, {"deeper.0.conv1": "float", "deeper.0.downsample.0": "int8"})


def test_plan_survives_json(tmp_path, measured):
    model, _, table = measured
    plan = assign_precision(model, table, Budget(time=1.3))
    plan.save(tmp_path / "plan.json")
    assert PrecisionPlan.load(tmp_path / "plan.json") == plan
    assert str(plan).count("\n") == len(plan.groups)
    data = json.loads(plan.to_json())
    twice = {**data, "groups": data["groups"] * 2}
    odd = {**data, "groups": [{"precision": "int7", "modules": ["0"]}]}
    bare = {**data, "groups": [{"precision": "int8", "modules": []}]}
    for broken, message in (
        ("{}", "schema None, expected"),
        ("nothing", "malformed"),
        (json.dumps({**data, "schema": 3}), "schema 3, expected"),
    ):
        with pytest.raises(ValueError, match=f"PrecisionPlan.to_json wrote: .*{message}"):
            PrecisionPlan.from_json(broken)
    for document, message in (
        (twice, "listed twice: 0"),
        (odd, r"at groups\[0\]\.precision: .*int7"),
        (bare, r"at groups\[0\]\.modules: .*length >= 1"),
    ):
        with pytest.raises(ValueError, match=message):
            PrecisionPlan.from_json(json.dumps(document))


def test_what_does_not_fit_is_refused_and_nothing_changes(measured):
    model, _, table = measured
    other, _ = chain(3)
    before = repr(other)
    plan = PrecisionPlan.by_hand(model, {}, "float")
    with pytest.raises(ValueError, match=r"6: not in the model.*nothing was changed"):
        apply_precision(other, plan)
    with pytest.raises(ValueError, match="4: not in the plan"):
        apply_precision(other, PrecisionPlan(plan.groups[:2]))
    assert repr(other) == before
    with pytest.raises(ValueError, match="another model's"):
        assign_precision(other, table, Budget(time=1))
    with pytest.raises(ValueError, match=r"the fastest takes 0\.5"):
        assign_precision(model, table, Budget(time=0.2))
    with pytest.raises(ValueError, match=r"no plan takes 0 of the int8 model's time"):
        assign_precision(model, table, Budget(time=0.0))
    with pytest.raises(ValueError, match=r"no plan takes 0\.4 of .* size; .*smallest 0\.5"):
        assign_precision(model, table, Budget(size=0.4))
    with pytest.raises(ValueError, match=r"no plan reaches sqnr 200; float has 144\.5"):
        assign_precision(model, table, Budget(score=200))
    with pytest.raises(ValueError, match="no quantized layer lies at 9"):
        PrecisionPlan.by_hand(model, {"9": "int8"})
    with pytest.raises(ValueError, match="one for 'int8'"):
        assign_precision(model, table, Budget(time=1), costs={"float": 1.0})
    for wrong in ({}, {"score": 1.0, "size": 1.0}, {"time": math.nan}):
        with pytest.raises(ValueError, match="Budget takes"):
            Budget(**wrong)
    with pytest.raises(TypeError, match=r"expected a Budget, as Budget\(time=1.2\), got 0.5"):
        assign_precision(model, table, 0.5)


def test_a_plan_tells_what_it_changes_and_under_what_ranges_are_searched():
    groups = [(("a", "b"), "int16"), (("c",), "float"), (("d",), "int8"), (("e",), "int4")]
    plan = PrecisionPlan(tuple(itertools.starmap(PlannedGroup, groups)), time=1.2)
    first = plan.before_calibration()
    assert [group.precision for group in first] == ["int8", "float", "int8", "int8"]
    assert ([g.modules for g in first], first.time) == ([g.modules for g in plan], 1.2)
    told = {item.path: item.reason for item in plan.other_than_int8()}
    assert list(told) == ["a", "b", "c", "e"]
    assert "activations of 16 bits" in told["b"]
    assert "weights of 4 bits" in told["e"]


@pytest.mark.parametrize(
    "text", ["", "time", "time=fast", "time=nan", "cost=1", "1.2", "time=1,time=2"]
)
def test_a_budget_that_says_something_else_is_refused(text):
    assert Budget.parse("score=35") == Budget(score=35.0)
    assert Budget.parse("time=1.2, size=0.7") == Budget(time=1.2, size=0.7)
    with pytest.raises(ValueError, match=r"write time=1\.2 or size=.* or score=35"):
        Budget.parse(text)
