"""Layers to move to the CPU: what is promised holds when a model is really prepared so."""

import copy
import functools
import json
import math
import re

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import nn

from bevquant_hybrid import march, qat_mode, quantization
from bevquant_hybrid.operators import OperatorCall
from bevquant_hybrid.partition import CpuSuggestion, partition, suggest_cpu
from bevquant_hybrid.quantization import (
    DeQuantStub,
    FakeQuantState,
    QuantStub,
    convert_fx,
    fuse_fx,
    get_default_calib_qconfig,
    get_default_qat_out_qconfig,
    get_default_qat_qconfig,
    prepare_calibration_fx,
    prepare_qat_fx,
    set_fake_quantize,
)
from bevquant_hybrid_tools.performance import (
    ChipFigures,
    Figure,
    estimate_cpu_layers,
    load_chip_figures,
)
from bevquant_hybrid_tools.suggestion import output_sqnr

CALIB = {"": get_default_calib_qconfig()}
QAT = {"": get_default_qat_qconfig()}


class Outlier(nn.Module):
    """The weights of `hard` for one input, which is always 0, are 1000 times the others."""

    def __init__(self):
        super().__init__()
        self.quant, self.dequant = QuantStub(), DeQuantStub()
        self.stem = nn.Sequential(nn.Conv2d(3, 6, 3, padding=1), nn.BatchNorm2d(6), nn.ReLU())
        self.easy = nn.Sequential(nn.Conv2d(6, 6, 1), nn.ReLU())
        self.hard, self.head = nn.Conv2d(6, 6, 3, padding=1), nn.Conv2d(6, 4, 1)
        with torch.no_grad():
            self.easy[0].bias[0] = -100
            self.hard.weight[:, 0] *= 1000

    def forward(self, x):
        x = self.hard(self.easy(self.stem(self.quant(x))))
        return self.dequant(self.head(F.relu(x) + x))


class SmallChannel(Outlier):
    """One output channel of `easy` is a thousandth of the others, and counts as much."""

    def __init__(self):
        super().__init__()
        with torch.no_grad():
            self.easy[0].weight[0] /= 1000
            self.easy[0].bias.zero_()


def seeded(make, *args, **kwargs):
    torch.manual_seed(3)
    return make(*args, **kwargs).eval()


@pytest.fixture(scope="module")
def batches():
    generator = torch.Generator().manual_seed(0)
    return [torch.randn(2, 3, 8, 8, generator=generator) for _ in range(2)]


def calibrated(net, batches, qconfig=None, **settings):
    model = prepare_calibration_fx(net, qconfig or CALIB, **{"hybrid": True, **settings}).eval()
    for batch in batches:
        model(*batch) if isinstance(batch, tuple) else model(batch)
    return model


def trained(net, batches, qconfig=None, **settings):
    settings = {"hybrid": True, **settings}
    return prepare_qat_fx(calibrated(net, batches, **settings), qconfig or QAT, **settings)


@pytest.fixture(scope="module")
def suggested(batches):
    """What is suggested for a calibrated `Outlier`, for each number of layers once."""

    @functools.cache
    def suggest(layers):
        march.set_march("bayes")
        return suggest_cpu(calibrated(seeded(Outlier), batches), batches, layers=layers)

    return suggest


@pytest.fixture(scope="module")
def refusing(batches):
    """A trained `Outlier`, for calls that refuse."""
    march.set_march("bayes")
    return trained(seeded(Outlier), batches)


def sqnr(model, net, batches):
    """Mean over batches, in numpy."""
    found = []
    for batch in batches:
        with torch.no_grad():
            wanted, got = (np.asarray(m(batch), dtype=np.float64) for m in (net, model))
        found.append(10 * np.log10((wanted**2).sum() / ((wanted - got) ** 2).sum()))
    return np.mean(found)


