"""compare(): what its numbers say, and that it finds the layer that is wrong."""

from __future__ import annotations

import copy
import json
import math

import pytest
import torch
from torch import nn

from bevquant_int8sim import IntegerModel, LayerComparison, compare, simulate
from bevquant_qnn import quantize_model
from bevquant_quantizers import calibrate


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv1 = nn.Conv2d(3, 8, 3, padding=1)
        self.conv2 = nn.Conv2d(8, 8, 3, padding=1)
        self.relu = nn.ReLU()
        self.out = nn.Conv2d(8, 4, 1)

    def forward(self, x):
        x = self.relu(self.conv1(x))
        x = self.relu(self.conv2(x) + x)
        return self.out(x)


def images(seed):
    return torch.randn(2, 3, 12, 12, generator=torch.Generator().manual_seed(seed))


@pytest.fixture(scope="module")
def models():
    torch.manual_seed(3)
    net = Net().eval()
    quantized = quantize_model(net, example_inputs=images(0)).model
    calibrate(quantized, [images(0)], method="mse")
    return net, quantized


def test_layers_agree_within_one_step_on_the_same_inputs(models):
    table = compare(*models, [images(s) for s in range(3)])
    assert [row.path for row in table.rows] == ["x", "conv1", "conv2", "<add>", "out"]
    steps = [row.forced_max_steps for row in table.rows]
    assert all(s is None or s <= 1 for s in steps)
    assert table.wrong == ()
    assert all(row.values == 3 * table.rows[0].values // 3 for row in table.rows[:1])


def test_a_callers_autocast_changes_no_number(models):
    net, quantized = models
    x, model = images(0), simulate(quantized, images(0))
    table, result = compare(net, model, [x]), model(x)
    with torch.autocast("cpu"):
        assert str(compare(net, model, [x])) == str(table)
        assert torch.equal(simulate(quantized, x)(x), result)
        assert torch.equal(model.run(x)[0], result)


def test_a_float_model_of_another_type_is_refused(models):
    net, quantized = models
    refused = r"conv1\.weight is torch\.float16 in the float model and torch\.float32"
    with pytest.raises(ValueError, match=refused):
        compare(copy.deepcopy(net).half(), quantized, [images(0)])


def test_without_values_nothing_was_compared(models):
    table = compare(*models, [images(0)[:0]])
    assert "nothing was compared" in str(table)


def test_a_batch_norm_that_became_a_convolution_is_compared_with_the_batch_norm():
    torch.manual_seed(3)
    net = nn.Sequential(nn.Conv2d(3, 8, 3), nn.ReLU(), nn.BatchNorm2d(8)).eval()
    net[2].running_mean.uniform_(-1, 1)
    nn.init.normal_(net[2].weight)
    quantized = quantize_model(net, example_inputs=images(0)).model
    calibrate(quantized, [images(0)])
    table = compare(net, quantized, [images(0)])
    assert table.rows[-1].path == "2"
    assert table.rows[-1].integer_sqnr_db > 30
    net[2] = nn.LayerNorm(8)
    with pytest.raises(ValueError, match=r"2\.weight has shape \(8,\)"):
        compare(net, quantized, [images(0)])


def test_batches_measured_apart_give_the_table_of_one_process(models):
    net, quantized = models
    model = simulate(quantized, images(0))
    here, there = LayerComparison(net, model), LayerComparison(net, model)
    shared = {s: (here if s % 2 else there).measure(images(s)) for s in (1, 3, 0, 2)}
    for s in range(4):
        here.add(shared[s])
    assert here.table() == compare(net, model, [images(s) for s in range(4)])
    assert here.table().rows[0].values == 4 * images(0).numel()
    with pytest.raises(ValueError, match="same model"):
        here.add({name: values[1:] for name, values in shared[0].items()})


class Deep(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.Sequential(*(nn.Conv2d(3, 3, 3, padding=1) for _ in range(30)))
        self.offset = nn.Parameter(torch.ones(1, 3, 1, 1))  # read at the end, an input at the start

    def forward(self, x):
        return self.layers(x) + self.offset


def test_memory_does_not_grow_with_depth():
    net = Deep().eval()
    quantized = quantize_model(net, example_inputs=images(0)).model
    calibrate(quantized, [images(0)])
    held = []

    class Counted(LayerComparison):
        def judge(self, node, made, *runs):
            held.append(len(made))
            super().judge(node, made, *runs)

    comparison = Counted(net, simulate(quantized, images(0)))
    for _ in range(2):  # the second batch starts anew
        comparison.add(comparison.measure(images(0)))
    assert len(comparison.table().rows) > 30
    assert 0 < max(held) <= 4


def test_numbers_equal_their_definitions(models):
    net, quantized = models
    model = simulate(quantized, images(0))
    image = images(5)
    row = next(r for r in compare(net, model, [image]).rows if r.path == "out")
    wanted, fake = net(image).double().detach(), quantized(image).double().detach()
    got = model(image).double()
    sqnr = 10 * math.log10(float(wanted.square().sum() / (fake - wanted).square().sum()))
    assert row.fake_sqnr_db == pytest.approx(sqnr, abs=1e-6)
    sqnr = 10 * math.log10(float(wanted.square().sum() / (got - wanted).square().sum()))
    assert row.integer_sqnr_db == pytest.approx(sqnr, abs=1e-6)
    cosine = torch.cosine_similarity(wanted.flatten(), got.flatten(), 0)
    assert row.integer_cosine == pytest.approx(float(cosine), abs=1e-9)
    assert row.max_steps is None


def test_peaks_and_saturation(models):
    net, quantized = models
    image = images(6) * 3
    model = simulate(quantized, image)
    rows = {row.path: row for row in compare(net, model, [image]).rows}
    _, recorded = model.run(image)
    scale = recorded["x"].scale
    beyond = torch.round(image.double() / scale)
    assert rows["x"].saturated == pytest.approx(
        float(((beyond > 127) | (beyond < -128)).double().mean())
    )
    step = next(step for step in model.steps if step.path == "conv1")
    x, w = recorded["x"].value.double(), step.tensors["weight"].double()
    acc = nn.functional.conv2d(x, w, step.tensors["bias"].double(), padding=1)
    assert rows["conv1"].peak_bits == 1 + int(acc.abs().max()).bit_length()


def test_finds_the_layer_that_is_wrong(models):
    net, quantized = models
    model = simulate(quantized, images(0))
    step = next(step for step in model.steps if step.path == "conv2")
    step.tensors["weight"][3] *= -1
    table = compare(net, model, [images(1)])
    first = table.first_departure
    assert first is not None
    assert first.path == "<add>"  # conv2 hands its accumulators to the addition
    assert "departs first" in str(table)
    assert json.loads(table.to_json())["first_departure"] == "<add>"
    good = compare(net, quantized, [images(1)])
    assert good.first_departure is None or good.first_departure.max_steps <= 3


def test_coarse_biases_are_the_reason_given():
    net = nn.Sequential(nn.Conv2d(3, 4, 1), nn.ReLU(), nn.Conv2d(4, 2, 1)).eval()
    with torch.no_grad():
        net[0].weight.mul_(1e-4).add_(1.0)
    quantized = quantize_model(net, example_inputs=images(0)).model
    calibrate(quantized, [images(0)], method="max")
    quantized[0]._input_quantizer.amax.mul_(2000.0)
    quantized[0]._weight_quantizer.amax = quantized[0].weight.detach().abs().amax((1, 2, 3), True)
    quantized[2]._input_quantizer.amax.mul_(0.001)
    table = compare(net, quantized, [images(0)])
    row = next(r for r in table.rows if r.path == "0")
    assert row.forced_max_steps is not None
    if row.forced_max_steps > 1:
        assert "bias rounded" in row.why
    assert table.wrong == ()


class Overwrites(nn.Module):
    """Adds in place, in float: the convolution's output is gone behind it."""

    def __init__(self):
        super().__init__()
        self.float_conv = nn.Conv2d(3, 3, 3, padding=1)
        self.conv = nn.Conv2d(3, 4, 1)

    def forward(self, x):
        y = self.float_conv(x)
        y += x
        return self.conv(torch.sigmoid(y))


def test_what_is_overwritten_later_is_compared_as_it_was():
    torch.manual_seed(0)
    net = Overwrites().eval()
    quantized = quantize_model(net, example_inputs=images(0)).model
    for name in ("_input_quantizer", "_weight_quantizer"):
        quantized.float_conv._modules[name].disable()
    calibrate(quantized, [images(0)], method="max")
    image = images(1)
    rows = {(row.path, row.op): row for row in compare(net, quantized, [image]).rows}
    assert any("add" in op for _, op in rows), rows
    assert rows["float_conv", "conv2d"].integer_sqnr_db is None  # equal
    _, recorded = simulate(quantized, image).run(image)
    assert torch.equal(recorded["float_conv"].value, net.float_conv(image).detach())


def test_json_holds_every_row(models):
    table = compare(*models, [images(0)])
    data = json.loads(table.to_json())
    assert data["schema"] == 1
    assert [row["path"] for row in data["rows"]] == [row.path for row in table.rows]


def test_refusals(models, tmp_path):
    net, quantized = models
    with pytest.raises(ValueError, match="no batches"):
        compare(net, quantized, [])
    with pytest.raises(ValueError, match=r"no parameter or buffer 'conv1\.weight'"):
        compare(nn.Sequential(), quantized, [images(0)])
    simulate(quantized, images(0)).save(tmp_path / "model")
    with pytest.raises(ValueError, match="loaded from a file"):
        compare(net, IntegerModel.load(tmp_path / "model"), [images(0)])


class Chosen(nn.Module):
    """Values decide which rows remain."""

    def __init__(self, choose):
        super().__init__()
        self.first, self.score, self.head = nn.Linear(8, 16), nn.Linear(16, 1), nn.Linear(16, 4)
        self.choose = choose

    def forward(self, x):
        x = self.first(x).relu()
        return self.head(self.choose(x, self.score(x)[:, 0])).sigmoid()


CHOICES = {
    "mask": lambda x, score: x[score.sigmoid() > 0.5],
    "nonzero": lambda x, score: x[(score > 0).nonzero()[:, 0]],
    "index_select": lambda x, score: x.index_select(0, torch.where(score > 0)[0]),
    "turned": lambda x, score: x.t()[:, score > 0].t(),
}


@pytest.mark.parametrize("choice", CHOICES)
def test_rows_behind_a_choice_are_those_of_the_integer_model(choice):
    torch.manual_seed(0)
    net = Chosen(CHOICES[choice]).eval()
    x, *batches = torch.randn(4, 3000, 8)
    quantized = quantize_model(net, example_inputs=x).model
    calibrate(quantized, [x])
    integer = simulate(quantized, x)
    table = compare(net, integer, batches, verify=True)
    assert table.wrong == ()
    rows = {row.path: row for row in table.rows}
    assert (rows["first"].kept, rows["first"].matched) == (None, None)
    assert rows["first"].values == 3 * 3000 * 16
    head = rows["head"]
    same, own, chosen = head.matched
    assert own == sum(len(net(batch)) for batch in batches)
    assert chosen == sum(len(integer(batch)) for batch in batches)
    assert 0.98 * chosen < same < chosen
    assert head.kept is None
    assert head.values == 4 * chosen
    assert head.integer_sqnr_db > 30
    assert f"{same:,} of {chosen:,} matched" in str(table)
    assert json.loads(table.to_json())["rows"][-1]["matched"] == [same, own, chosen]


class Drops(nn.Module):
    """Hands its values to numpy, which chooses rows."""

    def forward(self, x):
        x = x.detach().numpy()
        return torch.from_numpy(x[x[:, 0] > 0])


def test_rows_that_a_module_chooses_are_counted_and_compared_on_the_same_inputs():
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(8, 16), Drops(), nn.Linear(16, 4), nn.Sigmoid()).eval()
    x, batch = torch.randn(2, 3000, 8)
    quantized = quantize_model(net, example_inputs=x).model
    calibrate(quantized, [x])
    table = compare(net, simulate(quantized, x), [batch], verify=True)
    kept = {row.path: row.kept for row in table.rows}["2"]
    assert kept[:2] == (len(net(batch)), len(quantized(batch)))
    assert kept[0] != kept[1]
    assert "keep different ones" in str(table)
    assert "{:,} / {:,}".format(*kept) in str(table)


class Log(nn.Module):
    """A logarithm of a layer's output, which 8 bits round to 0; a masked score beside it."""

    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(2, 2, bias=False)
        self.layer.weight.data = torch.eye(2)

    def forward(self, x):
        return self.layer(x).log() - torch.tensor([0.0, math.inf]).view(2, 1)


def test_a_result_that_quantization_makes_infinite_is_named():
    x = torch.tensor([[1.0, 1e-4], [0.5, 1.0]])
    quantized = quantize_model(Log().eval(), example_inputs=x).model
    calibrate(quantized, [x], method="max")
    table = compare(Log().eval(), quantized, [x, x])
    last = table.rows[-1]
    assert (last.not_finite, last.fake_sqnr_db, last.integer_cosine) == ((2, 2), -math.inf, None)
    assert "2 fake-quant and 2 integer of 8 values are infinite or NaN" in str(table)
    assert json.loads(table.to_json())["rows"][-1]["not_finite"] == [2, 2]
