"""Max and histogram calibrators: collecting, growing, computing."""

import copy

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from bevquant_quantizers import calib
from bevquant_quantizers.calib import HistogramCalibrator, MaxCalibrator

METHODS = ["mse", "entropy", "percentile", "max"]


# Max


def test_max_of_all_tensors():
    calibrator = MaxCalibrator(8, None, False, track_amax=True)
    x, y = torch.rand(129), -2 * torch.rand(127)
    calibrator.collect(x)
    calibrator.collect(y)
    assert calibrator.compute_amax() == max(x.max(), -y.min())
    assert calibrator.compute_amax().shape == ()
    np.testing.assert_array_equal(calibrator.amaxs, [x.max().numpy(), (-y.min()).numpy()])
    assert "amaxs" in repr(calibrator)
    assert str(calibrator) == "MaxCalibrator(track_amax=True)"
    calibrator.reset()
    assert calibrator.compute_amax() is None
    assert calibrator.amaxs == []


@pytest.mark.parametrize("axis", [0, 1, -1, (0, 1), (0, 1, 2, 3)])
def test_max_per_channel(axis):
    calibrator = MaxCalibrator(8, axis, False)
    x, y = torch.randn(5, 6, 3, 2), torch.randn(5, 6, 3, 2)
    calibrator.collect(x)
    calibrator.collect(y)
    axes = [a % 4 for a in ([axis] if isinstance(axis, int) else axis)]
    other = [i for i in range(4) if i not in axes]
    both = torch.maximum(x.abs(), y.abs())
    expected = both.amax(other, keepdim=True) if other else both
    assert torch.equal(calibrator.compute_amax(), expected)
    with pytest.raises(RuntimeError, match="shape changed") as caught:
        calibrator.collect(torch.randn(7, 7, 7, 7))
    assert isinstance(caught.value, ValueError)  # as of a collection that another model left


def test_max_is_not_shared_with_its_users():
    """Upstream hands out its own tensor: a quantizer's range then moves with later batches."""
    calibrator = MaxCalibrator(8, None, False)
    calibrator.collect(torch.ones(3))
    before = calibrator.compute_amax()
    calibrator.collect(3 * torch.ones(3))
    assert before == 1.0
    before.fill_(9.0)
    assert calibrator.compute_amax() == 3.0


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64, torch.int64])
def test_max_of_any_dtype(dtype):
    calibrator = MaxCalibrator(8, None, False)
    calibrator.collect(torch.tensor([1, -7, 3]).to(dtype))
    assert float(calibrator.compute_amax()) == 7.0


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("axis", [None, 0, (0, 2)])
def test_max_like_upstream(upstream, axis, seed):
    torch.manual_seed(seed)
    ours, theirs = MaxCalibrator(8, axis, False), upstream.calib.MaxCalibrator(8, axis, False)
    for _ in range(3):
        x = torch.randn(4, 5, 6)
        ours.collect(x)
        theirs.collect(x)
    assert torch.equal(ours.compute_amax(), theirs.compute_amax())
    assert repr(ours) == repr(theirs)
    assert str(ours) == str(theirs)


# Histogram: collecting


def test_histogram_like_upstream(upstream):
    """One tensor, and smaller ones after it: counts and edges to the bit."""
    ours, theirs = (c.HistogramCalibrator(8, None, False) for c in (calib, upstream.calib))
    x = torch.randn(20_000)
    for part in (x, x / 2, x[:100] * 0.99):
        ours.collect(part)
        theirs.collect(part)
    assert torch.equal(ours._calib_hist, theirs._calib_hist.long())
    assert torch.equal(ours._calib_bin_edges, theirs._calib_bin_edges)
    assert str(ours) == str(theirs)


@pytest.mark.parametrize("kind", ["relu", "gaussian", "heavy", "lognormal", "uniform"])
@pytest.mark.parametrize("method", ["mse", "percentile"])
def test_grown_histogram_gives_upstreams_amax(upstream, draw, kind, method):
    ours, theirs = (
        c.HistogramCalibrator(8, None, False, num_bins=256) for c in (calib, upstream.calib)
    )
    x = torch.from_numpy(draw(kind, 30_000))
    for part in (x[:10_000].clamp(max=float(x.max()) / 1.4), x[10_000:20_000], x[20_000:]):
        ours.collect(part)
        theirs.collect(part)
    assert ours._calib_hist.sum() == 30_000
    assert len(theirs._calib_hist) > 256
    amax = float(theirs.compute_amax(method, stride=2))
    assert ours.compute_amax(method, stride=2) == pytest.approx(amax, rel=1e-6)


