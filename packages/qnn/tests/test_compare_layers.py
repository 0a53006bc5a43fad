"""The per-layer figures against values worked out by hand."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from bevquant_qnn import LayerComparison, compare_layers, layer_table, quantize_model, sensitivity
from bevquant_quantizers import calibrate
from bevquant_quantizers.ranks import pack, unpack


class Range(nn.Module):
    """Stands for a calibrated quantizer: it has a range, and lets values pass."""

    def __init__(self, amax: Tensor) -> None:
        super().__init__()
        self.num_bits = 8
        self.register_buffer("_amax", amax)

    def forward(self, x: Tensor) -> Tensor:
        return x


class Layer(nn.Module):
    def __init__(self, factor: float, amax: float | None = None) -> None:
        super().__init__()
        self.factor = factor
        if amax is not None:
            self._input_quantizer = Range(torch.tensor(amax))

    def forward(self, x: Tensor) -> Tensor:
        return (self._input_quantizer(x) if hasattr(self, "_input_quantizer") else x) * self.factor


class Model(nn.Module):
    def __init__(self, *layers: nn.Module) -> None:
        super().__init__()
        self.second, self.first = layers[1], layers[0]  # registered against the order of use

    def forward(self, features: Tensor, *_: object) -> Tensor:
        return self.second(self.first(features))


def batch(*rows: list[float]) -> Tensor:
    return torch.tensor(rows)


def test_sqnr_cosine_and_saturation_by_hand() -> None:
    rows = compare_layers(
        Model(Layer(1.0), Layer(1.0)),
        Model(Layer(1.1, amax=2.0), Layer(1.0, amax=100.0)),
        [batch([3.0, 1.0]), batch([0.0, 4.0], [2.0, -2.5])],
    )
    assert [r.layer for r in rows] == ["first", "second", "output"]
    first, second, output = rows
    # The error is a tenth of the signal everywhere: 20 dB; direction unchanged.
    for row in rows:
        assert row.sqnr_db == pytest.approx(20.0, abs=1e-4)
        assert row.cosine == pytest.approx(1.0)
    assert first.saturated == pytest.approx(3 / 6)  # |3|, |4|, |−2.5| beyond 2; 2 itself is not
    assert second.saturated == 0.0
    assert output.saturated is None
    assert (first.channels, first.rows, first.input_amax) == (2, 1.5, 2.0)


def test_decibels_are_pooled_as_powers_not_averaged() -> None:
    class Off(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self._input_quantizer = Range(torch.tensor(9.0))

        def forward(self, x: Tensor) -> Tensor:
            return x + 1

    rows = compare_layers(
        Model(nn.Identity(), nn.Identity()),
        Model(Off(), nn.Identity()),
        [batch([10.0]), batch([1.0])],
    )
    assert rows[0].sqnr_db == pytest.approx(10 * math.log10(101 / 2))
    assert rows[0].cosine == pytest.approx((110 + 2) / math.sqrt(101 * 125))


def test_equal_and_dead_layers_have_no_decibels() -> None:
    x = [batch([1.0])]
    equal = compare_layers(Model(Layer(1), Layer(1)), Model(Layer(1, 1.0), Layer(1)), x)
    dead = compare_layers(Model(Layer(0), Layer(1)), Model(Layer(0, 1.0), Layer(1)), x)
    assert (equal[0].sqnr_db, dead[0].sqnr_db, dead[0].cosine) == (None, None, None)
    assert "–" in layer_table(dead)


def test_batches_that_others_ran_give_the_bits_of_one_process() -> None:
    models = Model(Layer(0.3), Layer(0.7)), Model(Layer(0.31, 2.0), Layer(0.69, 1.0))
    batches = [batch([0.1 * i, 1e4 / (i + 1), -3.3]) for i in range(6)]
    here, there = LayerComparison(*models), LayerComparison(*models)
    records = {}
    for index in (1, 3, 5, 0, 2, 4):
        comparison = there if index % 2 else here
        with comparison.watching():
            record, wanted, got = comparison.run(batches[index])
        records[index] = unpack(pack(record))
        assert torch.equal(got, models[1](batches[index]))
        assert torch.equal(wanted, models[0](batches[index]))
    for index in range(6):
        there.add(records[index])
    whole = compare_layers(*models, batches)
    assert there.rows() == whole


def test_no_batches_are_refused() -> None:
    with pytest.raises(ValueError, match="at least one"):
        compare_layers(Model(Layer(1), Layer(1)), Model(Layer(1, 1.0), Layer(1)), [])


def test_a_model_that_was_quantized_itself_is_refused() -> None:
    net = nn.Sequential(nn.Conv2d(2, 3, 1), nn.ReLU()).eval()
    image = torch.randn(1, 2, 4, 4)
    quantized = quantize_model(net, example_inputs=image, inplace=True).model
    calibrate(quantized, [image])
    with pytest.raises(ValueError, match=r"'0' \(QuantConv2d\) is one object in both.*inplace"):
        compare_layers(net, quantized, [image])


def test_hooks_are_gone_afterwards() -> None:
    models = Model(Layer(1), Layer(1)), Model(Layer(1, 1.0), Layer(1))
    compare_layers(*models, [batch([1.0])])
    for model in models:
        for module in model.modules():
            assert not module._forward_hooks
            assert not module._forward_pre_hooks


def test_table_is_aligned_and_fits_a_terminal() -> None:
    rows = compare_layers(
        Model(Layer(1.0), Layer(1.0)),
        Model(Layer(1.1, amax=2.0), Layer(1.0, amax=100.0)),
        [batch([3.0, 1.0])],
    )
    lines = layer_table(rows).splitlines()
    assert len({len(line) for line in lines}) == 1
    assert len(lines[0]) <= 100
    assert len(lines) == 2 + 3


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.attention = nn.MultiheadAttention(8, 2, batch_first=True)

    def forward(self, features: Tensor, *_: object) -> Tensor:
        return self.attention(features, features, features, need_weights=False)[0]


class Branches(nn.Module):
    """One branch for all decoder layers, as DETR heads without box refinement have it."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(4, 4) for _ in range(2))
        self.branches = nn.ModuleList([nn.Sequential(nn.Linear(4, 4), nn.ReLU())] * 2)

    def forward(self, x: Tensor) -> Tensor:
        made = []
        for layer, branch in zip(self.layers, self.branches, strict=True):
            x = layer(x)
            made.append(branch(x))
        return torch.stack(made)


