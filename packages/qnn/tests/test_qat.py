"""Training with quantizers in place: ranges that learn or follow, and the pull to the float net."""

from __future__ import annotations

import copy
import math

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from bevquant_qnn import (
    LearnedRange,
    QuantConfig,
    QuantLinear,
    distillation_loss,
    freeze,
    learn_ranges,
    precision_groups,
    quantize_model,
    sensitivity,
    track_ranges,
)
from bevquant_quantizers import (
    QuantDescriptor,
    TensorQuantizer,
    calibrate,
    fake_quantize,
    load_ranges,
    save_ranges,
)

pytestmark = pytest.mark.filterwarnings("ignore:Using a non-tuple sequence:UserWarning")


def learned(amax, num_bits=4, narrow_range=False):
    """A quantizer that learns its range, and that range as a parameter."""
    axis = 0 if amax.dim() else None
    described = QuantDescriptor(num_bits, axis=axis, narrow_range=narrow_range)
    model = nn.Sequential(TensorQuantizer(described))
    model[0].amax = amax
    (parameter,) = learn_ranges(model)
    return model, parameter


@pytest.mark.parametrize("narrow", [True, False])
@pytest.mark.parametrize("per_channel", [True, False])
def test_lsq_computes_what_is_quantized_with_the_papers_gradient(narrow, per_channel):
    x = torch.randn(3, 40, requires_grad=True)
    shape = (3, 1) if per_channel else ()
    quantize, amax = learned(torch.rand(shape) + 0.5, narrow_range=narrow)
    weights = torch.randn(3, 40)
    y = quantize(x)
    assert torch.equal(y, fake_quantize(x, amax.detach(), 4, False, narrow))
    (y * weights).sum().backward()
    # Equation 3 of the paper, value by value.
    expected, high = torch.zeros(3), 7
    low = -7 if narrow else -8
    for i in range(3):
        step = float(amax.detach().reshape(-1)[i if per_channel else 0]) / high
        for v, w, g in zip(x.detach()[i], weights[i], x.grad[i], strict=True):
            u = float(v) / step
            if u <= low or u >= high:
                slope = low if u <= low else high
                assert g == 0
            else:
                slope = round(u) - u
                assert g == w
            expected[i] += slope * float(w)
    scale = 1 / math.sqrt((40 if per_channel else 120) * high)
    expected = expected if per_channel else expected.sum()
    torch.testing.assert_close(
        amax.grad.reshape(expected.shape), expected * scale * high, rtol=1e-4, atol=1e-4
    )


def test_a_gradient_step_on_the_range_moves_the_step_as_in_the_paper():
    x = torch.randn(200)
    quantize, amax = learned(torch.tensor(1.4))
    quantize(x).square().sum().backward()
    step = torch.tensor(0.2, requires_grad=True, dtype=torch.float64)
    u = x.double() / step
    rounded = (u.clamp(-8, 7).round() - u.clamp(-8, 7)).detach() + u.clamp(-8, 7)
    (rounded * step).square().sum().backward()
    rate = 1e-3
    papers = 0.2 - rate * float(step.grad) / math.sqrt(200 * 7)
    ours = (1.4 - rate * float(amax.grad)) / 7
    assert ours == pytest.approx(papers, rel=1e-5)


@pytest.mark.parametrize("count", [1, 2, 3, 9])
def test_the_steps_gradient_goes_by_how_many_values_share_it(count):
    """q_max·Σ ∂y/∂s/√(N·q_max), of N equal values beyond the range q_max·√(N·q_max)."""
    quantize, amax = learned(torch.tensor(7.0))
    quantize(torch.full((count,), 20.0)).sum().backward()
    assert float(amax.grad) == pytest.approx(7 * 7 * count / math.sqrt(count * 7), rel=1e-6)


def test_a_range_beyond_zero_counts_as_the_smallest():
    quantize, amax = learned(torch.tensor(1.0), 8)
    amax.data.fill_(-0.5)
    y = quantize(torch.tensor([0.3, -2.0]))
    assert y.abs().max() < 1e-5
    y.sum().backward()
    assert amax.grad.isfinite()


