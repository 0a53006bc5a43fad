"""The detector's sensitivity: as `bevquant_qnn` measures it, what is refused, and as text."""

from __future__ import annotations

import re
from contextlib import nullcontext
from dataclasses import replace
from typing import Any

import pytest
import torch

from bev_data import InputError
from bevfusion.model import CONFIGS, BEVFusion, build_model, random_weights
from bevfusion.quantization import (
    SensitivityOutcome,
    front_picture,
    measure_sensitivity,
    plan_within,
    sensitivity_output,
    sensitivity_text,
    study_sensitivity,
)
from bevquant_qnn import (
    Budget,
    PlannedGroup,
    PrecisionPlan,
    RefinedPlan,
    SensitivityRow,
    SensitivityTable,
    sensitivity,
)

GROUPS = 40


def made_up() -> SensitivityOutcome:
    """Groups, each half a decibel better than the one before; the worst three in float."""
    names = [f"encoders.camera.backbone.layer{i}.conv" for i in range(GROUPS)]
    rows = tuple(
        SensitivityRow((name, f"{name}_too"), 1000, {"int8": 30 + i / 2, "int16": 60.0}, 20.0)
        for i, name in enumerate(names)
    )
    table = SensitivityTable("sqnr", 144.5, 19.0, rows, 3)
    groups = [PlannedGroup(row.modules, "float" if i < 3 else "int8") for i, row in enumerate(rows)]
    plan = PrecisionPlan(tuple(groups), 1.2, 31.0, "sqnr", size=1.1)
    return SensitivityOutcome(table, "decoder.neck", ("int8", "int16"), plan, "time=1.2")


def test_the_text_has_the_worst_first() -> None:
    headline, table, plan = sensitivity_text(made_up())
    assert headline.startswith("SQNR of the decoder's map, 3 frames, 40 groups of layers: ")
    assert headline.endswith("float 144.5, quantized 19.0 dB")
    lines = table.splitlines()
    assert len(lines) == 2 + GROUPS
    assert lines[2].startswith("camera.backbone.layer0.conv +1 ")
    assert lines[2].split()[-1] == "float"
    # Noise powers halve every 3 dB: 1 of 1 + 10^-0.05 + 10^-0.1 + … .
    share = (1 - 10**-0.05) / (1 - 10 ** (-0.05 * GROUPS))
    assert f"{share:.1%}" in lines[2]
    assert "+1.0" in lines[2]
    assert plan.startswith("Plan for time=1.2: 3 float, 37 int8; estimated time 1.2 and size 1.1 ")


def test_plans_over_time_in_text_and_picture() -> None:
    outcome = made_up()
    plan = outcome.plan
    assert plan is not None
    front = tuple(replace(plan, time=t, score=s) for t, s in ((1.0, 20.0), (2.0, 30.0)))
    exact = tuple(replace(group, precision="float") for group in plan.groups)
    front += (replace(plan, groups=exact, time=4.0, score=144.5),)
    points = ((1.0, 18.0), (1.5, 28.0), (2.0, 26.0))
    refined = RefinedPlan(plan, plan, 3, points, {points[1]: (27.0, 31.0)})
    outcome = replace(outcome, front=front, refined=refined)
    lines = sensitivity_text(outcome)[-1].splitlines()
    assert lines[-3].split()[:3] == ["1.00", "20.0", "18.0"]
    # The best measured plan of more time than the line above; a slower one may be worse.
    assert lines[-2].split()[:5] == ["2.00", "30.0", "28.0", "(27.0", "to"]
    assert lines[-2].endswith("3 float, 37 int8")
    assert lines[-1].split()[:3] == ["4.00", "144.5", "–"]
    picture = front_picture(outcome)
    assert picture is not None
    wide, high = picture["width"], picture["height"]
    assert picture["line"] == [
        (0.0, pytest.approx(high * 11 / 13)),
        (wide, pytest.approx(high / 13)),
    ]
    assert picture["dots"][0] == (0.0, high)
    assert picture["intervals"] == [[(wide / 2, pytest.approx(high * 4 / 13)), (wide / 2, 0.0)]]
    measured = outcome.summary()["measured"]
    assert measured[0] == {"time": 1.0, "score": 18.0}
    assert measured[1] == {"time": 1.5, "score": 28.0, "low": 27.0, "high": 31.0}
    by_size = tuple(replace(plan, size=t, score=s) for t, s in ((0.5, 20.0), (1.0, 30.0)))
    by_size = replace(outcome, front=by_size, budget="size=0.7")
    assert sensitivity_text(by_size)[-1].splitlines()[-1].split()[:2] == ["1.00", "30.0"]
    assert by_size.summary()["measured"][0] == {"size": 1.0, "score": 18.0}
    picture = front_picture(by_size)
    assert picture is not None
    assert picture["ends"][:2] == ["0.50", "2.00"]
    assert front_picture(made_up()) is None