def test_a_layer_with_several_paths_has_one_row() -> None:
    torch.manual_seed(0)
    model, x = Branches().eval(), torch.randn(3, 4)
    quantized = quantize_model(model, example_inputs=x).model
    calibrate(quantized, [x])
    rows = [row.layer for row in compare_layers(model, quantized, [x])]
    assert sorted(rows) == ["branches.0.0", "layers.0", "layers.1", "output"]


def test_attention_is_compared_where_it_ends() -> None:
    """Torch's own reads the weights of its projections: the output projection is never called."""
    torch.manual_seed(0)
    net, features = Attention().eval(), torch.randn(1, 5, 8)
    quantized = quantize_model(net, example_inputs=(features,)).model
    assert hasattr(quantized.attention.out_proj, "input_quantizer")
    calibrate(quantized, [features])
    rows = compare_layers(net, quantized, [features])
    assert [(row.layer, row.channels) for row in rows[:-1]] == [("attention", 8)]
    assert rows[0].sqnr_db == rows[1].sqnr_db > 20


def test_modules_that_are_watched_hand_out_both_models_outputs() -> None:
    models = Model(Layer(0.5), Layer(1.0)), Model(Layer(0.25, 2.0), Layer(1.0))
    seen: list[tuple[Tensor, ...]] = []
    comparison = LayerComparison(*models, watch={"second": lambda *both: seen.append(both)})
    with comparison.watching():
        comparison.run(batch([4.0]))
    assert [tuple(map(float, both)) for both in seen] == [(2.0, 1.0)]


