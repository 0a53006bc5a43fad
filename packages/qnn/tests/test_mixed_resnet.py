"""On a trained network, a plan beats the hand lists that people write, in the same time."""

from __future__ import annotations

import copy

import pytest
import torch

from bevquant_fusion import fuse_model
from bevquant_qnn import (
    BIT_OPERATIONS,
    Budget,
    PrecisionPlan,
    apply_precision,
    assign_precision,
    estimate_sensitivity,
    quantize_model,
    sensitivity,
)
from bevquant_quantizers import calibrate

HAND_LISTS = {
    "first and last in float": {"conv1": "float", "linear": "float"},
    "stem in float": {"conv1": "float", "linear": "float", "layer1.0.conv1": "float"},
    "last stage in 16 bits": {f"layer3.{i}.conv{j}": "int16" for i in range(3) for j in (1, 2)},
}


@pytest.fixture(scope="module")
def measured(trained):
    images, _ = trained.images(32, test=False)
    exact = fuse_model(trained.resnet20(), images[:2]).model
    model = quantize_model(exact, example_inputs=images[:2]).model
    calibrate(model, [images])
    table = sensitivity(model, [images], precisions=("int8", "int16"), without=False)
    return exact, model, table


@pytest.mark.parametrize("name", HAND_LISTS)
def test_beats_a_hand_list_in_the_same_time(measured, trained, name):
    exact, model, table = measured
    held_out, _ = trained.images(64, test=True)
    hand = PrecisionPlan.by_hand(model, HAND_LISTS[name])
    whole = sum(row.operations for row in table)
    time = sum(table[g.modules[0]].operations * BIT_OPERATIONS[g.precision] for g in hand) / whole
    plan = assign_precision(model, table, Budget(time=time))
    assert plan.time <= time * (1 + 1e-9)
    noise = []
    for chosen in (hand, plan):
        tried = copy.deepcopy(model)
        apply_precision(tried, chosen)
        with torch.no_grad():
            noise.append(float((tried(held_out) - exact(held_out)).square().sum()))
    assert noise[1] < noise[0]


def test_the_estimate_from_gradients_ranks_the_layers_as_the_measurement(measured, trained):
    _, model, table = measured
    images, _ = trained.images(32, test=False)
    found = estimate_sensitivity(model, [images])
    apart = [found[row.name].alone["int8"] - row.alone["int8"] for row in table]
    assert max(map(abs, apart)) < 6  # of the 17 dB between the layers
    assert sum(map(abs, apart)) / len(apart) < 1.5
    assert {row.name for row in found.worst_first()[:3]} <= {
        row.name for row in table.worst_first("int8")[:5]
    }
