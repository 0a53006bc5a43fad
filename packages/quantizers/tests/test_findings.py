"""Calibrations that cannot be right are named, and good ones are not."""

import json
import math
import re

import numpy as np
import pytest
import torch
from torch import nn

from bevquant_quantizers import QuantDescriptor, TensorQuantizer, calibrate, fake_quantize
from bevquant_quantizers._abs_histogram import abs_histogram
from bevquant_quantizers._findings import expected_sqnr


class Watch(nn.Module):
    """Two quantizers: of what comes in, and of what a layer makes of it."""

    def __init__(self, **settings):
        super().__init__()
        self.input = TensorQuantizer(QuantDescriptor(calib_method="histogram", **settings))

    def forward(self, x):
        return self.input(x)


def report(*batches, method="mse", **settings):
    return calibrate(Watch(**settings), batches, method=method)


def kinds(found):
    return [finding.kind for finding in found.findings]


def lidar(n=4000, seed=0):
    """Voxel means as a LiDAR gives them: x, y, z in metres, intensity to 255, no time lag."""
    rng = np.random.default_rng(seed)
    far = rng.exponential(12.0, n).clip(1, 54)
    angle = rng.uniform(0, 2 * np.pi, n)
    rows = [far * np.cos(angle), far * np.sin(angle), rng.normal(-1, 1, n)]
    signs = rng.random(n) < 0.01  # shine as nothing else does
    rows += [np.where(signs, rng.uniform(0, 255, n), rng.exponential(10.0, n)), np.zeros(n)]
    return torch.tensor(np.stack(rows, 1), dtype=torch.float32)


@pytest.mark.parametrize("method", ["mse", "percentile", "max"])
@pytest.mark.parametrize("kind", "relu gaussian heavy uniform sparse lognormal".split())
def test_usual_distributions_are_no_finding(draw, kind, method):
    found = report(torch.from_numpy(draw(kind, 20_000)), method=method)
    assert found.poor == ()


def test_lidar_features_are_no_finding():
    assert report(lidar(), lidar(seed=1)).findings == ()


def test_trap_49_points_at_zero():
    """2,000 points at the origin are one voxel of zeros."""
    found = report(torch.zeros(1, 5))
    assert kinds(found) == ["all zero"]
    assert found.poor == found.findings
    assert "all 5 values were zero" in str(found)


def test_weights_of_zeros_are_exact():
    """Layers that start at zero, as the offsets of a deformable convolution, add their bias."""

    class Zeros(nn.Module):
        def __init__(self):
            super().__init__()
            self._weight_quantizer = TensorQuantizer(QuantDescriptor())

        def forward(self, x):
            return x * self._weight_quantizer(torch.zeros(4, 4)).sum()

    found = calibrate(Zeros(), [torch.ones(1)], method="max")
    assert kinds(found) == ["all zero"]
    assert found.poor == ()
    assert "all weights are 0" in str(found)


def test_trap_49_copies_of_one_point():
    """10,000 copies of a point are one voxel, whose five values set the range."""
    voxel = torch.tensor([[12.0, -3.5, -1.0, 40.0, 0.0]])
    found = report(voxel, voxel)
    assert "few values" in kinds(found)
    assert "10 values, and integers have 128 magnitudes" in str(found)
    # Not put into voxels they are many values of a handful of magnitudes.
    found = report(voxel.repeat(10_000, 1))
    assert kinds(found) == ["few distinct"]
    assert "50,000 values have 5 magnitudes" in str(found)


@pytest.mark.parametrize("method", ["mse", "max", "percentile", "entropy"])
def test_trap_49_a_handful_of_broken_values(method):
    """1 % broken values give a range of 3·10³⁸; the batch that held them is named."""
    broken = lidar(seed=2)
    broken[::100, 3] = 3e38
    found = report(lidar(), broken, lidar(seed=1), method=method)
    poor = {finding.kind: finding for finding in found.poor}
    assert poor["outliers"].frame == 1
    assert poor["outliers"].tensor == "input"
    assert "input, batch 1: outliers: " in str(found)
    if method != "percentile":  # whose 99.99 lie within the broken ones' bin
        assert poor["float16"].frame == 1