def test_a_gain_that_rounds_to_nothing_has_no_minus() -> None:
    outcome = made_up()
    rows = tuple(replace(row, without=18.999) for row in outcome.table)
    _, table, _ = sensitivity_text(replace(outcome, table=replace(outcome.table, rows=rows)))
    assert "+0.0" in table
    assert "-0.0" not in table


@pytest.fixture(scope="module")
def detector() -> tuple[BEVFusion, Any]:
    return quantized("decoder")


def quantized(*parts: str) -> tuple[BEVFusion, Any]:
    """A LiDAR encoder and a decoder, with these parts quantized, and their only frame."""
    from bevfusion.model import example_batch
    from bevfusion.quantization import fuse_detector, quantize_detector
    from bevquant_quantizers import calibrate

    sizes = CONFIGS["tiny"]
    batch = example_batch(sizes)._replace(images=None, depth=None, cells=None)
    model = build_model(sizes, ("lidar", "decoder")).eval()
    random_weights(model, *batch, seed=0)
    fused = fuse_detector(model, batch).model
    made: Any = quantize_detector(fused, batch, parts, method="max").model
    calibrate(made, [batch], forward=lambda net, given: net(*given), method="max")
    return made, [batch]


def test_it_is_the_measurement_of_any_model(detector: tuple[BEVFusion, Any]) -> None:
    model, batches = detector
    before = []
    table = measure_sensitivity(model, batches, without=False, before_each=lambda: before.append(1))
    plain = sensitivity(model, [tuple(batches[0])], "sqnr", without=False)
    assert [row.alone for row in table] == [row.alone for row in plain]
    assert before
    assert torch.isfinite(torch.tensor([row.alone["int8"] for row in table])).all()
    everything = plan_within(model, table, Budget(time=1.0))
    assert {group.precision for group in everything} == {"int8"}
    with pytest.raises(InputError, match="no plan"):
        plan_within(model, made_up().table, Budget(time=1.0))


class Frames(list):
    """Batches as `FrameBatches` has them in one process, where nothing is shared."""

    def share_notes(self, shards: object) -> None:
        pass


def test_a_study_measures_and_plans_in_the_budget(detector: tuple[BEVFusion, Any]) -> None:
    model, batches = detector
    steps: list[str] = []

    def step(name: str, blame: str) -> Any:
        steps.append(name)
        return nullcontext()

    def study(budget: str) -> SensitivityOutcome:
        return study_sensitivity(
            model, Frames(batches),
            precisions=("int8", "int8"), without=False, budget=budget, rounds=0, step=step,
        )  # fmt: skip

    found = study("time=1.5")
    assert found.precisions == ("int8",)
    assert steps == ["measure", "measure plans"]
    assert found.plan is not None
    assert (found.plan.measured, found.refusal) == (True, "")
    assert found.plan.time is not None
    assert found.plan.time <= 1.5
    with pytest.raises(InputError, match=r"budget='time=0\.4': with precisions='int8' the fastest"):
        study("time=0.4")
    with pytest.raises(InputError, match="budget='score=200': the largest sqnr"):
        study("score=200")


def test_sparse_layers_have_precisions_of_their_own() -> None:
    """As libspconv takes no FP8."""
    model, batches = quantized("lidar", "decoder")
    found = study_sensitivity(
        model, Frames(batches),
        precisions=("fp8",), sparse_precisions=("int8",), without=False, budget="time=1.2",
        rounds=0,
    )  # fmt: skip
    assert found.precisions == ("fp8", "int8")
    assert found.plan is not None
    for row in found.table:
        sparse = row.name.startswith("encoders.lidar")
        assert row.alone.keys() == {"int8" if sparse else "fp8"}
        assert found.plan[row.name] in (*row.alone, "float")
    assert {group.precision for group in found.front[0]} == {"fp8", "int8"}
    text = "\n".join(sensitivity_text(found)).splitlines()
    (line,) = (s for s in text if s.startswith("decoder.neck.quant_concat"))
    assert line.split()[4:6] == ["–", "–"]


@pytest.mark.parametrize(
    ("metric", "output", "told"),
    [
        ("psnr", None, "metric='psnr': expected one of sqnr, kl, mAP"),
        ("sqnr", "boxes", "output='boxes': expected map or heatmap"),
        ("mAP", "map", "output='map': mAP judges the boxes"),
        ("kl", "map", "metric='kl' compares the classes"),
        ("kl", None, "metric='kl': the model is lidar and decoder alone"),
    ],
)
def test_what_cannot_be_scored_is_named(
    detector: tuple[BEVFusion, Any], metric: str, output: str | None, told: str
) -> None:
    with pytest.raises(InputError, match=re.escape(told)):
        sensitivity_output(detector[0], metric, output)
