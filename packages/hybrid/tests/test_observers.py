from __future__ import annotations

import pytest
import torch

from bevquant_hybrid.quantization import observer as obs
from bevquant_hybrid.quantization import observer_v2
from bevquant_quantizers.calib import HistogramCalibrator

EVERY = [
    obs.CalibObserver,
    obs.ClipObserver,
    obs.ClipStdObserver,
    obs.KLObserver,
    obs.MSEObserver,
    obs.MinMaxObserver,
    obs.MixObserver,
    obs.MovingAverageMinMaxObserver,
    obs.PercentileObserver,
]


@pytest.mark.parametrize(("dtype", "steps"), [("qint8", 127.5), ("qint16", 32767.5)])
def test_scale_is_amax_over_half_the_steps(dtype: str, steps: float) -> None:
    observer = obs.MinMaxObserver(dtype=dtype)
    observer(torch.tensor([-3.0, 2.0]))
    scale, zero_point = observer.calculate_qparams()
    assert scale.item() == pytest.approx(3.0 / steps, rel=1e-6)
    assert zero_point.tolist() == [0]


@pytest.mark.parametrize("kind", EVERY)
def test_nothing_seen_is_scale_one(kind) -> None:
    observer = kind()
    assert observer.calculate_qparams()[0].tolist() == [1.0]
    observer(torch.empty(0, 3))
    assert not observer.observed


@pytest.mark.parametrize("kind", EVERY)
@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_values_without_a_range_are_refused(kind, bad: float) -> None:
    with pytest.raises(ValueError, match=r"NaN|infinite"):
        kind()(torch.tensor([1.0, bad]))


@pytest.mark.parametrize("kind", EVERY)
def test_zeros_give_a_scale_to_divide_by(kind) -> None:
    observer = kind()
    observer(torch.zeros(2, 100))
    assert 0 < observer.calculate_qparams()[0].item() < 1e-3


def test_averages_move_by_the_constant_and_zero_freezes() -> None:
    observer = obs.MovingAverageMinMaxObserver(averaging_constant=0.25)
    for top in (1.0, 2.0, 4.0):
        observer(torch.tensor([-top, top / 2]))
    assert observer.min_val.item() == pytest.approx(-(1.25 + 0.25 * 2.75))
    observer.averaging_constant = 0.0
    before = observer.max_val.clone()
    observer(torch.tensor([100.0]))
    assert torch.equal(observer.max_val, before)


def test_channels_have_ranges_of_their_own() -> None:
    observer = obs.MovingAveragePerChannelMinMaxObserver(ch_axis=1)
    x = torch.randn(3, 4, 5)
    observer(x)
    assert torch.equal(observer.max_val, x.amax((0, 2)))
    assert observer.calculate_qparams()[0].shape == (4,)


def test_the_calibration_range_is_a_left_edge_of_the_histogram() -> None:
    observer = obs.CalibObserver()
    for _ in range(5):
        observer(torch.rand(1, 3, 224, 224))
    counts, edges = observer.calib_hist.double(), observer.calib_bin_edges
    reached = (counts.cumsum(0) / counts.sum() >= 0.9999).nonzero()[0, 0]
    assert observer.calculate_qparams()[0].item() * 127.5 == pytest.approx(edges[reached].item())
    assert f"{edges[reached].item():.4f}" == "0.9995"


def test_an_outlier_does_not_make_the_histogram_large() -> None:
    observer = obs.CalibObserver()
    observer(torch.full((10,), 0.05))
    observer(torch.tensor([50_000.0]))
    assert observer.calib_hist.numel() <= 2**17
    assert int(observer.calib_hist.sum()) == 11


def test_mse_finds_the_least_error_of_all_shares() -> None:
    x = torch.cat([torch.randn(4000), torch.tensor([40.0])])
    observer = obs.MSEObserver()
    observer(x)

    def error(amax: float) -> float:
        step = amax / 127.5
        return float(((x / step).round().clamp(-128, 127) * step - x).square().sum())

    best = min(range(1, 101), key=lambda i: error(40.0 * i / 100))
    assert observer.max_val.item() == pytest.approx(40.0 * best / 100)