@pytest.mark.parametrize("prepare", [calibrated, trained])
@pytest.mark.parametrize("hybrid", [True, False])
def test_the_layer_that_is_hard_to_quantize_is_picked_first(prepare, hybrid, batches):
    model = prepare(seeded(Outlier), batches, hybrid=hybrid)
    suggestion = suggest_cpu(model, batches, layers=1)
    assert suggestion.hybrid_dict == {"module_name": ["hard"]}
    [move] = suggestion.moves
    assert move.gain_alone > 10
    assert suggestion.metric == pytest.approx(suggestion.start + move.gain_alone)
    alone = {row.path: row.gain_alone for row in suggestion.rows if not row.others}
    assert max(alone, key=alone.get) == "hard"
    assert set(alone) == {"stem.0", "easy.0", "hard", "_generated_add_0", "head"}


@pytest.mark.parametrize("layers", [1, 3])
def test_the_promise_holds_when_really_prepared_and_converted(layers, suggested, batches):
    net = seeded(Outlier)
    suggestion = suggested(layers)
    assert len(suggestion.hybrid_dict["module_name"]) <= layers
    model = trained(net, batches, hybrid_dict=suggestion.hybrid_dict)
    set_fake_quantize(model, FakeQuantState.VALIDATION)
    assert sqnr(model.eval(), net, batches) == pytest.approx(suggestion.metric, abs=1e-3)
    # Integers round ties and biases otherwise.
    assert sqnr(convert_fx(model), net, batches) == pytest.approx(suggestion.metric, abs=0.3)
    before = trained(net, batches)
    assert sqnr(convert_fx(before), net, batches) == pytest.approx(suggestion.start, abs=0.3)


def test_a_value_that_is_hard_to_quantize_takes_both_sides_of_it(batches):
    net = seeded(SmallChannel)
    suggestion = suggest_cpu(calibrated(net, batches), batches, layers=2)
    [move] = suggestion.moves
    assert move.paths == ("easy.0", "hard")
    assert re.search(r"a float then \(alone easy\.0 [+-]\d.*, hard [+-]\d.*\)", move.reason)
    alone = {row.path: row.gain_alone for row in suggestion.rows if not row.others}
    assert move.gain_alone > 10 + sum(max(alone.get(path, 0), 0) for path in move.paths)
    model = trained(net, batches, hybrid_dict=suggestion.hybrid_dict)
    assert sqnr(convert_fx(model), net, batches) == pytest.approx(suggestion.metric, abs=0.3)


def test_what_is_suggested_runs_where_partition_says(suggested, batches):
    net = seeded(Outlier)
    suggestion = suggested(3)
    plans = [
        partition(fuse_fx(net), "bayes", names, example_inputs=batches[0])
        for names in (None, suggestion.hybrid_dict)
    ]
    on_cpu = {n.path for n in plans[1].nodes if n.place == "CPU" and n.kind == "operator"}
    assert on_cpu == set(suggestion.hybrid_dict["module_name"])
    added = sum(row.transfer_bytes for row in suggestion.moves)
    assert added == plans[1].transfer_bytes - plans[0].transfer_bytes


@pytest.mark.parametrize("raises", [False, True])
@pytest.mark.parametrize("prepare", [calibrated, trained])
def test_the_model_stays_as_it_was(prepare, raises, batches):
    model = prepare(seeded(Outlier), batches).train()
    model.get_submodule("easy").eval()
    if prepare is trained:
        model.get_submodule("head").activation_post_process.disable_fake_quant()
        model.get_submodule("hard").weight_fake_quant.disable_observer()
    state = copy.deepcopy(model.state_dict())
    modes = {path: m.training for path, m in model.named_modules()}
    modules, code = dict(model.named_modules()), model.code
    hooks = [len(m._forward_hooks) + len(m._forward_pre_hooks) for m in model.modules()]

    def metric(got, wanted):
        if raises:
            raise KeyError("metric")
        return -float((got - wanted).abs().max())

    if raises:
        with pytest.raises(KeyError, match="metric"):
            suggest_cpu(model, batches, layers=1, metric=metric)
    else:
        suggest_cpu(model, batches, layers=1, metric=metric)
    after = model.state_dict()
    assert list(after) == list(state)
    assert all(torch.equal(after[key], value) for key, value in state.items())
    assert {path: m.training for path, m in model.named_modules()} == modes
    assert dict(model.named_modules()) == modules
    assert model.code == code
    assert hooks == [len(m._forward_hooks) + len(m._forward_pre_hooks) for m in model.modules()]


