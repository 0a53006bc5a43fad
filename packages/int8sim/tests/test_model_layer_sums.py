"""The sums behind a row of the table: by numba, by torch, by their definitions."""

from __future__ import annotations

import math
import sys

import pytest
import torch

from bevquant_int8sim.model import Integers, _layer_sums

FORM = Integers(0.05, 8, -127, 127)


def maps(*, channels_last: bool, seed: int = 0):
    """Float, fake-quant, taught and integer output, larger than one block."""
    generator = torch.Generator().manual_seed(seed)
    wanted = torch.randn(2, 8, 91, 97, generator=generator) * 3
    fake = wanted + torch.randn(wanted.shape, generator=generator) * 0.1
    taught = fake + torch.randn(wanted.shape, generator=generator) * 0.03
    integer = (taught / FORM.scale + torch.randn(wanted.shape, generator=generator)).round()
    integer = integer.clamp(-127, 127).to(torch.int8)
    if channels_last:
        taught, integer = (
            t.contiguous(memory_format=torch.channels_last) for t in (taught, integer)
        )
    return wanted, fake, taught, integer


def without_numba(monkeypatch):
    """As where numba is not installed: importing what it compiles fails."""
    monkeypatch.setitem(sys.modules, "bevquant_int8sim._compiled", None)
    assert _layer_sums._kernels(torch.zeros(1 << 14)) is None


@pytest.mark.parametrize("by", ["numba", "torch"])
@pytest.mark.parametrize("channels_last", [False, True])
def test_a_row_says_what_its_definitions_say(monkeypatch, by, channels_last):
    if by == "torch":
        without_numba(monkeypatch)
    else:
        pytest.importorskip("numba")
    sums = _layer_sums.LayerSums("p", "conv", "int8")
    batches = [maps(channels_last=channels_last, seed=seed) for seed in range(2)]
    for batch in batches:
        sums.add_integers(*batch, FORM)
    wanted, fake, taught, integer = (torch.stack(t).double() for t in zip(*batches, strict=True))
    expected = (fake / FORM.scale).round().clamp(-127, 127)
    raw = (taught / FORM.scale).round()
    row = sums.row()
    for name, q in (("fake", expected), ("integer", integer)):
        error = (q * FORM.scale - wanted).square().sum()
        sqnr = 10 * math.log10(float(wanted.square().sum() / error))
        assert getattr(row, f"{name}_sqnr_db") == pytest.approx(sqnr, abs=1e-9)
        cosine = torch.cosine_similarity(q.flatten(), wanted.flatten(), 0)
        assert getattr(row, f"{name}_cosine") == pytest.approx(float(cosine), abs=1e-12)
    free, forced = (integer - expected).abs(), (integer - raw.clamp(-127, 127)).abs()
    assert (row.max_steps, row.forced_max_steps) == (int(free.max()), int(forced.max()))
    assert row.mean_steps == pytest.approx(float(free.mean()), rel=1e-12)
    assert row.forced_mean_steps == pytest.approx(float(forced.mean()), rel=1e-12)
    assert row.off == pytest.approx(float((free > 0).double().mean()), rel=1e-12)
    assert row.saturated == pytest.approx(float((raw.abs() > 127).double().mean()), rel=1e-12)
    assert row.saturated > 0
    assert row.values == wanted.numel()


@pytest.mark.parametrize("by", ["numba", "torch"])
def test_floats_have_no_steps(monkeypatch, by):
    if by == "torch":
        without_numba(monkeypatch)
    wanted, fake, taught, _ = maps(channels_last=False)
    sums = _layer_sums.LayerSums("p", "softmax", "float")
    sums.add_floats(wanted, fake, taught)
    row = sums.row()
    error = (taught - wanted).double().square().sum()
    sqnr = 10 * math.log10(float(wanted.double().square().sum() / error))
    assert row.integer_sqnr_db == pytest.approx(sqnr, abs=1e-6)
    assert (row.max_steps, row.mean_steps, row.forced_max_steps, row.saturated) == (None,) * 4


@pytest.mark.parametrize("value", [math.nan, math.inf, 1e30])
def test_what_is_not_finite_has_no_figures(value):
    wanted = torch.ones(20_000)
    broken = torch.full_like(wanted, value)
    sums = _layer_sums.LayerSums("p", "softmax", "float")
    for _ in range(2):
        sums.add_floats(wanted, broken, wanted)
    row = sums.row()
    finite = math.isfinite(value)
    assert math.isfinite(row.fake_sqnr_db) == finite
    assert row.not_finite == (0 if finite else 40_000, 0)
    assert (row.fake_cosine is not None) == finite
    assert row.integer_sqnr_db is None  # equal
    assert row.integer_cosine == pytest.approx(1)