def test_growth_appends_bins():
    calibrator = HistogramCalibrator(8, None, False, num_bins=19)
    calibrator.collect(torch.linspace(0, 1, 200))
    assert calibrator._calib_hist.numel() == 19
    calibrator.collect(torch.linspace(0, 2.02, 200))
    assert calibrator._calib_hist.numel() == calibrator._calib_bin_edges.numel() - 1
    width = float(calibrator._calib_bin_edges[1])
    assert width == pytest.approx(1 / 19)
    assert 0 <= float(calibrator._calib_bin_edges[-1]) - 2.02 <= width
    assert calibrator._calib_hist.sum() == 400


def test_upstreams_growing_example():
    calibrator = HistogramCalibrator(8, None, False, grow_method="stretch")
    calibrator.collect(torch.tensor([0, 255, 255, 255, 255, 255]))
    calibrator.collect(torch.tensor([0, 255, 255, 255, 255, 256]))
    entropy, mse = (calibrator.compute_amax(method) for method in ("entropy", "mse"))
    assert (entropy - 255.0).abs() < (entropy - 256.0).abs()
    assert (mse - 255.0).abs() < 0.5


def test_reset_forgets_the_growth():
    """Upstream's next histogram has as many bins as the last one had grown to."""
    calibrator = HistogramCalibrator(8, None, False, num_bins=19)
    x = torch.rand(100)
    calibrator.collect(x)
    first = calibrator._calib_hist
    calibrator.collect(3 * x)
    calibrator.reset()
    assert calibrator.compute_amax("mse") is None
    calibrator.collect(x)
    assert torch.equal(calibrator._calib_hist, first)


def test_numpy_collection_is_the_same_one():
    x, y = torch.rand(1023), torch.rand(1023) + 1
    pair = [HistogramCalibrator(8, None, False, num_bins=19, torch_hist=t) for t in (False, True)]
    for calibrator in pair:
        for part in (x, y, x, y):
            calibrator.collect(part)
            calibrator.compute_amax("percentile")
    np.testing.assert_array_equal(pair[0]._calib_hist, pair[1]._calib_hist.numpy())
    np.testing.assert_array_equal(pair[0]._calib_bin_edges, pair[1]._calib_bin_edges.numpy())


def test_skip_zeros():
    calibrator = HistogramCalibrator(8, None, False, skip_zeros=True)
    calibrator.collect(torch.tensor([0, 0, 0, 0, 0, 1, 2, 3, 4, 5]))
    calibrator.collect(torch.tensor([0, 0, 0, 0, 0, 6, 7, 8, 9, 10]))
    assert calibrator._calib_hist.sum() == 10
    assert abs(calibrator.compute_amax("percentile", percentile=50) - 5) < 10 / 2048
    calibrator.reset()
    calibrator.collect(torch.zeros(4))
    assert calibrator._calib_hist.sum() == 0
    assert calibrator.compute_amax("mse") == 0


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64, torch.int32])
def test_any_dtype(dtype):
    calibrator = HistogramCalibrator(8, None, False)
    calibrator.collect((100 * torch.randn(1000)).to(dtype))
    assert calibrator._calib_hist.sum() == 1000
    assert calibrator.compute_amax("mse").dtype == torch.float32


@settings(max_examples=20)
@given(st.permutations(range(5)))
def test_order_after_the_first_tensor_does_not_matter(order):
    generator = torch.Generator().manual_seed(1)
    parts = [s * torch.randn(300, generator=generator) for s in (0.1, 3.0, 1.0, 40.0, 0.01)]
    sums = []
    for numbers in (range(5), order):
        calibrator = HistogramCalibrator(8, None, False, num_bins=64)
        calibrator.collect(torch.tensor([1.0]))
        for i in numbers:
            calibrator.collect(parts[i])
        sums.append(calibrator._calib_hist)
    assert torch.equal(*sums)


# Histogram: traps