@pytest.mark.parametrize(("size", "flagged"), [(62.0, False), (67.0, True)])
def test_outliers_begin_where_the_crowd_has_two_integers(size, flagged):
    """98 of 100 values lie below 64th of the range: 127 / 64 is 1.98 integers."""
    x = torch.linspace(0, 100 / 98, 10_000)
    x[9850:] = size
    found = report(x, method="max")
    assert kinds(found) == ["outliers"] * flagged
    if flagged:
        assert "9,999 values other than zero made the range 67" in str(found)


def test_a_later_batch_finds_outliers_between_the_bins_of_the_first():
    """A range of 1.01 doubles bins made for 1: 98 % reach 16 / 1024, a 64.6th of it."""
    first, second = torch.full((10_000,), 15.5 / 1024), torch.full((10_000,), 15.5 / 1024)
    first[0], second[0] = 1.0, 1.01
    assert "outliers" in kinds(report(first, second, method="max"))
    first[0] = second[0] = 1.0  # 64 times, and not more
    assert "outliers" not in kinds(report(first, second, method="max"))


def test_many_large_values_are_no_outliers():
    x = torch.rand(10_000)
    x[::30] = 1000.0  # three in a hundred
    assert report(x, method="max").poor == ()


def test_one_magnitude_is_constant_and_a_mask_is_not():
    found = report(torch.full((3, 400), -0.7))
    assert kinds(found) == ["constant"]
    assert "all 1,200 values have one magnitude, 0.7" in str(found)
    assert report((torch.arange(1000) % 3 == 0).float()).findings == ()


@pytest.mark.parametrize(("distinct", "flagged"), [(7, True), (8, False)])
def test_few_magnitudes(distinct, flagged):
    found = report(1.0 + torch.arange(2000.0) % distinct)
    assert kinds(found) == ["few distinct"] * flagged


@pytest.mark.parametrize(
    ("bits", "unsigned", "magnitudes"), [(8, False, 128), (8, True, 128), (4, False, 8)]
)
def test_fewer_values_than_integers_have_magnitudes(bits, unsigned, magnitudes):
    values = torch.linspace(0.1, 1, magnitudes)
    settings = {"num_bits": bits, "unsigned": unsigned}
    assert report(values, **settings).findings == ()
    found = report(values[1:], **settings)
    assert kinds(found) == ["few values"]
    assert f"{magnitudes - 1} values, and integers have {magnitudes} magnitudes" in str(found)


@pytest.mark.parametrize(("top", "flagged"), [(65504.0, False), (65600.0, True)])
def test_beyond_float16(top, flagged):
    x = torch.rand(3000) * 60_000
    x[7] = top
    found = report(torch.rand(3000) * 60_000, x, x, method="max")
    assert kinds(found) == ["float16"] * flagged
    assert [f.frame for f in found.findings] == [1] * flagged  # the first that held it
    # A MaxCalibrator keeps no batch.
    model = nn.Sequential(TensorQuantizer(QuantDescriptor()))
    found = calibrate(model, [x])
    assert [(f.kind, f.frame) for f in found.findings] == [("float16", None)] * flagged


def test_what_nothing_reaches_is_poor():
    class Skips(Watch):
        def forward(self, x):
            return x

    found = calibrate(Skips(), [lidar()])
    assert kinds(found) == ["no values"]
    assert not found.poor[0].frame


def test_channels_are_judged_together():
    """A dead channel is none of a dead tensor, and few values a channel may be many in all."""
    x = torch.rand(100, 6)
    x[:, 2] = 0
    assert report(x, axis=1).findings == ()
    x[:, 4] = 1.0
    assert report(x, axis=1).findings == ()
    broken = x.clone()
    broken[0, 3] = 1e6
    found = report(x, broken, axis=1, method="max")
    assert [(f.kind, f.frame) for f in found.findings] == [("float16", 1), ("outliers", 1)]


