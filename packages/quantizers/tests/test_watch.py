"""What quantizers are handed, counted: against numpy's histograms and counts made by hand."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from bevquant_quantizers import QuantizerRow, watch_quantizers


class Range(nn.Module):
    """Stands for a calibrated quantizer: it has a range, and lets values pass."""

    def __init__(self, amax: float | list[float]) -> None:
        super().__init__()
        self.num_bits = 8
        self.register_buffer("_amax", torch.tensor(amax))

    def forward(self, x: Tensor) -> Tensor:
        return x


class Twice(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return 2 * x


def test_watched_values_of_a_shared_quantizer_are_counted_once_each() -> None:
    shared = Range(1.5)
    x = torch.tensor([0.0, 1.0, -1.0])
    (seen,) = watch_quantizers(nn.Sequential(shared, Twice(), shared), lambda m: m(x))
    assert seen.paths == ("0", "2")
    assert (seen.largest, seen.total, seen.beyond, seen.zeros) == (2.0, 6, 2, 2)
    assert seen.counts.sum() == 6
    assert seen.reach == 2.0  # the first call's 1, doubled
    # What lay on the end of the narrower histogram stays in the bin that ended there.
    values = [-2.0, -1.0, 0.0, 0.0, 0.99, 2.0]
    assert (seen.counts == np.histogram(values, seen.edges)[0]).all()
    row = QuantizerRow.of(seen)
    assert (row.saturated, row.zeros, row.amax_max) == (2 / 6, 2 / 6, 1.5)


def test_values_of_growing_calls_are_counted_in_one_pass() -> None:
    generator = torch.Generator().manual_seed(0)
    calls = [scale * torch.randn(300, generator=generator) for scale in (1.0, 0.2, 2.7, 40.0)]
    layer = Range(1.0)
    (seen,) = watch_quantizers(layer, lambda _: [layer(call) for call in calls])
    values = torch.cat(calls).numpy()
    assert (seen.largest, seen.total) == (np.abs(values).max(), values.size)
    assert seen.largest <= seen.reach < 2 * seen.largest
    # Only a call's largest value may lie on the end of the histogram of its time.
    moved = np.abs(seen.counts - np.histogram(values, seen.edges)[0]).sum()
    assert moved <= 2 * len(calls)


def test_a_histogram_that_met_infinity_spans_it() -> None:
    layer = Range(1.0)
    calls = torch.tensor([1.0, -1.0]), torch.tensor([torch.inf, 2.0])
    (seen,) = watch_quantizers(layer, lambda _: [layer(call) for call in calls])
    assert (seen.largest, seen.reach, seen.total, seen.beyond) == (math.inf, math.inf, 4, 2)


@pytest.mark.usefixtures("with_and_without_numba")
def test_each_channel_has_its_range_and_beside_infinity_nothing_is_in_a_bin() -> None:
    x = torch.randn(4, 3, 50)
    x[0, 0, :2] = torch.tensor([0.0, -7.0])
    layer = Range([0.5, 1.0, 2.0])
    layer._amax = layer._amax.reshape(1, 3, 1)
    (seen,) = watch_quantizers(layer, lambda m: m(x))
    assert seen.beyond == int((x.abs() > layer._amax).sum()) > 100
    assert (seen.counts == np.histogram(x.numpy(), seen.edges)[0]).all()
    x[0, 0, 1] = torch.inf
    (seen,) = watch_quantizers(layer, lambda m: m(x))
    assert (seen.zeros, seen.total, seen.counts.sum()) == (1, x.numel(), 0)


@pytest.mark.parametrize("layout", [torch.contiguous_format, torch.channels_last])
@pytest.mark.parametrize("axis", [None, 1])
@pytest.mark.usefixtures("with_and_without_numba")
def test_many_values_are_counted_alike_as_they_lie(axis: int | None, layout: Any) -> None:
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(3, 8, 131, 67, generator=generator).relu().to(memory_format=layout)
    layer = Range(1.5) if axis is None else Range([0.25 * i for i in range(1, 9)])
    layer._amax = layer._amax.reshape(() if axis is None else (8, 1, 1))
    (seen,) = watch_quantizers(layer, lambda m: m(x))
    assert seen.largest == float(x.max())
    assert (seen.total, seen.zeros) == (x.numel(), int((x == 0).sum()))
    assert seen.beyond == int((x > layer._amax).sum())
    # numpy has its histogram from edges in float32 of float32 values.
    expected = np.histogram(x.double().numpy(), seen.edges)[0]
    assert np.abs(seen.counts - expected).sum() <= 8
    assert seen.counts.sum() == x.numel()