def test_trap_08_empty_first_frame():
    calibrator = HistogramCalibrator(8, None, False)
    calibrator.collect(torch.zeros(0, 5))
    assert calibrator.compute_amax("mse") is None
    assert "None" in str(calibrator)
    x = torch.randn(500)
    calibrator.collect(x)
    calibrator.collect(torch.zeros(0, 5))
    alone = HistogramCalibrator(8, None, False)
    alone.collect(x)
    for method in METHODS:
        assert calibrator.compute_amax(method) == alone.compute_amax(method)
    largest = MaxCalibrator(8, None, False)
    largest.collect(torch.zeros(0))
    assert largest.compute_amax() is None


def test_trap_08_all_zero_first_frame():
    x = torch.randn(500)
    zeros_first, zeros_last = (HistogramCalibrator(8, None, False) for _ in range(2))
    for part in (torch.zeros(300), x):
        zeros_first.collect(part)
    assert zeros_first._calib_hist.sum() == 800
    for part in (x, torch.zeros(300)):
        zeros_last.collect(part)
    assert torch.equal(zeros_first._calib_hist, zeros_last._calib_hist)
    only = HistogramCalibrator(8, None, False)
    only.collect(torch.zeros(300))
    for method in METHODS:
        assert zeros_first.compute_amax(method) == zeros_last.compute_amax(method)
        assert only.compute_amax(method) == 0


@pytest.mark.parametrize("outlier", [50.0, 5e4, 3e38])
def test_trap_08_outlier_keeps_memory_bounded(outlier):
    calibrator = HistogramCalibrator(8, None, False)
    calibrator.collect(0.05 * torch.rand(10_000))
    calibrator.collect(torch.tensor([outlier]))
    assert 2048 <= calibrator._calib_hist.numel() <= 32 * 2048
    assert calibrator._calib_hist.sum() == 10_001
    assert calibrator._calib_bin_edges[-2] <= outlier
    assert outlier <= float(calibrator._calib_bin_edges[-1]) * (1 + 1e-6)
    for method in METHODS:
        amax = float(calibrator.compute_amax(method))
        assert 0 < amax <= outlier * (1 + 1e-3)


def test_trap_09_any_method_may_follow_any_other():
    calibrator = HistogramCalibrator(8, None, False)
    calibrator.collect(torch.relu(torch.randn(5000)))
    alone = {method: copy.deepcopy(calibrator).compute_amax(method) for method in METHODS}
    counts, edges = calibrator._calib_hist.clone(), calibrator._calib_bin_edges.clone()
    for first in METHODS:
        for second in METHODS:
            assert calibrator.compute_amax(first) == alone[first]
            assert calibrator.compute_amax(second) == alone[second]
    assert torch.equal(calibrator._calib_hist, counts)
    assert torch.equal(calibrator._calib_bin_edges, edges)


def test_trap_10_no_cuda_is_asked_for(monkeypatch):
    def refuse(*_, **__):
        raise AssertionError("asked for CUDA")

    monkeypatch.setattr(torch.Tensor, "cuda", refuse)
    monkeypatch.setattr(torch.nn.Module, "cuda", refuse)
    calibrator = HistogramCalibrator(8, None, False)
    calibrator.collect(torch.randn(1000))
    for method in METHODS:
        assert calibrator.compute_amax(method).device.type == "cpu"


def test_trap_12_one_exact_histogram_not_averages():
    """The range of all batches together, whatever the batches' sizes; counts stay whole."""
    x = torch.randn(9000)
    x[0] = x.abs().max()  # so that both take their width from it
    whole, parts = (HistogramCalibrator(8, None, False) for _ in range(2))
    whole.collect(x)
    for part in x.split([10, 90, 900, 8000]):
        parts.collect(part)
    assert parts._calib_hist.dtype == torch.int64
    assert torch.equal(whole._calib_hist, parts._calib_hist)


def test_trap_12_counts_stay_exact_beyond_float32():
    calibrator = HistogramCalibrator(8, None, False, num_bins=4)
    calibrator.load_histogram(torch.tensor([2**25, 0, 0, 1]), torch.linspace(0, 1, 5))
    calibrator.collect(torch.tensor([0.1]))
    assert calibrator._calib_hist.tolist() == [2**25 + 1, 0, 0, 1]


@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf")])
@pytest.mark.parametrize("kind", [MaxCalibrator, HistogramCalibrator])
def test_non_finite_values_are_refused_by_name(kind, value):
    calibrator = kind(8, None, False)
    calibrator.name = "encoder.conv1._input_quantizer"
    calibrator.collect(torch.ones(4))
    with pytest.raises(ValueError, match=r"encoder\.conv1\._input_quantizer.*(NaN|infinite)"):
        calibrator.collect(torch.tensor([1.0, value, 100.0]))
    amax = calibrator.compute_amax() if kind is MaxCalibrator else calibrator.compute_amax("max")
    assert amax == 1.0