class Two(nn.Module):
    """Two inputs, and outputs in a dict."""

    def __init__(self):
        super().__init__()
        self.left, self.right = QuantStub(), QuantStub()
        self.dequant = DeQuantStub()
        self.a, self.b, self.c = (nn.Conv2d(2, 2, 1) for _ in range(3))
        with torch.no_grad():
            self.b.weight[:, 0] *= 1000

    def forward(self, left, right):
        x, y = self.a(self.left(left)), self.b(self.right(right))
        return {"sum": self.dequant(self.c(x)), "rest": [self.dequant(y)]}


def test_several_inputs_and_outputs():
    generator = torch.Generator().manual_seed(0)
    pairs = []
    for _ in range(2):
        left, right = torch.randn(2, 1, 2, 4, 4, generator=generator)
        right[:, 0] /= 1000
        pairs.append((left, right))
    model = calibrated(seeded(Two), pairs)
    named = [{"right": right, "left": left} for left, right in pairs]
    found = [
        suggest_cpu(model, pairs, layers=1),
        suggest_cpu(model, [list(pair) for pair in pairs], layers=1),
        suggest_cpu(model, iter(named), layers=1),
        suggest_cpu(model, [4, 5], layers=1, forward=lambda m, i: m(*pairs[i - 4])),
        suggest_cpu(model, pairs, layers=1, example_inputs=pairs[0]),
        suggest_cpu(model, pairs, layers=1, example_inputs=named[0]),
    ]
    assert all(suggestion == found[0] for suggestion in found)
    assert found[0].hybrid_dict == {"module_name": ["b"]}
    assert found[0].metric == pytest.approx(found[0].start + found[0].moves[0].gain_alone)


@pytest.mark.parametrize(
    ("got", "wanted", "decibels"),
    [
        ({"a": 0.9, "b": [9.0]}, {"a": 1.0, "b": [10.0]}, [20, 20]),
        ((0.9, 999.0), (1.0, 1000.0), [20, 60]),
        ([0.9, 1.0], [1.0, 1.0], [20, 144.494]),  # exact: what float32 resolves
        ([0.9, 0.1], [1.0, 0.0], [20, -144.494]),
        ([0.9, 0.0], [1.0, 0.0], [20, 144.494]),
    ],
)
def test_each_output_counts_as_much_as_the_others(got, wanted, decibels):
    def tensors(values):
        if isinstance(values, dict):
            return {key: tensors(value) for key, value in values.items()}
        if isinstance(values, list | tuple):
            return type(values)(tensors(value) for value in values)
        return torch.tensor([values], dtype=torch.float64)

    assert output_sqnr(tensors(got), tensors(wanted)) == pytest.approx(np.mean(decibels), abs=1e-3)


def test_outputs_of_dicts_are_compared_by_key() -> None:
    scores, boxes = torch.ones(4), torch.full((4,), 10.0)
    wanted = {"scores": scores, "boxes": boxes}
    got = {"boxes": boxes + 1, "scores": scores + 0.1}  # 20 dB each
    assert output_sqnr(got, wanted) == pytest.approx(20, abs=1e-3)


def test_outputs_without_floats_need_a_metric(batches):
    class Label(Outlier):
        def forward(self, x):
            return super().forward(x).argmax(1)

    model = calibrated(seeded(Label), batches)
    with pytest.raises(ValueError, match=r"no float tensor.* pass a metric"):
        suggest_cpu(model, batches, layers=1)

    def agreement(got, wanted):
        return float((got == wanted).double().mean())

    suggestion = suggest_cpu(model, batches, layers=1, metric=agreement)
    assert suggestion.hybrid_dict == {"module_name": ["hard"]}
    assert suggestion.metric > suggestion.start


