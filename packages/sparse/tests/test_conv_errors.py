"""What sparse_conv and the pools refuse, and what they say about it."""

from __future__ import annotations

import sys

import pytest
import torch

from bevquant_sparse import (
    WeightLayout,
    build_rulebook,
    sparse_avg_pool,
    sparse_conv,
    sparse_max_pool,
)


@pytest.fixture
def rulebook():
    indices = torch.tensor([[0, 0, 0], [0, 1, 2], [0, 3, 3]], dtype=torch.int32)
    return build_rulebook(indices, (4, 5), (3, 1), subm=True, batch_size=1)


def call(rulebook, features=None, weight=None, bias=None, layout=WeightLayout.RSCK, **options):
    features = torch.zeros(3, 2) if features is None else features
    weight = torch.zeros(3, 1, 2, 4) if weight is None else weight
    return sparse_conv(features, weight, bias, rulebook, layout=layout, **options)


def test_accepts_the_operands_the_refusals_vary(rulebook):
    assert call(rulebook, bias=torch.zeros(4)).shape == (3, 4)


@pytest.mark.parametrize("layout", list(WeightLayout))
def test_weight_of_another_layout(rulebook, layout):
    shown = {
        WeightLayout.RSCK: r"\[3, 1, 2, out\]",
        WeightLayout.KRSC: r"\[out, 3, 1, 2\]",
        WeightLayout.KCRS: r"\[out, 2, 3, 1\]",
        WeightLayout.VCK: r"\[3, 2, out\]",
    }[layout]
    with pytest.raises(ValueError, match=rf"{layout.name} weight of shape {shown}.*\(9, 8, 7, 6\)"):
        call(rulebook, weight=torch.zeros(9, 8, 7, 6), layout=layout)


def test_weight_of_another_kernel(rulebook):
    with pytest.raises(ValueError, match=r"kernel size \(3, 1\).*got \(1, 3, 2, 4\)"):
        call(rulebook, weight=torch.zeros(1, 3, 2, 4))


def test_layout_that_is_none(rulebook):
    with pytest.raises(TypeError, match="layout must be a WeightLayout, got 'RSCK'"):
        call(rulebook, layout="RSCK")


@pytest.mark.parametrize("shape", [(4, 2), (3,), (3, 2, 1)])
def test_features_of_another_shape(rulebook, shape):
    with pytest.raises(ValueError, match=r"features of shape \[3, channels\]"):
        call(rulebook, features=torch.zeros(shape))


def test_channels_that_disagree(rulebook):
    with pytest.raises(ValueError, match="features with 5 channels"):
        call(rulebook, features=torch.zeros(3, 5))


@pytest.mark.parametrize("shape", [(3,), (1, 4), ()])
def test_bias_of_another_shape(rulebook, shape):
    with pytest.raises(ValueError, match=r"bias of shape \(4,\)"):
        call(rulebook, bias=torch.zeros(shape))


@pytest.mark.parametrize("wrong", [None, 3, 1.5, {}, [], "x"])
def test_operands_that_are_none(rulebook, wrong):
    weight = torch.zeros(*rulebook.kernel_size, 2, 2)
    with pytest.raises(TypeError, match="rulebook must be a Rulebook"):
        sparse_conv(torch.zeros(rulebook.num_in, 2), weight, None, wrong, layout=WeightLayout.RSCK)
    with pytest.raises(TypeError, match="features must be a Tensor"):
        sparse_conv(wrong, weight, None, rulebook, layout=WeightLayout.RSCK)
    with pytest.raises(TypeError, match="weight"):
        sparse_conv(
            torch.zeros(rulebook.num_in, 2), wrong, None, rulebook, layout=WeightLayout.RSCK
        )


def test_integer_features(rulebook):
    with pytest.raises(TypeError, match=r"floating-point features, got torch\.int32"):
        call(rulebook, features=torch.zeros(3, 2, dtype=torch.int32))


def test_dtypes_that_differ(rulebook):
    with pytest.raises(TypeError, match=r"weight is torch\.float64, features are torch\.float32"):
        call(rulebook, weight=torch.zeros(3, 1, 2, 4, dtype=torch.float64))
    with pytest.raises(TypeError, match=r"bias is torch\.float16, features are torch\.float32"):
        call(rulebook, bias=torch.zeros(4, dtype=torch.float16))


def test_devices_that_differ(rulebook):
    with pytest.raises(ValueError, match="features are on meta, the rulebook is on cpu"):
        call(rulebook, features=torch.zeros(3, 2, device="meta"))
    with pytest.raises(ValueError, match="weight is on meta, features are on cpu"):
        call(rulebook, weight=torch.zeros(3, 1, 2, 4, device="meta"))


def test_unknown_backend(rulebook):
    with pytest.raises(ValueError, match="backend='cuda': expected one of auto, numba, torch"):
        call(rulebook, backend="cuda")


def test_numba_backend_refuses_float64(rulebook):
    with pytest.raises(ValueError, match=r"got torch\.float64 on cpu"):
        call(
            rulebook, features=torch.zeros(3, 2, dtype=torch.float64),
            weight=torch.zeros(3, 1, 2, 4, dtype=torch.float64), backend="numba",
        )  # fmt: skip


def test_numba_backend_without_numba(rulebook, monkeypatch):
    monkeypatch.setitem(sys.modules, "bevquant_sparse._conv_numba", None)
    with pytest.raises(ImportError, match="pip install numba"):
        call(rulebook, backend="numba")
    assert call(rulebook, backend="auto").shape == (3, 4)


@pytest.mark.parametrize("pool", [sparse_max_pool, sparse_avg_pool])
def test_pools_refuse_features_that_do_not_fit(rulebook, pool):
    with pytest.raises(ValueError, match=rf"{pool.__name__}: expected features of shape \[3, chan"):
        pool(torch.zeros(2, 2), rulebook)
    with pytest.raises(TypeError, match=rf"{pool.__name__}: expected floating-point features"):
        pool(torch.zeros(3, 2, dtype=torch.int8), rulebook)