# Histogram: per channel


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("axis", [0, 1, -1, (0, 2)])
def test_channels_are_separate_histograms(method, axis):
    x = torch.randn(3, 4, 50) * torch.tensor([0.01, 1.0, 30.0]).view(3, 1, 1)
    x[1, 2] = 0
    calibrator = HistogramCalibrator(8, axis, False, num_bins=256)
    for part in (x / 3, torch.zeros_like(x), x):
        calibrator.collect(part)
    amax = calibrator.compute_amax(method)
    axes = [a % 3 for a in ([axis] if isinstance(axis, int) else axis)]
    assert amax.shape == tuple(n if i in axes else 1 for i, n in enumerate(x.shape))
    front = x.movedim(axes, list(range(len(axes)))).flatten(0, len(axes) - 1)
    for row, value in zip(front, amax.flatten(), strict=True):
        alone = HistogramCalibrator(8, None, False, num_bins=256)
        for part in (row / 3, torch.zeros_like(row), row):
            alone.collect(part)
        assert value == alone.compute_amax(method)


def test_channels_may_not_change():
    calibrator = HistogramCalibrator(8, 0, False)
    calibrator.collect(torch.randn(3, 5))
    with pytest.raises(ValueError, match="shape"):
        calibrator.collect(torch.randn(4, 5))
    with pytest.raises(ValueError, match="out of range"):
        HistogramCalibrator(8, 2, False).collect(torch.randn(3, 5))
    assert "3 channels" in str(calibrator)
    assert "calib_hist" in repr(calibrator)


@pytest.mark.parametrize("kind", [MaxCalibrator, HistogramCalibrator])
def test_axes_reach_from_minus_the_rank_to_below_it(kind):
    x = torch.arange(24.0).reshape(2, 3, 4)
    for axis, shape in ((-3, (2, 1, 1)), (-1, (1, 1, 4)), (0, (2, 1, 1)), (2, (1, 1, 4))):
        calibrator = kind(8, axis, False)
        calibrator.collect(x)
        assert calibrator.compute_amax("max").shape == shape
    for axis in (-4, 3, (0, 3), (-4, 1)):
        calibrator = kind(8, axis, False)
        with pytest.raises(ValueError, match=r"out of range for a tensor of shape \(2, 3, 4\)"):
            calibrator.collect(x)


# Taking over a histogram


def test_loaded_edges_are_kept_to_the_bit():
    """Edges that another rule made, a rounding error from ours, until the histogram grows."""
    edges = torch.linspace(0, 0.8, 9)
    edges[1:-1] = torch.nextafter(edges[1:-1], torch.ones(7))
    calibrator = HistogramCalibrator(8, None, False)
    calibrator.load_histogram(torch.arange(8), edges)
    assert torch.equal(calibrator._calib_bin_edges, edges)
    assert calibrator.compute_amax("percentile", percentile=70) in edges
    calibrator.collect(torch.tensor([0.95]))
    assert calibrator._calib_bin_edges.numel() == calibrator._calib_hist.numel() + 1 > 9
    torch.testing.assert_close(calibrator._calib_bin_edges[:9], edges)


def test_loaded_histogram_goes_on():
    first = HistogramCalibrator(8, None, False)
    x = torch.randn(3000)
    first.collect(x)
    second = HistogramCalibrator(8, None, False)
    second.load_histogram(first._calib_hist, first._calib_bin_edges)
    for method in ("mse", "entropy", "percentile"):
        assert first.compute_amax(method) == second.compute_amax(method)
    for calibrator in (first, second):
        calibrator.collect(2 * x)
    assert torch.equal(first._calib_hist, second._calib_hist)


def test_loaded_histogram_that_does_not_start_at_zero():
    calibrator = HistogramCalibrator(8, None, False)
    calibrator.load_histogram(torch.tensor([5, 0, 7]), torch.tensor([2.0, 3.0, 4.0, 5.0]))
    assert calibrator._calib_hist.tolist() == [0, 0, 5, 0, 7]
    torch.testing.assert_close(calibrator._calib_bin_edges, torch.arange(6.0))