def test_the_time_is_that_of_the_examples(suggested, batches):
    model = calibrated(seeded(Outlier), batches)
    small = suggest_cpu(model, batches, layers=1, example_inputs=batches[0][:1])
    large = suggested(1)
    assert large.moves[0].transfer_bytes == 2 * small.moves[0].transfer_bytes
    assert large.start_milliseconds > small.start_milliseconds
    assert large.metric == small.metric


def test_a_metric_of_ones_own_gets_plain_tensors(batches):
    class NoStub(Outlier):
        def forward(self, x):
            return self.head(self.hard(self.easy(self.stem(self.quant(x)))))

    seen = []

    def closeness(got, wanted):
        seen.append((type(got), type(wanted), got.shape))
        return 1 - float((got - wanted).abs().mean())

    model = calibrated(seeded(NoStub), batches)
    suggestion = suggest_cpu(model, batches, layers=1, metric=closeness)
    assert set(seen) == {(torch.Tensor, torch.Tensor, (2, 4, 8, 8))}
    assert suggestion.metric_name == "closeness"
    assert suggestion.hybrid_dict == {"module_name": ["hard"]}
    assert suggestion.start < suggestion.metric < 1


def test_budgets_stop_the_search(suggested, batches):
    model = calibrated(seeded(Outlier), batches)
    free = suggested(3)
    assert len(free.moves) > 1
    times = [row.milliseconds for row in free.moves]
    assert free.added_milliseconds == pytest.approx(sum(times))
    assert [row.metric for row in free.moves] == sorted(row.metric for row in free.moves)
    tight = suggest_cpu(model, batches, times[0] * 1.0001)
    assert tight.hybrid_dict["module_name"] == list(free.moves[0].paths)
    assert tight.added_milliseconds <= times[0] * 1.0001
    [*_, last] = tight.rows
    assert not last.moves
    assert any("adds more than" in row.reason for row in tight.rows)
    nothing = suggest_cpu(model, batches, 1e-9)
    assert nothing.hybrid_dict == {"module_name": []}
    assert nothing.metric == nothing.start
    one = suggest_cpu(model, batches, 1e9, layers=1)
    assert len(one.hybrid_dict["module_name"]) == 1
    assert any("no more than 1 layers" in row.reason for row in one.rows)
    modest = suggest_cpu(model, batches, layers=3, min_gain=6.0)
    assert len(modest.moves) == 1
    assert {row.reason for row in modest.rows[1:]} == {"gains nothing behind what moves"}


@pytest.mark.bits
def test_it_is_deterministic(suggested, batches):
    again = suggest_cpu(calibrated(seeded(Outlier), batches), batches, layers=3)
    assert again == suggested(3)
    assert str(again) == str(suggested(3))


class Gate(nn.Module):
    """A module whose forward is a function that a BPU runs."""

    def forward(self, x):
        return F.max_pool2d(x, 2)


class Named(Outlier):
    def __init__(self):
        super().__init__()
        self.gate, self.prelu = Gate(), nn.PReLU()

    def forward(self, x):
        x = self.hard(self.gate(self.easy(self.stem(self.quant(x)))))
        return self.dequant(self.prelu(self.head(x)))


@pytest.mark.parametrize("prepare", [calibrated, trained])
@pytest.mark.parametrize("kept", ["stem.0", "head"])
def test_what_ran_on_the_cpu_before_stays_there(kept, prepare, batches):
    net, wishes = seeded(Named), {"module_name": [kept]}
    if kept == "head":
        net.head.qconfig, wishes = None, None
    model = prepare(net, batches, hybrid_dict=wishes)
    suggestion = suggest_cpu(model, batches, layers=1)
    assert suggestion.kept == (kept,)
    assert suggestion.hybrid_dict == {"module_name": [kept, "hard"]}
    assert suggestion.start == suggestion.as_given
    assert kept not in {row.path for row in suggestion.rows}