def test_entropy_on_lidar_features_is_told():
    """The loss is told where mse would keep 6 dB more, and forbids nothing."""
    x = torch.cat([lidar(seed=s) for s in range(4)])
    found = report(x, method="entropy")
    (told,) = found.findings
    assert (told.kind, told.poor, found.poor) == ("method", False, ())
    assert "method='mse'" in str(found)
    assert "note: input: method: 'entropy' keeps" in str(found)
    # What it says is what happens.
    measured = []
    for method in ("entropy", "mse"):
        y = fake_quantize(x, report(x, method=method)["input"].amax[0])
        measured.append(float(10 * torch.log10((x**2).sum() / ((y - x) ** 2).sum())))
    assert measured[1] - measured[0] > 6
    words = told.evidence.replace(",", "").split()
    claimed = [float(words[i - 1]) for i, word in enumerate(words) if word == "dB"]
    # Bins are an eighth of a step of mse's range: their centres are not quite the values.
    np.testing.assert_allclose([claimed[-1]], measured[1], atol=0.3)
    assert abs(float(words[2]) - measured[0]) < 0.3


def test_close_methods_are_not_told(draw):
    x = torch.from_numpy(draw("gaussian", 20_000))
    assert report(x, method="entropy").findings == ()


@pytest.mark.parametrize(("bits", "unsigned"), [(8, False), (8, True), (4, False)])
def test_expected_sqnr_is_its_definition(bits, unsigned):
    """Values at the centres of their bins: the ratio is that of quantizing them."""
    rng = np.random.default_rng(3)
    counts = rng.integers(0, 9, 64)
    counts[-1] = 1
    centers = (np.arange(64) + 0.5) / 16
    x = torch.from_numpy(np.repeat(centers, counts)).float()
    row = abs_histogram(torch.cat([x, torch.zeros(50)]), 64, 4.0)
    assert row.counts[0] == counts[0] + 50
    for amax in (0.9, 2.5, 4.0):
        y = fake_quantize(x.double(), torch.tensor(amax, dtype=torch.float64), bits, unsigned)
        noise = float(((y - x) ** 2).sum())
        wanted = 10 * math.log10(float((x.double() ** 2).sum()) / noise)
        assert expected_sqnr([row], [amax], bits, unsigned) == pytest.approx(wanted, abs=1e-4)
    # Two rows add up as two tensors do.
    both = expected_sqnr([row, row], [0.9, 4.0], bits, unsigned)
    parts = [10 ** (-expected_sqnr([row], [a], bits, unsigned) / 10) for a in (0.9, 4.0)]
    assert both == pytest.approx(-10 * math.log10(sum(parts) / 2))
    assert expected_sqnr([row], [0.0], bits, unsigned) == 0
    exact = abs_histogram(torch.full((9,), 1.5), 1, 3.0)
    assert expected_sqnr([exact], [1.5], bits, unsigned) == math.inf


@pytest.mark.parametrize("skip_zeros", [False, True])
def test_zeros_count_for_nothing(skip_zeros):
    """Whether a calibrator keeps them or leaves them out."""
    model = Watch()
    model.input._calibrator._skip_zeros = skip_zeros
    x = torch.cat([torch.zeros(99_000), torch.linspace(0.01, 1, 1000)])
    assert calibrate(model, [x]).findings == ()
    (found,) = calibrate(model, [x, torch.tensor([70.0])], method="max").findings
    assert "of 1,001 values other than zero" in found.evidence
    crowd = re.findall(r"98% of them lie below ([\d.]+)", found.evidence)[0]
    assert float(crowd) == pytest.approx(0.98, abs=0.01)


def test_findings_are_part_of_the_json():
    data = json.loads(report(torch.zeros(1, 5)).to_json())
    (finding,) = data["quantizers"][0]["findings"]
    assert finding["kind"] == "all zero"
    assert finding["poor"] is True
    assert finding["frame"] is None


def test_the_batch_survives_an_interruption(tmp_path):
    """A resumed run names the batch that it has not seen itself."""
    broken = lidar(seed=2)
    broken[::100, 3] = 1e9
    batches = [lidar(), broken, lidar(seed=1)]
    whole = calibrate(Watch(), batches)
    file = tmp_path / "collected.npz"

    def interrupted():
        yield from batches[:2]
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        calibrate(Watch(), interrupted(), resume=file)
    resumed = calibrate(Watch(), batches, resume=file)
    assert resumed.to_json() == whole.to_json()
    assert {f.frame for f in resumed.poor} == {1}
