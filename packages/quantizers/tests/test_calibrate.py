"""calibrate: what it finds, what it leaves as it was, and how it goes on after being killed."""

from __future__ import annotations

import json
import os
import pickle
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn

from bevquant_quantizers import (
    QuantDescriptor,
    TensorQuantizer,
    calib,
    calibrate,
    named_quantizers,
)

sys.path.insert(0, str(Path(__file__).parent))
from calibration_cases import Block, make_batches, outcome

METHODS = ["max", "mse", "entropy", "percentile"]


def flags(model):
    quantizers = [
        (e.name, q._disabled, q._if_quant, q._if_clip, q._if_calib, q.name)
        for e in named_quantizers(model)
        for q in [e.quantizer]
    ]
    return quantizers, [module.training for module in model.modules()]


def amaxs(model):
    return {
        e.name: None if e.quantizer.amax is None else e.quantizer.amax.tolist()
        for e in named_quantizers(model)
    }


def histogram_quantizer(**kwargs):
    return TensorQuantizer(QuantDescriptor(calib_method="histogram", **kwargs))


@pytest.mark.parametrize("method", METHODS)
def test_equals_the_calibrators_driven_by_hand(method):
    model, by_hand = Block(), Block()
    report = calibrate(model, make_batches(), method=method)
    by_hand.eval()
    for entry in named_quantizers(by_hand):
        if not entry.quantizer._disabled:
            entry.quantizer.enable_calib()
            entry.quantizer.disable_quant()
    with torch.no_grad():
        for batch in make_batches():
            by_hand(batch)
    for entry in named_quantizers(by_hand):
        if entry.name not in ("off", "unreached"):
            entry.quantizer.load_calib_amax(method) if entry.name != "weights" else (
                entry.quantizer.load_calib_amax()
            )
    assert amaxs(model) == amaxs(by_hand)
    assert report.batches == 7
    assert report["weights"].method == "max"
    assert report["input"].method == method


def test_agrees_with_upstream_on_one_batch(upstream):
    x = torch.randn(5000)
    theirs = upstream.calib.HistogramCalibrator(8, None, False)
    theirs.collect(x)
    for method in ("mse", "percentile", "entropy"):
        model = nn.Sequential(histogram_quantizer())
        report = calibrate(model, [x], method=method)
        assert report["0"].amax == (theirs.compute_amax(method).item(),)


def test_report_numbers():
    model = nn.ModuleDict({"q": histogram_quantizer(), "unused": histogram_quantizer()})
    x = torch.cat([torch.zeros(30), torch.linspace(0.5, 1.0, 69), torch.tensor([2.0])])
    report = calibrate(model, [x], lambda m, b: m["q"](b), method="percentile", percentile=98)
    entry = report["q"]
    assert (entry.values, entry.zeros, entry.largest, entry.bins) == (100, 0.3, 2.0, 2048)
    assert entry.amax == (pytest.approx(0.985, abs=0.02),)
    assert entry.saturation == pytest.approx((x > entry.amax[0]).float().mean().item(), abs=0.011)
    assert "no values" in report["unused"].warnings[0]
    assert report["unused"].amax is None
    with pytest.raises(KeyError):
        report["absent"]


def test_values_that_rounding_brings_back_are_no_warning():
    """Saturated pixels: the range ends half a bin below the values that all images end with."""
    model = nn.ModuleDict({"q": histogram_quantizer()})
    x = torch.cat([torch.linspace(0, 2.6, 900), torch.full((100,), 2.64)])
    report = calibrate(model, [x * 0.9, x], lambda m, b: m["q"](b), method="mse")
    (amax,) = report["q"].amax
    assert amax >= 2.64 / (1 + 0.5 / 127)
    assert report["q"].warnings == ()
    lossy = calibrate(model, [x], lambda m, b: m["q"](b), method="percentile", percentile=89)
    assert "above the range" in lossy["q"].warnings[0]


def warned(x, **settings):
    """The warnings of a calibration on one tensor."""
    return " ".join(calibrate(nn.Sequential(histogram_quantizer()), [x], **settings)["0"].warnings)


@pytest.mark.parametrize(("largest", "told"), [(7.9, False), (8.3, True)])
def test_a_range_eight_times_what_is_usual_is_exploding(largest, told):
    x = torch.cat([torch.linspace(0, 1, 100_000), torch.full((5,), largest)])
    assert ("exploding" in warned(x, method="max")) is told
    # Two in ten thousand of them are no outliers but the tail.
    tail = torch.cat([torch.linspace(0, 1, 100_000), torch.full((20,), largest)])
    assert "exploding" not in warned(tail, method="max")


