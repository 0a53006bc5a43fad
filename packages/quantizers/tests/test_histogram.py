"""abs_histogram: torch.histc's counts, exact, whatever the order and the width."""

from __future__ import annotations

from importlib.util import find_spec

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from bevquant_quantizers import calib, calibrator_state, merge
from bevquant_quantizers._abs_histogram import abs_histogram

HAS_NUMBA = find_spec("numba") is not None
BACKENDS = ["torch", "numba"] if HAS_NUMBA else ["torch"]


def fields(histogram):
    return {**vars(histogram), "counts": histogram.counts.tolist()}


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("bins", [2048, 1000, 37])
def test_counts_are_those_of_histc(bins, backend):
    for scale in (1e-6, 1.0, 3e4):
        x = torch.randn(30_000) * scale
        x = torch.cat([x, torch.linspace(0, x.abs().max(), bins + 1)])  # values on the edges
        a = x.abs()
        found = abs_histogram(x, bins, backend=backend)
        assert torch.equal(found.counts, torch.histc(a, bins, 0, a.max()).long())
        assert (found.max, found.values) == (float(a.max()), x.numel())
        assert found.zeros == int((x == 0).sum())


@pytest.mark.skipif(not HAS_NUMBA, reason="numba is not installed")
@given(
    seed=st.integers(0, 2**31),
    size=st.integers(0, 3000),
    log_upper=st.none() | st.floats(-30, 30),
    shift=st.integers(0, 5),
    bins=st.sampled_from([1, 64, 1000, 2048]),
    odd=st.sampled_from(["none", "nan", "inf", "zero", "relu", "huge", "tiny"]),
)
def test_backends_agree(seed, size, log_upper, shift, bins, odd):
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(size, generator=generator)
    if size:
        x[0] = {"nan": torch.nan, "inf": -torch.inf, "huge": 3e38, "tiny": 1e-42}.get(odd, x[0])
    x = {"zero": x * 0, "relu": x.relu()}.get(odd, x)
    upper = None if log_upper is None else float(torch.tensor(2.0**log_upper))
    a, b = (abs_histogram(x, bins, upper, shift=shift, backend=k) for k in BACKENDS)
    assert fields(a) == fields(b)
    assert int(a.counts.sum()) == a.values == int(x.isfinite().sum())
    assert a.counts.numel() <= 1 << 15


def collected(*tensors):
    calibrator = calib.HistogramCalibrator(8, None, False, num_bins=64)
    for tensor in tensors:
        calibrator.collect(tensor)
    return calibrator


def state(calibrator):
    meta, arrays = calibrator_state(calibrator)
    return meta, {name: array.tolist() for name, array in arrays.items()}


@given(
    seed=st.integers(0, 2**31),
    cut=st.integers(0, 500),
    outlier=st.sampled_from([0.0, 2.0, 40.0, 1e5, 1e30]),
)
def test_parts_add_to_the_whole_in_any_order(seed, cut, outlier):
    x = torch.randn(500, generator=torch.Generator().manual_seed(seed))
    x[seed % 500] += outlier
    width = torch.tensor([0.75])  # of the first tensor, so that all have the same bins
    whole = state(collected(width, x, width))
    for parts in ((x[:cut], x[cut:]), (x[cut:], x[:cut])):
        assert state(merge([collected(width, part) for part in parts])) == whole


def test_a_value_above_the_range_appends_bins_of_the_same_width():
    x = torch.tensor([0.5, 1.0, 1.01, 2.5])
    grown = abs_histogram(x, 4, 1.0)
    # 1.0 is the upper edge and stays in the last bin of the range.
    assert grown.counts.nonzero().flatten().tolist() == [2, 3, 4, 10]
    assert grown.counts.numel() == 11


@pytest.mark.parametrize("backend", BACKENDS)
def test_counts_beyond_two_to_the_24_are_exact(backend):
    x = torch.zeros((1 << 24) + 3)
    x[:3] = 1.0
    found = abs_histogram(x, 8, 1.0, backend=backend)
    assert found.counts.tolist() == [1 << 24, 0, 0, 0, 0, 0, 0, 3]


def test_trap_08_outliers_leave_memory_bounded():
    for outlier in (50.0, 1e6, 3e38):
        found = abs_histogram(torch.tensor([0.01, outlier]), 2048, 0.05)
        assert found.counts.numel() <= 1 << 15
        assert int(found.counts.sum()) == 2


def test_half_double_and_strided_inputs():
    x = torch.randn(300, 20)
    reference = abs_histogram(x.half().float(), 64)
    assert fields(abs_histogram(x.half(), 64)) == fields(reference)
    assert fields(abs_histogram(x.half().double(), 64)) == fields(reference)
    assert fields(abs_histogram(x.half().T, 64)) == fields(reference)
    assert abs_histogram(x.requires_grad_(), 64).counts.requires_grad is False


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_map_whose_channels_lie_side_by_side_gives_the_same_histogram(backend):
    x = torch.randn(2, 24, 60, 50)
    wanted = abs_histogram(x, bins=512, backend=backend)
    got = abs_histogram(x.to(memory_format=torch.channels_last), bins=512, backend=backend)
    assert torch.equal(got.counts, wanted.counts)
    assert (got.max, got.zeros, got.upper) == (wanted.max, wanted.zeros, wanted.upper)


def test_refuses_bad_arguments():
    x = torch.ones(3)
    for arguments in ({"bins": 0}, {"bins": 64, "max_bins": 32}, {"shift": -1}):
        with pytest.raises(ValueError, match="bins"):
            abs_histogram(x, **arguments)
    for upper in (-1.0, float("inf"), float("nan")):
        with pytest.raises(ValueError, match="upper"):
            abs_histogram(x, 4, upper)
    with pytest.raises(ValueError, match="backend"):
        abs_histogram(x, backend="gpu")


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_cuda_agrees_with_the_cpu():
    x = torch.randn(100_000)
    for upper in (None, 1.0, 1e-3):
        assert fields(abs_histogram(x.cuda(), 2048, upper)) == fields(abs_histogram(x, 2048, upper))