@pytest.mark.parametrize("kind", [obs.KLObserver, obs.MixObserver, obs.PercentileObserver])
def test_searches_cut_a_long_tail(kind) -> None:
    x = torch.randn(50_000).exp()
    observer = kind()
    observer(x)
    assert 1.0 < observer.max_val.item() < x.max().item()


def test_clip_std_keeps_what_lies_within() -> None:
    x = torch.cat([torch.randn(10_000), torch.tensor([50.0])])
    observer = obs.ClipStdObserver(std_scale=3.0)
    observer(x)
    assert observer.max_val.item() == pytest.approx((x.mean() + 3 * x.std(correction=0)).item())
    assert observer.min_val.item() == pytest.approx(
        max(x.min(), x.mean() - 3 * x.std(correction=0)).item()
    )


@pytest.mark.parametrize(
    ("make", "what"),
    [
        (lambda: obs.FixedScaleObserver(scale=0.0), "scale=0.0"),
        (lambda: obs.FixedScaleObserver(scale=1.0, zero_point=3), "zero_point=3"),
        (lambda: obs.PercentileObserver(percentile=101.0), "percentile=101"),
        (lambda: obs.MSEObserver(stride=0), "stride=0"),
        (lambda: obs.MovingAverageMinMaxObserver(averaging_constant=2.0), "averaging_constant=2.0"),
        (lambda: obs.MinMaxObserver(qscheme=torch.per_tensor_affine), "zero point 0"),
        (lambda: obs.ClipObserver(xmin=1.0, xmax=0.0), "xmin=1.0"),
    ],
)
def test_settings_out_of_range_are_named(make, what: str) -> None:
    with pytest.raises(ValueError, match=what):
        make()


def test_divergence_is_searched_over_what_an_interval_counted() -> None:
    batches = [torch.randn(4000).exp() for _ in range(3)]
    observer = obs.KLObserver(update_interval=3)
    for batch in batches[:2]:
        observer(batch)
        assert not observer.observed
    observer(batches[2])
    together = obs.KLObserver()
    together(batches[0])
    alone = together.max_val.clone()
    calibrator = HistogramCalibrator(8, None, False, num_bins=512)
    for batch in batches:
        calibrator.collect(batch)
    assert observer.max_val.item() == calibrator.compute_amax("entropy").item()
    assert observer.max_val.item() != alone.item()
    found = observer.max_val.clone()
    for batch in batches:
        observer(0.1 * batch)
    assert observer.max_val < found  # the next interval is counted afresh, and averaged


@pytest.mark.parametrize("kind", [obs.MSEObserver, obs.MixObserver, obs.PercentileObserver])
def test_searched_ranges_of_channels_are_those_of_each_alone(kind) -> None:
    x = torch.randn(3, 500) * torch.tensor([[0.1], [1.0], [7.0]])
    observer = kind(qscheme=torch.per_channel_symmetric, ch_axis=0)
    observer(x)
    for channel in range(3):
        alone = kind()
        alone(x[channel])
        assert observer.max_val[channel].item() == pytest.approx(alone.max_val.item())


def test_newer_extremes_are_averaged() -> None:
    observer = observer_v2.MinMaxObserver(averaging_constant=0.25, ch_axis=0)
    for top in (1.0, 3.0):
        observer(torch.tensor([-top, top]))
    assert observer.max_val.item() == 1.5


def test_both_bounds_of_all_tensors_are_kept() -> None:
    observer = obs.MinMaxObserver()
    for values in ([-1.0, 0.5], [-0.25, 2.0], [0.0, 1.0]):
        observer(torch.tensor(values))
    assert (float(observer.min_val), float(observer.max_val)) == (-1.0, 2.0)