@pytest.mark.parametrize(
    ("crowd", "outliers", "told"), [(99, 1, True), (98, 1, False), (98, 2, False), (198, 1, True)]
)
def test_of_a_hundred_values_the_largest_alone_may_explode(crowd, outliers, told):
    x = torch.cat([torch.linspace(0.5, 1, crowd), torch.full((outliers,), 50.0)])
    assert ("exploding" in warned(x, method="max")) is told


@pytest.mark.parametrize(("above", "told"), [(95, False), (105, True)])
def test_more_than_one_in_a_hundred_above_the_range_is_told(above, told):
    x = torch.cat([torch.linspace(0, 0.5, 10_000 - above), torch.full((above,), 1.0)])
    text = warned(x, method="percentile", percentile=98.9)
    assert ("of the values lie above the range" in text) is told


def test_merged_bins_are_told():
    model = nn.Sequential(histogram_quantizer())
    report = calibrate(model, [torch.rand(1000), torch.rand(1000) * 32], method="max")
    assert report["0"].warnings == ()
    report = calibrate(model, [torch.rand(1000), torch.rand(9000) * 100], method="max")
    (text,) = report["0"].warnings
    assert "outliers made the bins 4 times as wide" in text
    assert report["0"].bins <= 32 * 2048


def test_report_as_table_and_json():
    report = calibrate(Block(), make_batches(), progress=False)
    lines = str(report).splitlines()
    rows = lines[2:9]
    assert [row.split()[0] for row in rows] == [
        "input", "weights", "residual", "relu", "late", "channels", "unreached",
    ]  # fmt: skip
    ends = [lines[0].index(word) + len(word) for word in ("saturated", "zeros", "bins", "values")]
    assert all(
        row[end - 1] != " " and row[end : end + 1] in ("", " ") for row in rows for end in ends
    )
    assert "shared: residual = add" in lines
    document = json.loads(report.to_json())
    assert document["schema"] == "bevquant-calibration/1"
    assert document["quantizers"][2]["names"] == ["residual", "add"]
    assert document["quantizers"][2]["amax"] == list(report["add"].amax)


def test_shared_quantizers_are_processed_once_and_reported_under_all_names():
    model = Block()
    report = calibrate(model, make_batches(2))
    assert sum("add" in q.names for q in report.quantizers) == 1
    assert report["add"] is report["residual"]
    # Three calls a batch, all of one object, all counted.
    assert report["add"].values == 3 * 4 * sum(len(b) for b in make_batches(2))


def test_state_is_restored():
    model = Block()
    model.input.disable_quant()
    model.relu.enable_calib()
    model.dropout.eval()
    before = flags(model)
    calibrate(model, make_batches())
    assert flags(model) == before


@pytest.mark.parametrize("error", [RuntimeError, KeyboardInterrupt])
def test_trap_13_state_is_restored_after_an_exception(error):
    model = Block()
    model.input.amax = 7.0
    before, ranges = flags(model), amaxs(model)

    def forward(module, batch):
        module(batch)
        if len(batch) == 0:
            raise error("stop")

    with pytest.raises(error, match="stop") as caught:
        calibrate(model, make_batches(), forward)
    assert flags(model) == before
    assert amaxs(model) == ranges
    if error is RuntimeError:
        assert "batch 3" in caught.value.__notes__[0]


def test_an_error_of_torch_names_the_module_and_the_batch():
    net = nn.Sequential(nn.Linear(3, 8), histogram_quantizer())
    with pytest.raises(RuntimeError, match="shapes cannot be multiplied") as caught:
        calibrate(net, [torch.ones(2, 3), torch.ones(2, 4)])
    batch, module = caught.value.__notes__
    assert module.startswith("calibrate: the model does not run on this batch: RuntimeError in 0 (")
    assert batch == "while calibrating with batch 1 (counted from 0)"


def test_a_callers_autocast_changes_no_range():
    def ranges(forward):
        net = nn.Sequential(nn.Linear(3, 8), histogram_quantizer())
        net[0].load_state_dict(
            {"weight": torch.linspace(-1, 1, 24).view(8, 3), "bias": torch.ones(8)}
        )
        calibrate(net, make_batches(1), forward, method="max")
        return amaxs(net)

    def with_its_own(model, batch):
        with torch.autocast("cpu"):
            model(batch)

    wanted = ranges(None)
    with torch.autocast("cpu"):
        assert ranges(None) == wanted
    assert ranges(with_its_own) != wanted