def test_nothing_in_a_batch():
    empty = torch.zeros(0, 4)
    sums = _layer_sums.LayerSums("p", "conv", "int8")
    sums.add_integers(empty, empty, empty, empty.to(torch.int8), FORM)
    sums.add_peak(empty.int())
    row = sums.row()
    assert (row.values, row.max_steps, row.peak_bits) == (0, 0, None)
    assert row.fake_sqnr_db is None


@pytest.mark.parametrize("form", [torch.contiguous_format, torch.channels_last])
def test_the_peak_is_that_of_the_tensor_alone(form):
    memory = torch.full((3, 5, 4, 4), 7, dtype=torch.int32).contiguous(memory_format=form)
    memory[2] = 2**30  # beside the tensor in memory
    sums = _layer_sums.LayerSums("p", "conv", "int8")
    sums.add_peak(memory[:2])
    assert sums.row().peak_bits == 4
    memory[1, 2, 3, 0] = -(2**12)
    sums.add_peak(memory[:2, :, ::2])
    assert sums.row().peak_bits == 4
    sums.add_peak(memory[:2])
    assert sums.row().peak_bits == 13


@pytest.mark.parametrize("by", ["numba", "torch"])
@pytest.mark.parametrize("spoiled", [1, 2])  # what runs free, what is taught
def test_of_what_is_no_number_no_mean_is_made(monkeypatch, by, spoiled):
    if by == "torch":
        without_numba(monkeypatch)
    else:
        pytest.importorskip("numba")
    tensors = [t.clone() for t in maps(channels_last=False)]
    tensors[spoiled][1, 3, 4, 5] = torch.nan
    sums = _layer_sums.LayerSums("p", "conv", "int8")
    sums.add_integers(*tensors, FORM)
    means = sums.sums["free_total"], sums.sums["forced_total"]
    assert [math.isnan(mean) for mean in means] == [spoiled == 1, spoiled == 2]
    assert math.isnan(sums.fake.noise) == (spoiled == 1)
    assert not math.isnan(sums.integer.noise)


@pytest.mark.parametrize("by", ["numba", "torch"])
@pytest.mark.parametrize("channels_last", [False, True])
def test_the_largest_difference_in_steps(monkeypatch, by, channels_last):
    if by == "torch":
        without_numba(monkeypatch)
    else:
        pytest.importorskip("numba")
    _, _, taught, integer = maps(channels_last=channels_last)
    raw = (taught.double() / FORM.scale).round().clamp(-127, 127)
    assert _layer_sums.largest_steps(taught, integer, FORM) == float(
        (integer.double() - raw).abs().max()
    )
    spoiled = taught.clone()
    spoiled[1, 3, 4, 5] = torch.nan
    assert not _layer_sums.largest_steps(spoiled, integer, FORM) <= 1e9
    assert _layer_sums.largest_steps(taught[:0], integer[:0], FORM) == 0


@pytest.mark.parametrize("by", ["numba", "torch"])
def test_gaps_between_floats(monkeypatch, by):
    if by == "torch":
        without_numba(monkeypatch)
    else:
        pytest.importorskip("numba")
    wanted, got, *_ = maps(channels_last=False)
    for tensor in (wanted, got):  # where both are infinite or no number there is no gap
        tensor[0, 0, 0, :2] = torch.tensor([torch.nan, torch.inf])
    most, energy, top, power = _layer_sums.float_gaps(wanted, got)
    real = wanted.isfinite()
    apart = (wanted.double() - got.double())[real]
    assert most == float(apart.abs().max())
    assert energy == pytest.approx(float(apart.square().sum()), rel=1e-12)
    assert top == float(wanted[real].abs().max())
    assert power == pytest.approx(float(wanted[real].double().square().sum()), rel=1e-12)
    for value in (torch.nan, torch.inf):
        got[1, 2, 3, 4] = value
        most, energy, *_ = _layer_sums.float_gaps(wanted, got)
        assert not most <= 1e30
        assert not energy <= 1e30
    assert _layer_sums.float_gaps(wanted[:0], got[:0]) == (0, 0, 0, 0)
