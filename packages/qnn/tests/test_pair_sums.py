"""Sums over pairs of tensors: the compiled pass and torch's against numpy's in float64."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from torch import Tensor

from bevquant_qnn import Gap, PairSums, gap
from bevquant_qnn import _pair_sums as pair_sums

SHAPES = {"large": (2, 24, 90, 101), "a cell": (1, 1, 1, 1), "none": (0, 4)}


def _pair(shape: tuple[int, ...], order: str) -> tuple[Tensor, Tensor]:
    wanted = torch.randn(shape) * torch.logspace(-3, 3, shape[-1])
    got = wanted + 0.01 * torch.randn(shape)
    if len(shape) == 4 and order != "planes":
        got = got.contiguous(memory_format=torch.channels_last)
        if order == "rows":
            wanted = wanted.contiguous(memory_format=torch.channels_last)
    return wanted, got


def _expected(wanted: Tensor, got: Tensor) -> list[float]:
    w, g = (x.contiguous().numpy().astype(np.float64).ravel() for x in (wanted, got))
    return [float(v) for v in ((w * w).sum(), (g * g).sum(), (w * g).sum(), ((g - w) ** 2).sum())]


@pytest.mark.parametrize("order", ["planes", "rows", "one of each"])
@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES.keys())
@pytest.mark.parametrize("compiled", [True, False])
def test_all_ways_give_the_sums(
    monkeypatch: pytest.MonkeyPatch, compiled: bool, shape: tuple[int, ...], order: str
) -> None:
    if compiled:
        pytest.importorskip("numba")
    monkeypatch.setattr(pair_sums, "_SMALL", 0 if compiled else 1 << 60)
    pair = _pair(shape, order)
    assert (pair_sums.kernels_for(*pair) is not None) == compiled
    sums = PairSums()
    sums.add(*pair)
    assert sums.as_sums() == pytest.approx([*_expected(*pair), 0.0], rel=1e-12)


@pytest.mark.bits
def test_threads_do_not_change_the_bits() -> None:
    pytest.importorskip("numba")
    pair, found = _pair(SHAPES["large"], "planes"), set()
    for count in (1, 2, 5):
        torch.set_num_threads(count)
        sums = PairSums()
        sums.add(*pair)
        found.add(sums.as_sums())
    assert len(found) == 1


@pytest.mark.parametrize("compiled", [True, False])
def test_values_beyond_a_range_are_counted(monkeypatch: pytest.MonkeyPatch, compiled: bool) -> None:
    if compiled:
        pytest.importorskip("numba")
    monkeypatch.setattr(pair_sums, "_SMALL", 0 if compiled else 1 << 60)
    values = torch.randn(3, 1 << 17)
    values[0, :4] = torch.tensor([1.5, -1.5, float("inf"), float("nan")])  # its bound is within
    expected = int((values.numpy() > 1.5).sum() + (values.numpy() < -1.5).sum())
    assert pair_sums.count_beyond(values, 1.5) == expected > 1000
    assert pair_sums.count_beyond(torch.empty(0), 1.5) == 0


@pytest.mark.parametrize(
    ("wanted", "made", "found"),
    [
        ([1.0, 2.0], [1.0, math.nan], Gap(1, math.inf, 2.0)),
        ([1.0, math.nan], [1.0, 2.0], Gap(1, math.inf, 1.0)),
        ([math.nan, -math.inf, 3.0], [math.nan, -math.inf, 2.5], Gap(1, 0.5, 3.0)),
        ([math.inf, 1.0], [-math.inf, 1.0], Gap(1, math.inf, 1.0)),
        ([7, -9], [7, -7], Gap(1, 2.0, 9.0)),
        ([True, False], [True, True], Gap(1, 1.0, 1.0)),
        ([], [], Gap(0, 0.0, 0.0)),
        ([math.nan], [math.nan], Gap(0, 0.0, 0.0)),
    ],
)
def test_a_nan_in_one_run_alone_is_an_infinite_gap(wanted, made, found):
    assert gap(torch.tensor(wanted), torch.tensor(made)) == found


def test_gaps_within_the_slack_are_not_counted():
    found = gap(torch.tensor([8.0, 1.0]), torch.tensor([8.5, 1.25]), slack=2**-4)
    assert found == Gap(0, 0.5, 8.0)


@pytest.mark.parametrize("many", [False, True])
def test_equal_infinities_are_left_out_and_others_counted(many):
    """As masked scores, and as the logarithm of what quantization makes 0."""
    if many:
        pytest.importorskip("numba")
    wanted = torch.tensor([3.0, 4.0, -math.inf, math.nan]).repeat(1 << 17 if many else 1)
    got = torch.tensor([3.3, 4.4, -math.inf, 1.0]).repeat(1 << 17 if many else 1)
    sums = PairSums()
    sums.add(wanted, got)
    assert sums.sqnr_db == pytest.approx(20)
    assert sums.cosine == pytest.approx(1)
    assert sums.not_finite == 0
    got[:2] = torch.tensor([-math.inf, math.nan])
    sums.add(wanted, got)
    again = PairSums()
    again.add_sums(sums.as_sums())
    assert (again.sqnr_db, again.cosine, again.not_finite) == (-math.inf, None, 2)