def test_watches_the_float_model_in_eval_mode():
    seen = []

    class Watch(nn.Module):
        def forward(self, x):
            seen.append((self.training, torch.is_grad_enabled(), x.clone()))
            return x

    model = nn.Sequential(histogram_quantizer(), nn.Dropout(0.9), Watch())
    x = torch.randn(100)
    calibrate(model, [x])
    ((training, grad, value),) = seen
    assert (training, grad) == (False, False)
    assert torch.equal(value, x)


def test_batches_are_spread_over_the_arguments():
    class Two(nn.Module):
        def __init__(self):
            super().__init__()
            self.q = histogram_quantizer()

        def forward(self, a, b):
            return self.q(a) + b

    x = torch.ones(3)
    for batch in ((x, x), [x, x], {"b": x, "a": x}):
        assert calibrate(Two(), [batch])["q"].values == 3


def test_trap_08_empty_zero_and_outlying_batches():
    model = nn.Sequential(histogram_quantizer())
    batches = [torch.empty(0), torch.zeros(1000), torch.rand(1000) * 0.05, torch.tensor([50.0])]
    report = calibrate(model, batches, method="max")
    entry = report["0"]
    assert entry.amax == (50.0,)
    assert entry.values == 2001
    assert entry.zeros >= 1000 / 2001
    assert entry.bins <= 32 * 2048
    assert any("exploding" in text for text in entry.warnings)
    assert "exploding" in str(report)


def test_dead_quantizers_are_warned_of_and_keep_their_range_or_get_one():
    model = nn.ModuleDict({"new": histogram_quantizer(), "old": histogram_quantizer(amax=2.0)})
    report = calibrate(model, [torch.zeros(10)], lambda m, b: m["new"](m["old"](b)))
    assert report["new"].amax == (1.0,)
    assert "a guess" in report["new"].warnings[0]
    assert report["old"].amax == (2.0,)
    assert all("dead" in report[name].warnings[0] for name in model)
    assert report["old"].zeros == 1.0


def test_a_range_that_is_kept_is_no_guess_though_it_be_1():
    each = TensorQuantizer(QuantDescriptor(axis=0))
    model = nn.ModuleDict({"old": histogram_quantizer(amax=1.0), "channels": each})
    report = calibrate(model, [torch.zeros(2, 10)], lambda m, b: m["channels"](m["old"](b)))
    assert report["old"].amax == (1.0,)
    assert "it keeps the range it had" in report["old"].warnings[0]
    assert report["channels"].amax == (0.0, 0.0)
    assert "its ranges are 0" in report["channels"].warnings[0]


def test_a_vanishing_range_is_raised_until_it_has_a_scale():
    model = histogram_quantizer()
    x = torch.linspace(-1, 1, 1001) * 2e-8
    report = calibrate(model, [x])
    assert model.amax == 2.0**-23
    assert "vanishing" in report.quantizers[0].warnings[0]
    assert (model(x) - x).abs().max() <= 2.0**-24 / 127  # no longer zeros: on the finest grid


def test_no_batches_is_a_warning():
    report = calibrate(Block(), iter(()))
    assert report.batches == 0
    assert "no batches" in report.warnings[0]
    assert all("no values" in q.warnings[0] for q in report.quantizers)


@pytest.mark.parametrize("bad", [torch.nan, torch.inf])
@pytest.mark.parametrize("name", ["histogram", "max"])
def test_nan_names_the_quantizer(bad, name):
    inner = TensorQuantizer(QuantDescriptor(calib_method=name))
    model = nn.ModuleDict({"stage": nn.ModuleDict({"_input_quantizer": inner})})
    with pytest.raises(ValueError, match=r"stage\._input_quantizer.*(NaN|infinite)"):
        calibrate(model, [torch.tensor([1.0, bad])], lambda m, b: inner(b))
    assert inner.name is None


def test_learned_ranges_start_from_the_calibrated_one():
    q = histogram_quantizer(learn_amax=True)
    calibrate(nn.Sequential(q), [torch.tensor([3.0, -1.0])], method="max")
    assert (q.clip.clip_value_min.item(), q.clip.clip_value_max.item()) == (-3.0, 3.0)


def test_trap_09_any_method_may_follow_any_other():
    model, batches = Block(), make_batches()
    first = {m: outcome(model, calibrate(model, batches, method=m)) for m in METHODS}
    for method in reversed(METHODS):
        assert outcome(model, calibrate(model, batches, method=method)) == first[method]
    again = model.input._calibrator.compute_amax("mse").tolist()
    assert again == json.loads(first["mse"])[0]["input"]