class FloatEnd(Outlier):
    """A float layer behind the integers."""

    def forward(self, x):
        return self.head(self.dequant(self.hard(self.easy(self.stem(self.quant(x))))))


def test_what_had_no_qconfig_is_float_in_a_model_that_becomes_hybrid(batches):
    net = seeded(FloatEnd)
    net.head.qconfig = None
    suggestion = suggest_cpu(calibrated(net, batches, hybrid=False), batches, layers=1)
    assert suggestion.start == suggestion.as_given
    assert suggestion.hybrid_dict["module_name"][-1] == "hard"


def test_names_of_functions_must_be_given_again(batches):
    wishes = {"module_name": ["stem"], "module_type": [Gate]}
    model = calibrated(seeded(Named), batches, hybrid_dict=wishes)
    with pytest.raises(ValueError, match=r"node max_pool2d_input_dequant_0.*pass the hybrid_dict"):
        suggest_cpu(model, batches, layers=1)
    suggestion = suggest_cpu(model, batches, layers=1, hybrid_dict=wishes)
    assert suggestion.kept == ("stem", "gate")
    assert suggestion.hybrid_dict == {"module_name": ["stem", "gate", "hard"]}


def test_a_model_that_becomes_hybrid_says_what_that_does(batches):
    net = seeded(Named)
    suggestion = suggest_cpu(calibrated(net, batches, hybrid=False), batches, layers=1)
    model = trained(net, batches, hybrid=False)
    set_fake_quantize(model, FakeQuantState.VALIDATION)
    assert sqnr(model, net, batches) == pytest.approx(suggestion.as_given, abs=1e-3)
    assert suggestion.as_given != suggestion.start
    assert "With hybrid=True alone" in str(suggestion)
    assert suggestion.kept == ()
    hybrid = suggest_cpu(calibrated(net, batches), batches, layers=1)
    assert (hybrid.start, hybrid.metric) == pytest.approx((suggestion.start, suggestion.metric))


@pytest.mark.parametrize("kind", ["int16", "out", "lsq", "pact", "with_bn", "with_bn_reverse_fold"])
def test_all_kinds_of_quantization_keep_the_promise(kind, batches):
    if kind.startswith("with"):
        qat_mode.set_qat_mode(kind)
    learned = {"activation_fake_quant": kind} if kind in ("lsq", "pact") else {}
    dtype = {"dtype": "qint16"} if kind == "int16" else {}
    qconfig = {"": get_default_qat_qconfig(**dtype, **learned)}
    calib = {"": get_default_calib_qconfig(**dtype)}
    if kind == "out":
        qconfig["module_name"] = [("head", get_default_qat_out_qconfig())]
    net = seeded(Outlier)
    model = prepare_qat_fx(calibrated(net, batches, calib), qconfig, hybrid=True)
    suggestion = suggest_cpu(model, batches, layers=2)
    assert "hard" in suggestion.hybrid_dict["module_name"]
    again = calibrated(net, batches, calib, hybrid_dict=suggestion.hybrid_dict)
    really = prepare_qat_fx(again, qconfig, hybrid=True, hybrid_dict=suggestion.hybrid_dict)
    set_fake_quantize(really, FakeQuantState.VALIDATION)
    assert sqnr(really.eval(), net, batches) == pytest.approx(suggestion.metric, abs=1e-3)
    set_fake_quantize(model, FakeQuantState.VALIDATION)
    assert sqnr(model.eval(), net, batches) == pytest.approx(suggestion.start, abs=1e-3)