def task(bits=4):
    """A float teacher, its quantized copy with weights of few bits, and inputs."""
    torch.manual_seed(5)
    teacher = nn.Sequential(
        nn.Conv2d(3, 12, 3), nn.ReLU(), nn.Conv2d(12, 12, 3), nn.ReLU(), nn.Conv2d(12, 5, 1)
    )
    images = torch.randn(16, 3, 10, 10)
    net = copy.deepcopy(teacher)
    model = quantize_model(net, QuantConfig(weight_bits=bits), images[:2]).model
    calibrate(model, [images])
    return teacher.eval(), model, images


def train(model, teacher, images, groups, steps=40):
    optimizer = torch.optim.Adam(groups)
    losses = []
    for _ in range(steps):
        with torch.no_grad():
            target = teacher(images)
        loss = distillation_loss(model(images), target)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


def test_loss_falls_weights_move_and_ranges_learn():
    teacher, model, images = task(bits=2)
    weights = {name: p.detach().clone() for name, p in model.named_parameters()}
    fixed = {k: v.clone() for k, v in model.state_dict().items() if k.endswith("_amax")}
    parameters = list(model.parameters())
    ranges = learn_ranges(model)
    assert len(ranges) == len(fixed) == 6
    groups = [{"params": parameters, "lr": 2e-3}, {"params": ranges, "lr": 5e-3}]
    losses = train(model, teacher, images, groups)
    assert losses[-1] < 0.4 * losses[0]
    named = dict(model.named_parameters())
    assert all(not torch.equal(named[name], before) for name, before in weights.items())
    assert all(not torch.equal(named[name], before) for name, before in fixed.items())

    output = model(images).detach()
    freeze(model)
    assert {k for k in model.state_dict() if k.endswith("_amax")} == set(fixed)
    assert len(list(model.parameters())) == len(parameters)
    torch.testing.assert_close(model(images).detach(), output, rtol=0, atol=0)


def test_learned_ranges_do_better_than_fixed_ones():
    final = {}
    for learned in (True, False):
        teacher, model, images = task(bits=3)
        # Ranges that are far off, as after another calibration.
        for module in model.modules():
            if isinstance(module, TensorQuantizer):
                module.amax = module.amax * 2.5
        groups = [{"params": list(model.parameters()), "lr": 2e-3}]
        if learned:
            groups.append({"params": learn_ranges(model), "lr": 2e-2})
        final[learned] = train(model, teacher, images, groups)[-1]
    assert final[True] < 0.5 * final[False]


def test_state_dicts_of_learned_and_fixed_ranges_fit_each_other(tmp_path):
    _, fixed, images = task()
    _, learning, _ = task()
    parameters = learn_ranges(learning)
    with torch.no_grad():
        for parameter in parameters:
            parameter.mul_(1.5)
    assert fixed.state_dict().keys() == learning.state_dict().keys()
    fixed.load_state_dict(learning.state_dict())
    assert torch.equal(fixed(images), learning(images))
    _, other, _ = task()
    learning.load_state_dict(other.state_dict())
    assert torch.equal(learning(images), other(images))
    assert all(
        a is b for a, b in zip(parameters, learn_ranges(learning), strict=True)
    )  # a second call changes nothing
    # Ranges as a file, too.
    save_ranges(fixed, tmp_path / "ranges.json")
    load_ranges(learning, tmp_path / "ranges.json")
    assert torch.equal(learning(images), fixed(images))
    assert "lsq" in repr(learning)
    assert torch.equal(copy.deepcopy(learning)(images), fixed(images))


def test_shared_quantizers_learn_one_range(nets):
    images = torch.randn(1, 3, 64, 64)
    model = quantize_model(nets.ResNetFPN().train(), example_inputs=images).model
    calibrate(model, [images])
    before = [group.modules for group in precision_groups(model)]
    ranges = learn_ranges(model, weights=False)
    assert [group.modules for group in precision_groups(model)] == before
    inputs = {q for group in precision_groups(model) for q in group.inputs}
    assert len(ranges) == len(inputs)
    sum(out.square().mean() for out in model(images)).backward()
    assert all(parameter.grad is not None for parameter in ranges)
    weights = [q for group in precision_groups(model) for q in group.weights]
    assert not any(isinstance(q, LearnedRange) for q in weights)


def test_a_model_with_learned_ranges_is_measured_as_it_is():
    _, model, images = task(bits=8)
    before = sensitivity(model, [images])
    learn_ranges(model)
    assert sensitivity(model, [images]) == before