def test_outputs_without_a_tensor_are_named_and_may_be_read_otherwise() -> None:
    class Answer:
        def __init__(self, value: Tensor) -> None:
            self.value = value

    class Answering(Model):
        def forward(self, features: Tensor, *_: object) -> Answer:
            return Answer(super().forward(features))

    models = Answering(Layer(1.0), Layer(1.0)), Answering(Layer(0.5, 9.0), Layer(1.0))
    with pytest.raises(ValueError, match="a Answer goes in or out"):
        compare_layers(*models, [batch([2.0])])
    rows = compare_layers(*models, [batch([2.0])], output=lambda x: getattr(x, "value", x))
    assert rows[-1].sqnr_db == pytest.approx(20 * math.log10(2))


class Chosen(nn.Module):
    """Values decide which rows remain."""

    def __init__(self, choose: Any = lambda x, score: x[score > 0]) -> None:
        super().__init__()
        self.first, self.score, self.head = nn.Linear(8, 16), nn.Linear(16, 1), nn.Linear(16, 4)
        self.choose = choose

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x).relu()
        return self.head(self.choose(x, self.score(x)[:, 0]))


def _outside(x: Tensor, score: Tensor) -> Tensor:
    return torch.from_numpy(x.numpy()[score.numpy() > 0])


def test_rows_that_one_model_alone_keeps_are_counted_and_not_compared() -> None:
    torch.manual_seed(0)
    net, (x, other) = Chosen().eval(), torch.randn(2, 3000, 8)
    quantized = quantize_model(net, example_inputs=x).model
    calibrate(quantized, [x])
    net.choose = quantized.choose = _outside  # code that torch does not run
    with torch.no_grad():
        kept = len(net(other)), len(quantized(other))
    assert kept[0] != kept[1]
    rows = {row.layer: row for row in compare_layers(net, quantized, [other])}
    assert rows["first"].kept is None
    assert rows["head"].kept == rows["output"].kept == kept
    assert rows["head"].sqnr_db is None
    assert str(kept) in layer_table(list(rows.values()))


CHOICES: dict[str, Any] = {
    "topk": lambda x, score: x[score.topk(200)[1]],
    "values": lambda x, score: x[:200] * score.topk(200, 0)[0][:, None],
    "sort": lambda x, score: x[score.sort(descending=True)[1][:200]],
    "argsort": lambda x, score: x[score.argsort()[2000:][800:]],
    "argmax": lambda x, score: x[score.view(-1, 10).argmax(1) + 10 * torch.arange(300)],
    "max": lambda x, score: x[score.view(-1, 10).max(1)[1] + 10 * torch.arange(300)],
    "mask": lambda x, score: x[score > 0],
    "masked": lambda x, score: x.masked_select((score > 0)[:, None]).view(-1, 16),
    "places": lambda x, score: x[torch.where(score > 0)[0]],
    "nonzero": lambda x, score: x.index_select(0, (score > 0).nonzero()[:, 0]),
}


@pytest.mark.parametrize("name", CHOICES)
def test_rows_of_the_same_objects_are_compared(name: str) -> None:
    torch.manual_seed(0)
    net, (x, other) = Chosen(CHOICES[name]).eval(), torch.randn(2, 3000, 8)
    quantized = quantize_model(net, example_inputs=x).model
    calibrate(quantized, [x, other])
    comparison = LayerComparison(net, quantized)
    with comparison.watching():
        record, wanted, got = comparison.run(other)
    assert torch.equal(wanted, net(other))  # each model's own
    assert torch.equal(got, quantized(other))
    comparison.add(record)
    rows = {row.layer: row for row in comparison.rows()}
    assert (rows["first"].matched, rows["first"].kept) == (None, None)
    head = rows["head"]
    assert head.kept is None
    assert head.sqnr_db is not None
    assert rows["output"].sqnr_db is not None
    assert min(head.sqnr_db, rows["output"].sqnr_db) > 25
    both, own, chosen = head.matched or (0, 0, 0)
    assert (own, chosen) == (len(wanted), len(got))
    assert 0.5 * chosen < both < chosen
    assert str(head.matched) in layer_table(list(rows.values()))
    if name == "topk":
        scores = (m.score(m.first(other).relu())[:, 0] for m in (net, quantized))
        one, two = (set(score.topk(200)[1].tolist()) for score in scores)
        assert both == len(one & two)