def test_a_calibrated_model_is_measured_in_the_types_it_was_calibrated_for(batches):
    net = seeded(Outlier)
    calib = {"": get_default_calib_qconfig(dtype="qint16")}
    wide = suggest_cpu(calibrated(net, batches, calib), batches, layers=1)
    given = {"": get_default_qat_qconfig(dtype="qint16")}
    model = prepare_qat_fx(calibrated(net, batches, calib), given, hybrid=True)
    assert wide == suggest_cpu(model, batches, layers=1)
    narrow = calibrated(net, batches)
    out = {**QAT, "module_name": [("head", get_default_qat_out_qconfig())]}
    chosen = suggest_cpu(narrow, batches, layers=1, qconfig_dict=out)
    assert chosen == suggest_cpu(prepare_qat_fx(narrow, out, hybrid=True), batches, layers=1)


class OnlyCpu(nn.Module):
    def __init__(self):
        super().__init__()
        self.quant, self.prelu = QuantStub(), nn.PReLU()

    def forward(self, x):
        return self.prelu(self.quant(x))


BAD_MODELS = [
    (lambda net, batches: net, TypeError, "prepare_qat_fx, got Outlier; prepare it"),
    (lambda net, batches: fuse_fx(net), TypeError, "got Outlier; prepare it and run"),
    (
        lambda net, batches: convert_fx(trained(net, batches)),
        TypeError,
        "converted to integers; pass the one",
    ),
    (
        lambda net, batches: prepare_calibration_fx(net, CALIB, hybrid=True),
        ValueError,
        r"quant, stem.0, easy.0, hard.*no range was observed there; run\s+calibration batches",
    ),
    (
        lambda net, batches: prepare_qat_fx(net, QAT),
        ValueError,
        "quant, stem.0, easy.0, hard.*no range was observed",
    ),
    (
        lambda net, batches: calibrated(OnlyCpu().eval(), batches),
        ValueError,
        "no layer runs on the BPU, so none can move",
    ),
]


@pytest.mark.parametrize(("make", "error", "reason"), BAD_MODELS)
def test_models_that_cannot_be_measured_are_refused(make, error, reason, batches):
    model = make(seeded(Outlier), batches)
    with pytest.raises(error, match=reason):
        suggest_cpu(model, batches, layers=1)


@pytest.mark.parametrize(
    ("settings", "reason"),
    [
        ({}, "give a budget: milliseconds"),
        ({"budget": 0}, "budget=0; expected milliseconds above 0"),
        ({"budget": -1.0}, "budget=-1.0"),
        ({"budget": math.nan}, "budget=nan"),
        ({"budget": "1"}, "budget='1'"),
        ({"budget": True}, "budget=True"),
        ({"layers": 0}, "layers=0; expected a whole number of layers above 0"),
        ({"layers": 1.5}, "layers=1.5"),
        ({"layers": 1, "batches": []}, "there are no batches; pass at least one"),
        ({"layers": 1, "batches": torch.ones(2, 3, 8, 8)}, r"one Tensor; pass a list.*\[batch\]"),
        ({"layers": 1, "batches": {"x": 1}}, "batches is one dict"),
        ({"layers": 1, "metric": lambda got, wanted: math.nan}, "is nan on batch 0; expected a"),
        ({"layers": 1, "qconfig_dict": QAT}, "qconfig_dict is for calibrated models"),
        ({"layers": 1, "hybrid_dict": {"names": ["hard"]}}, "unknown key 'names'"),
        ({"layers": 1, "hybrid_dict": {"module_name": "hard"}}, "expected a list"),
        ({"layers": 1, "forward": lambda model, batch: batch}, "forward did not call the model"),
    ],
)
def test_settings_that_mean_nothing_are_refused(settings, reason, refusing, batches):
    settings = {"batches": batches, **settings}
    with pytest.raises((ValueError, TypeError), match=reason):
        suggest_cpu(refusing, settings.pop("batches"), **settings)