def test_a_sparse_layer_learns_its_ranges(spconv, cloud):
    net = spconv.SparseSequential(spconv.SubMConv3d(4, 6, 3, padding=1, indice_key="k"))
    x = cloud(4)
    model = quantize_model(net, QuantConfig(weight_bits=4), x).model
    calibrate(model, [x])
    ranges = learn_ranges(model)
    model(x).features.square().mean().backward()
    assert [tuple(p.shape) for p in ranges] == [(), (6, 1, 1, 1, 1)]
    assert all(float(p.grad.abs().max()) > 0 for p in ranges)


def test_a_range_of_zero_is_one_to_start_from():
    layer = QuantLinear(2, 2)
    layer._input_quantizer.amax = 0.0
    (start, _) = learn_ranges(layer)
    assert float(start.detach()) == 0.0


def test_ranges_must_be_there_before_they_learn():
    layer = QuantLinear(2, 2)
    with pytest.raises(ValueError, match="_input_quantizer have no range to start from"):
        learn_ranges(layer)
    assert type(layer.input_quantizer) is TensorQuantizer
    assert len(learn_ranges(layer, inputs=False)) == 1


def test_tracked_ranges_are_moving_averages_until_they_are_frozen():
    layer = QuantLinear(2, 2)
    layer.input_quantizer.amax = 1.0
    tracker = track_ranges(layer, 3, decay=0.75)
    expected = 1.0
    for size in (2.0, 8.0, 4.0):
        layer.eval()
        layer(torch.full((1, 2), 100.0))  # evaluation changes nothing
        layer.train()
        layer(torch.full((1, 2), -size))
        expected = 0.75 * expected + 0.25 * size
        assert float(layer.input_quantizer.amax) == pytest.approx(expected)
    assert tracker.frozen
    assert tracker.done == 3
    layer(torch.full((1, 2), 50.0))
    assert float(layer.input_quantizer.amax) == pytest.approx(expected)
    assert not layer._forward_hooks
    assert not layer.input_quantizer._forward_pre_hooks


def test_tracking_goes_on_where_it_stopped_and_leaves_what_is_off():
    layer = QuantLinear(2, 2)
    layer.weight_quantizer.amax = torch.ones(2, 1)
    layer.input_quantizer.disable()
    tracker = track_ranges(layer, 5)
    tracker.done = 4
    layer(torch.ones(1, 2))
    assert layer.input_quantizer.amax is None
    assert torch.equal(layer.weight_quantizer.amax, torch.ones(2, 1))
    assert tracker.frozen
    assert track_ranges(layer, 0).frozen
    with pytest.raises(ValueError, match="steps must not be negative"):
        track_ranges(layer, -1)


def test_divergence_is_torchs():
    student, teacher = torch.randn(6, 5, 3), torch.randn(6, 5, 3)
    q, f = ((t / 2.0).movedim(1, -1).reshape(-1, 5) for t in (student, teacher))
    expected = 4 * F.kl_div(q.log_softmax(1), f.softmax(1), reduction="batchmean")
    found = distillation_loss(student, teacher, kind="kl", temperature=2.0)
    torch.testing.assert_close(found, expected)
    assert distillation_loss(teacher, teacher, kind="kl") == pytest.approx(0, abs=1e-6)


def test_squared_error_is_relative_to_each_output():
    teacher = {"maps": [torch.randn(2, 3), 100 * torch.randn(4)], "count": 3}
    student = {"maps": [teacher["maps"][0] * 1.1, teacher["maps"][1] * 1.1], "count": 3}
    assert float(distillation_loss(student, teacher)) == pytest.approx(0.01, rel=1e-4)
    learner = torch.randn(3, requires_grad=True)
    frozen = torch.randn(3, requires_grad=True)
    distillation_loss(learner, frozen).backward()
    assert frozen.grad is None
    assert learner.grad is not None


@pytest.mark.parametrize(
    ("student", "teacher", "options", "message"),
    [
        (torch.ones(2), torch.ones(3), {}, r"gives \[\(2,\)\], the teacher \[\(3,\)\]"),
        ([], [], {}, "at least one"),
        (torch.ones(2), torch.ones(2), {"kind": "l1"}, "got 'l1'"),
        (torch.ones(2), torch.ones(2), {"temperature": 0.0}, "temperature positive"),
    ],
)
def test_bad_losses_are_named(student, teacher, options, message):
    with pytest.raises(ValueError, match=message):
        distillation_loss(student, teacher, **options)