def test_trap_10_cuda_is_never_called(monkeypatch):
    def refuse(*_, **__):
        raise AssertionError("cuda() was called")

    monkeypatch.setattr(torch.Tensor, "cuda", refuse)
    monkeypatch.setattr(nn.Module, "cuda", refuse)
    for method in METHODS:
        report = calibrate(Block(), make_batches(), method=method)
        assert report["input"].amax[0] > 0


def test_trap_12_counts_are_exact_integers_over_all_batches():
    model = nn.Sequential(histogram_quantizer())
    model[0]._calibrator._rows = []
    batches = [torch.full((1 << 20,), 1.0) for _ in range(17)] + [torch.tensor([0.25])]
    calibrate(model, batches, method="max")
    counts = model[0]._calibrator._calib_hist
    assert counts.dtype == torch.int64
    assert int(counts.sum()) == 17 * (1 << 20) + 1  # odd, above 2²⁴: float32 cannot hold it
    # One histogram of all values, not an average or a union of the batches' ranges.
    order = nn.Sequential(histogram_quantizer())
    calibrate(order, [torch.cat(batches)], method="max")
    assert torch.equal(order[0]._calibrator._calib_hist, counts)


def test_arguments_are_checked_before_any_batch():
    def never():
        raise AssertionError("a batch was taken")
        yield

    with pytest.raises(ValueError, match="unknown method 'mean'"):
        calibrate(Block(), never(), method="mean")
    for wrong in ({"percentile": 101}, {"stride": 0}, {"start_bin": -1}, {"save_every": 0}):
        with pytest.raises(ValueError, match=next(iter(wrong))):
            calibrate(Block(), never(), **wrong)
    with pytest.raises(ValueError, match=r"no enabled quantizer.* result of quantize_model"):
        calibrate(nn.Linear(2, 2), never())
    with pytest.raises(ValueError, match="init_process_group"):
        calibrate(Block(), never(), distributed=True)


def test_progress_needs_tqdm_only_where_asked(monkeypatch, capsys):
    pytest.importorskip("tqdm", reason="tqdm is not installed")
    calibrate(Block(), make_batches(), progress=True)
    assert "7/7" in capsys.readouterr().err
    monkeypatch.setitem(sys.modules, "tqdm", None)
    calibrate(Block(), make_batches())
    with pytest.raises(ImportError, match=r"tqdm: pip install tqdm"):
        calibrate(Block(), make_batches(), progress=True)


class Killed(BaseException):
    pass


def dying(after):
    for i, batch in enumerate(make_batches()):
        if i == after:
            raise Killed
        yield batch


@pytest.mark.bits
@pytest.mark.parametrize("save_every", [1, 3])
@pytest.mark.parametrize("sequence", [True, False])
def test_resumes_to_the_same_bits(tmp_path, sequence, save_every):
    whole = Block()
    wanted = outcome(whole, calibrate(whole, make_batches()))
    path = tmp_path / "collected.npz"
    for after in (2, 3, 6):
        with pytest.raises(Killed):
            calibrate(Block(), dying(after), resume=path, save_every=save_every)
    calls = []

    def forward(module, batch):
        calls.append(batch)
        module(batch)

    model = Block()
    batches = make_batches() if sequence else iter(make_batches())
    report = calibrate(model, batches, forward, resume=path, save_every=save_every)
    assert outcome(model, report) == wanted
    assert len(calls) == 1
    # Finished: nothing is run, another method is searched on the same collection.
    calls.clear()
    model = Block()
    calibrate(model, make_batches(), forward, method="max", resume=path)
    assert not calls
    reference = Block()
    calibrate(reference, make_batches(), method="max")
    assert amaxs(model) == amaxs(reference)
    assert [p.name for p in tmp_path.iterdir()] == ["collected.npz"]