def test_nan_in_a_batch_is_told_from_noise(batches):
    model = calibrated(seeded(Outlier), batches)
    with pytest.raises(ValueError, match=r"is nan on batch 1.*look for NaN"):
        suggest_cpu(model, [batches[0], batches[1] * math.nan], layers=1)


def test_without_a_march_it_says_which_call_is_missing(batches):
    model = calibrated(seeded(Outlier), batches)
    march._chosen.clear()
    with pytest.raises(RuntimeError, match="suggest_cpu: no march is set"):
        suggest_cpu(model, batches, layers=1)


def test_json_there_and_back(batches, tmp_path):
    suggestion = suggest_cpu(calibrated(seeded(Named), batches), batches, layers=2)
    assert CpuSuggestion.from_json(suggestion.to_json()) == suggestion
    path = suggestion.save(tmp_path / "moves.json")
    assert CpuSuggestion.load(path) == suggestion
    assert [p.name for p in tmp_path.iterdir()] == ["moves.json"]
    assert json.loads(path.read_text())["hybrid_dict"] == suggestion.hybrid_dict
    none = suggest_cpu(calibrated(seeded(Outlier), batches), batches, 1e-9)
    assert CpuSuggestion.from_json(none.to_json()) == none


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"schema": "bevquant_hybrid.partition"}, "not a CPU suggestion: schema"),
        ({"version": 2}, "version 2, expected 1"),
        ({"version": True}, "version True"),
        ({"march": 1}, "march: expected `str`"),
        ({"start": "1"}, "start: expected `float`"),
        ({"start": math.inf}, "malformed"),
        ({"kept": "hard"}, "kept: expected `array`"),
        ({"rows": {}}, "rows: expected `array`"),
        ({"rows": [1]}, r"rows\[0\]: expected `object`"),
        ({"row_extra": 1}, r"rows\[0\]: object contains unknown field `extra`"),
        ({"row_metric": "1"}, r"rows\[0\].metric: expected `float"),
        ({"row_others": [1]}, r"others\[0\]: expected `str`"),
        ({"row_transfer_bytes": 1.5}, "transfer_bytes: expected `int`"),
        ({"row_path": "easy.0"}, "its hybrid_dict is not that of its rows"),
    ],
)
def test_suggestions_that_are_wrong_are_refused(changes, reason, tmp_path):
    row = {
        **{"path": "hard", "others": [], "gain_alone": 1.0, "metric": 2.0, "milliseconds": 0.1},
        **{"transfer_bytes": 3, "reason": "because"},
    }
    data = {
        **{"schema": "bevquant_hybrid.cpu_suggestion", "version": 1, "march": "bayes"},
        **{"metric_name": "m", "as_given": 1.0, "start": 1.0, "start_milliseconds": 1.0},
        **{"kept": [], "rows": [row], "hybrid_dict": {"module_name": ["hard"]}},
    }
    path = tmp_path / "moves.json"
    path.write_text(json.dumps(data))
    assert CpuSuggestion.load(path).rows[0].paths == ("hard",)
    for key, value in changes.items():
        (row if key.startswith("row_") else data)[key.removeprefix("row_")] = value
    path.write_text(json.dumps(data))
    with pytest.raises(ValueError, match=reason) as caught:
        CpuSuggestion.load(path)
    assert str(path) in str(caught.value)


def test_the_table_labels_its_times(batches):
    suggestion = suggest_cpu(calibrated(seeded(SmallChannel), batches), batches, layers=2)
    title, head, first, *_, note = str(suggestion).splitlines()
    assert title.startswith(f"2 layers to the CPU (bayes): SQNR (dB) {suggestion.start:.2f} -> ")
    assert head.split() == ["layer", "alone", "metric", "ms", "bytes", "reason"]
    assert first.split()[:4] == ["1", "easy.0", "+", "hard"]
    assert "estimates" in note
    assert "not measurements" in note


def figure(value):
    return Figure(value, "assumed", "", "")