PYTHON_CHOICES = {
    "list": lambda x, score: x[sorted(range(3000), key=score.tolist().__getitem__)[:200]],
    "loop": lambda x, score: torch.stack([x[i] for i in score.topk(200)[1].tolist()]),
    "conditions": lambda x, score: torch.stack([x[i] for i in range(3000) if score[i] > 0]),
}


@pytest.mark.parametrize("name", PYTHON_CHOICES)
def test_rows_that_python_code_chooses_are_of_the_same_objects(name: str) -> None:
    torch.manual_seed(0)
    net, (x, other) = Chosen(PYTHON_CHOICES[name]).eval(), torch.randn(2, 3000, 8)
    quantized = quantize_model(net).model
    calibrate(quantized, [x, other])
    comparison = LayerComparison(net, quantized)
    with comparison.watching():
        record, wanted, got = comparison.run(other)
    assert torch.equal(wanted, net(other))  # each model's own
    assert torch.equal(got, quantized(other))
    comparison.add(record)
    head = {row.layer: row for row in comparison.rows()}["head"]
    assert head.sqnr_db is not None
    assert head.sqnr_db > 25
    both, own, chosen = head.matched or (0, 0, 0)
    assert (own, chosen) == (len(wanted), len(got))
    assert 0.5 * chosen < both < max(own, chosen)


@pytest.mark.parametrize("metric", ["sqnr", "kl"])
def test_sensitivity_refuses_outputs_of_other_rows(metric: str) -> None:
    torch.manual_seed(0)
    net, x = Chosen().eval(), torch.randn(3000, 8)
    quantized = quantize_model(net, example_inputs=x).model
    calibrate(quantized, [x])
    with pytest.raises(ValueError, match="values decide which rows remain"):
        sensitivity(quantized, [x], metric)
    assert len(sensitivity(quantized, [x], metric, outputs=["score"]).rows) == 3


class Inside(nn.Module):
    """Adds two maps of a list in place, and returns nothing."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(3, 3, 1)

    def forward(self, maps: list[Tensor]) -> None:
        maps[0] = self.conv(maps[0]) + maps[1]


class InPlace(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.inside, self.last = nn.Conv2d(3, 3, 1), Inside(), nn.Conv2d(3, 3, 1)

    def forward(self, x: Tensor) -> Tensor:
        maps = [self.first(x), x]
        self.inside(maps)
        return self.last(maps[0])


def test_modules_that_return_nothing_are_passed_over() -> None:
    torch.manual_seed(0)
    model, x = InPlace().eval(), torch.randn(2, 3, 4, 4)
    quantized = quantize_model(model, example_inputs=x).model
    calibrate(quantized, [x])
    rows = {row.layer: row for row in compare_layers(model, quantized, [x])}
    assert {"first", "inside.conv", "last", "output"} <= set(rows)
    assert "inside" not in rows
    assert rows["output"].sqnr_db is not None


class Log(nn.Module):
    """A logarithm of a layer's output, which 8 bits round to 0."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(2, 2, bias=False)
        self.layer.weight.data = torch.eye(2)

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x).log()


def test_a_result_that_quantization_makes_infinite_is_not_shown_as_equal() -> None:
    x = torch.tensor([[1.0, 1e-4], [0.5, 1.0]])
    quantized = quantize_model(Log().eval(), example_inputs=x).model
    calibrate(quantized, [x], method="max")
    layer, output = rows = compare_layers(Log().eval(), quantized, [x, x])
    assert (layer.not_finite, output.not_finite, output.sqnr_db) == (0, 2, -math.inf)
    assert layer_table(rows).splitlines()[0].endswith("not finite")