@pytest.mark.parametrize(
    ("counts", "edges"),
    [
        ([1, 2], [0.0, 1.0]),
        ([-1, 2], [0.0, 1.0, 2.0]),
        ([1, 2], [0.0, 1.0, 9.0]),
        ([1, 2], [-1.0, 0.0, 1.0]),
        ([1, 2], [0.0, 1.0, torch.inf]),
        ([1, 2], [0.0, torch.nan, 2.0]),
        ([[1], [2]], [0.0, 1.0, 2.0]),
        ([], [0.0]),
    ],
)
def test_bad_histograms_are_refused(counts, edges):
    calibrator = HistogramCalibrator(8, None, False)
    with pytest.raises(ValueError, match="equal steps"):
        calibrator.load_histogram(torch.tensor(counts), torch.tensor(edges))
    with pytest.raises(ValueError, match="channels"):
        HistogramCalibrator(8, 0, False).load_histogram(torch.ones(1), torch.ones(2))


def test_bad_arguments():
    with pytest.raises(ValueError, match="num_bins"):
        HistogramCalibrator(8, None, False, num_bins=0)
    calibrator = HistogramCalibrator(8, None, False)
    with pytest.raises(TypeError, match="Unknown calibration method"):
        calibrator.compute_amax("kl")
    with pytest.raises(ValueError, match="range"):
        calibrator.compute_amax("percentile", percentile=200)


# Searches on what upstream's tests collect


@pytest.mark.parametrize("unsigned", [False, True])
def test_entropy_drops_an_outlier(unsigned):
    calibrator = HistogramCalibrator(8, None, unsigned)
    x = torch.rand(11, 7, 3, 3)
    x[1, 1, 1, 1] = 10.0
    calibrator.collect(x)
    calibrator.collect(torch.rand(11, 7, 3, 3))
    assert calibrator.compute_amax("entropy") < 1.1


@pytest.mark.parametrize(("unsigned", "value"), [(False, 255.0), (True, 512.0)])
def test_mse_keeps_the_crowd(unsigned, value):
    calibrator = HistogramCalibrator(8, None, unsigned)
    x = torch.full((11, 7, 3, 3), value)
    x[1, 1, 1, 1] = value + 1
    calibrator.collect(x)
    amax = calibrator.compute_amax("mse")
    assert (amax - value).abs() < (amax - value - 1).abs()


def test_percentiles_of_a_ramp():
    calibrator = HistogramCalibrator(8, None, False)
    calibrator.collect(torch.arange(100))
    assert abs(calibrator.compute_amax("percentile", percentile=90) - 89) < 100 / 1024
    calibrator.collect(torch.arange(0, 50, 0.5))
    assert abs(calibrator.compute_amax("percentile", percentile=99) - 97) < 100 / 1024


@pytest.mark.parametrize("settings", [{"num_bins": 10**9}, {"num_bins": "8"}, {"num_bins": True}])
def test_bins_that_no_memory_holds_are_refused(settings):
    with pytest.raises(ValueError, match="num_bins must be an integer from 1 to"):
        HistogramCalibrator(8, None, False, **settings)


@pytest.mark.parametrize("bits", [10**9, -1, None])
@pytest.mark.parametrize("cls", [HistogramCalibrator, MaxCalibrator])
def test_bits_that_no_integer_has_are_refused(cls, bits):
    with pytest.raises((ValueError, TypeError), match="num_bits must be"):
        cls(bits, None, False)


@pytest.mark.parametrize("cls", [HistogramCalibrator, MaxCalibrator])
@pytest.mark.parametrize("value", [None, [1.0], torch.ones(2, dtype=torch.complex64)])
def test_only_real_tensors_are_collected(cls, value):
    with pytest.raises(TypeError, match="expected a tensor of real numbers"):
        cls(8, None, False).collect(value)


@pytest.mark.parametrize("method", ["mse", "entropy"])
@pytest.mark.parametrize("search", [{"start_bin": 64}, {"start_bin": 2**63}, {"stride": 2**63}])
def test_a_search_without_candidates_gives_what_it_has(method, search):
    calibrator = HistogramCalibrator(8, None, False, num_bins=64)
    calibrator.collect(torch.linspace(0, 3, 500))
    amax = calibrator.compute_amax(method, **{"start_bin": 63, **search})
    assert 2.9 < amax.item() <= 3.0