def board(**cpu):
    cpu = {"cpu_cores": 2, "cpu_gigahertz": 0.5, "cpu_operations_per_cycle": 4, **cpu}
    known = {name: figure(value) for name, value in cpu.items() if value}
    return ChipFigures("board", figure(1e-3), figure(1), figure(2.0), **known)


class Chain(nn.Module):
    def __init__(self):
        super().__init__()
        self.quant, self.dequant = QuantStub(), DeQuantStub()
        self.a, self.b, self.c = (nn.Conv2d(8, 8, 3, padding=1) for _ in range(3))
        with torch.no_grad():
            self.a.bias[0] = -100
            self.b.weight[:, 0] *= 1000

    def forward(self, x):
        x = F.relu(self.a(self.quant(x)))
        return self.dequant(self.c(self.b(x)))


def test_estimated_time_by_hand():
    images = torch.randn(1, 8, 8, 8, generator=torch.Generator().manual_seed(0))
    model = calibrated(seeded(Chain), [images])
    suggestion = suggest_cpu(model, [images], layers=1, figures=board())
    [move] = suggestion.moves
    assert move.path == "b"
    values, weights = 8 * 8 * 8, 8 * 8 * 9
    operations = 2 * values * 8 * 9
    on_bpu = max(operations / 1e9, (2 * values + weights + 4 * 8) / 2e9)
    on_cpu = max(operations / 4e9, 4 * (2 * values + weights + 8) / 2e9)
    stubs = 2 * 5 * values / 2e9  # one byte on one side, four on the other
    assert move.milliseconds == pytest.approx(1e3 * (on_cpu + stubs - on_bpu))
    assert move.transfer_bytes == 2 * values
    ends = 5 * values / 2e9
    assert suggestion.start_milliseconds == pytest.approx(1e3 * (3 * on_bpu + 2 * ends))
    with pytest.raises(ValueError, match="figures of board: cpu_gigahertz is missing"):
        suggest_cpu(model, [images], layers=1, figures=board(cpu_gigahertz=0))


def stub(kind, given, made):
    return OperatorCall(
        *("x", f"torch.quantization.{kind}"),
        input_shapes=((1, 4, 5, 5),),
        input_dtypes=(given,),
        output_shape=(1, 4, 5, 5),
        output_dtype=made,
    )


@pytest.mark.parametrize(
    ("call", "loaded", "stored"),
    [
        (stub("QuantStub", "float32", "qint8"), 400, 100),
        (stub("DeQuantStub", "qint16", "float32"), 200, 400),
        (stub("DeQuantStub", "qint32", "float32"), 400, 400),
        (stub("DeQuantStub", "float32", "float32"), 0, 0),
    ],
)
def test_stubs_move_integers_on_one_side_and_floats_on_the_other(call, loaded, stored):
    [layer] = estimate_cpu_layers([call], "bayes", figures=board())
    assert (layer.loaded_bytes, layer.stored_bytes, layer.operations) == (loaded, stored, 0)
    assert layer.seconds == pytest.approx((loaded + stored) / 2e9)


@pytest.mark.parametrize(
    ("name", "gigaflops"), [("bernoulli2", 48), ("bayes", 76.8), ("bayes-e", 115.2)]
)
def test_the_cpu_figures_have_sources(name, gigaflops):
    figures = load_chip_figures(name)
    cpu = [figures.cpu_cores, figures.cpu_gigahertz, figures.cpu_operations_per_cycle]
    assert math.prod(f.value for f in cpu) == pytest.approx(gigaflops)
    for f in cpu:
        assert f.source.startswith("https://")
        assert f.note
        assert f.basis != "assumed" or "assumed" in f.note


def test_eager_quantization_is_told_apart():
    net = seeded(Outlier)
    net.qconfig = quantization.get_default_qat_qconfig()
    net = quantization.prepare_qat(net, inplace=False)
    with pytest.raises(TypeError, match="expected a model from prepare_calibration_fx"):
        suggest_cpu(net, [torch.ones(1, 3, 8, 8)], layers=1)