def test_sigkill_in_the_middle_resumes_to_the_same_bits(tmp_path):
    script = """
import sys, time
sys.path.insert(0, sys.argv[1])
from calibration_cases import Block, make_batches, outcome
from bevquant_quantizers import calibrate
def forward(model, batch):
    time.sleep(0.05)
    model(batch)
calibrate(Block(), make_batches(400), forward, resume=sys.argv[2], progress=False)
"""
    path = tmp_path / "collected.npz"
    arguments = [sys.executable, "-c", script, str(Path(__file__).parent), str(path)]
    process = subprocess.Popen(arguments)
    try:
        deadline = time.monotonic() + 600
        while not path.exists() and time.monotonic() < deadline:
            assert process.poll() is None
            time.sleep(0.02)
        time.sleep(0.3)
    finally:
        process.send_signal(signal.SIGKILL)
        process.wait()
    with np.load(path, allow_pickle=False) as file:
        rounds = json.loads(file["header"].tobytes())["rounds"]
    assert 0 < rounds < 400
    batches = make_batches(rounds + 3)
    resumed, whole = Block(), Block()
    report = calibrate(resumed, batches, resume=path)
    assert outcome(resumed, report) == outcome(whole, calibrate(whole, batches))


def test_trap_14_saved_collections_are_checked(tmp_path):
    path = tmp_path / "collected.npz"
    calibrate(Block(), make_batches(), resume=path)
    other = Block()
    with torch.no_grad():
        other.weight[0, 0] += 1
    with pytest.raises(ValueError, match="other weights"):
        calibrate(other, make_batches(), resume=path)
    extra = Block()
    extra.extra = histogram_quantizer()
    with pytest.raises(ValueError, match="other quantizers"):
        calibrate(extra, make_batches(), resume=path)
    with pytest.raises(ValueError, match="7 rounds of batches, now there are 2"):
        calibrate(Block(), make_batches(2), resume=path)
    content = path.read_bytes()
    for damaged in (b"", content[: len(content) // 2], pickle.dumps({"a": 1}), b"{}"):
        path.write_bytes(damaged)
        with pytest.raises(ValueError, match="not a saved collection"):
            calibrate(Block(), make_batches(), resume=path)
    with pytest.raises(ValueError, match="folder"):
        calibrate(Block(), make_batches(), resume=tmp_path / "absent" / "c.npz")


def test_trap_14_pickles_in_a_saved_collection_are_not_run(tmp_path):
    class Bomb:
        def __reduce__(self):
            return (os.mkdir, (str(tmp_path / "exploded"),))

    path = tmp_path / "collected.npz"
    with path.open("wb") as file:
        np.savez(file, header=np.array([Bomb()], dtype=object))
    with pytest.raises(ValueError, match="not a saved collection"):
        calibrate(Block(), make_batches(), resume=path)
    assert not (tmp_path / "exploded").exists()


def test_foreign_calibrators_calibrate_but_cannot_be_saved(tmp_path):
    class Mean(calib.MaxCalibrator):
        pass

    model = nn.Sequential(TensorQuantizer())
    model[0]._calibrator = Mean(8, None, False)
    assert calibrate(model, [torch.tensor([2.0])])["0"].amax == (2.0,)
    with pytest.raises(TypeError, match="Mean"):
        calibrate(model, [torch.tensor([2.0])], resume=tmp_path / "c.npz")


class Remembers(nn.Module):
    """Adds the frame before, and writes into the frame that it gets."""

    def __init__(self):
        super().__init__()
        self.quantizer = TensorQuantizer(QuantDescriptor(calib_method="histogram"))
        self.register_buffer("prev", torch.zeros(2))
        self.frames = 0

    def forward(self, frame):
        frame["sum"] = self.quantizer(frame["x"] + self.prev)
        self.prev.copy_(frame["x"])
        self.frames += 1
        return frame["sum"]


@pytest.mark.parametrize("forward", [None, lambda model, batch: model(batch[0])])
def test_frames_and_state_are_as_they_were_and_go_on_within_a_run(forward):
    model = Remembers()
    batches = [({"x": torch.tensor([1.0, 2.0])},), ({"x": torch.tensor([3.0, 4.0])},)]
    before = repr(batches)
    report = calibrate(model, batches, forward, method="max")
    assert report["quantizer"].amax == (6.0,)  # of 4 and the 2 before it
    assert repr(batches) == before
    assert model.frames == 0
    assert model.prev.tolist() == [0, 0]


def test_a_range_set_in_inference_mode_is_an_ordinary_tensor():
    quantizer = TensorQuantizer(QuantDescriptor(calib_method="max"))
    with torch.inference_mode():
        quantizer.enable_calib()
        quantizer(torch.ones(2))
        quantizer.load_calib_amax()
        other = TensorQuantizer()
        other.load_state_dict(quantizer.state_dict())
        third = TensorQuantizer()
        third.amax = torch.ones(())
        made = TensorQuantizer(QuantDescriptor(amax=2.0))
        made.amax = 1.0
    for each in (quantizer, other, third, made):
        each.amax.mul_(2)
        assert each.amax == 2
