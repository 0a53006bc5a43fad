"""Folded weights against the unfused computation in float64."""

import inspect
import itertools
import math

import pytest
import torch
from torch.nn import functional as F

from bevquant_fusion import (
    fuse_conv_bn_weights,
    fuse_linear_bn_weights,
    fuse_sparse_conv_bn_weights,
)
from bevquant_sparse import WeightLayout, build_rulebook, permute_weight, sparse_conv


def statistics(channels, affine=True):
    mean, var = torch.randn(channels).double(), torch.rand(channels).double() + 0.05
    gamma, beta = torch.randn(channels).double(), torch.randn(channels).double()
    gamma[0], gamma[-1] = 0.0, -1.5
    return (mean, var, 1e-3, gamma, beta) if affine else (mean, var, 1e-3, None, None)


def batch_norm(x, stats):
    mean, var, eps, gamma, beta = stats
    return F.batch_norm(x, mean, var, gamma, beta, eps=eps)


CONVS = {1: F.conv1d, 2: F.conv2d, 3: F.conv3d}
TRANSPOSED = {1: F.conv_transpose1d, 2: F.conv_transpose2d, 3: F.conv_transpose3d}


@pytest.mark.parametrize(
    ("rank", "transpose", "groups", "with_bias", "affine"),
    list(itertools.product((1, 2, 3), (False, True), (1, 2, 4), (False, True), (False, True))),
)
def test_dense_convolutions(rank, transpose, groups, with_bias, affine, error_of):
    x = torch.randn(2, 8, *(5,) * rank).double()
    shape = (8, 12 // groups) if transpose else (12, 8 // groups)
    weight = torch.randn(*shape, *(3,) * rank).double()
    bias = torch.randn(12).double() if with_bias else None
    stats = statistics(12, affine)
    function = (TRANSPOSED if transpose else CONVS)[rank]
    expected = batch_norm(function(x, weight, bias, groups=groups), stats)
    fused = fuse_conv_bn_weights(weight, bias, *stats, transpose=transpose, groups=groups)
    assert error_of(function(x, *fused, groups=groups), expected) <= 1e-12


@pytest.mark.parametrize("with_bias", [False, True])
def test_linear(with_bias, error_of):
    x, weight = torch.randn(5, 7).double(), torch.randn(4, 7).double()
    bias = torch.randn(4).double() if with_bias else None
    stats = statistics(4)
    expected = batch_norm(F.linear(x, weight, bias), stats)
    assert error_of(F.linear(x, *fuse_linear_bn_weights(weight, bias, *stats)), expected) <= 1e-12


@pytest.mark.parametrize("transpose", [False, True])
def test_same_as_torch_where_torch_is_right(transpose):
    weight, bias = torch.randn(6, 6, 3, 3).double(), torch.randn(6).double()
    stats = statistics(6)
    ours = fuse_conv_bn_weights(weight, bias, *stats, transpose)
    theirs = torch.nn.utils.fusion.fuse_conv_bn_weights(weight, bias, *stats, transpose)
    for a, b in zip(ours, theirs, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-12, atol=1e-14)


@pytest.mark.parametrize("rank", [1, 2, 3, 4])
@pytest.mark.parametrize("layout", list(WeightLayout))
@pytest.mark.parametrize("subm", [False, True])
def test_sparse_convolutions_in_every_layout(rank, layout, subm, error_of):
    size = (3, 2, 3, 1)[:rank] if not subm else (3,) * rank
    shape = (6, 5, 4, 4)[:rank]
    axes = [torch.randint(0, n, (40,)) for n in (2, *shape)]
    indices = torch.unique(torch.stack(axes, 1), dim=0).int().contiguous()
    rulebook = build_rulebook(indices, shape, size, padding=1 if subm else 0, subm=subm)
    features = torch.randn(len(indices), 3).double()
    weight = torch.randn(*size, 3, 4).double()
    weight = permute_weight(weight, WeightLayout.RSCK, layout)
    stats = statistics(4)
    expected = batch_norm(sparse_conv(features, weight, None, rulebook, layout=layout), stats)
    fused = fuse_sparse_conv_bn_weights(weight, None, *stats, layout=layout)
    assert fused[0].shape == weight.shape
    actual = sparse_conv(features, *fused, rulebook, layout=layout)
    assert error_of(actual, expected) <= 1e-12


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_rounded_once_to_the_dtype_of_the_weight(dtype):
    weight, bias = torch.randn(4, 3, 1, 1, dtype=dtype), torch.randn(4, dtype=dtype)
    stats = tuple(s.float() if isinstance(s, torch.Tensor) else s for s in statistics(4))
    fused = fuse_conv_bn_weights(weight, bias, *stats)
    exact = fuse_conv_bn_weights(
        weight.double(), bias.double(), *(s.double() if torch.is_tensor(s) else s for s in stats)
    )
    for rounded, value in zip(fused, exact, strict=True):
        assert rounded.dtype == dtype
        assert torch.equal(rounded, value.to(dtype))


@pytest.mark.parametrize("trained", [False, True])
def test_requires_grad_is_kept(trained):
    weight = torch.randn(4, 3, 1, requires_grad=trained)
    fused = fuse_conv_bn_weights(weight, None, *(torch.ones(4), torch.ones(4), 0.1, None, None))
    assert [p.requires_grad for p in fused] == [trained, trained]
    assert all(p.is_leaf for p in fused)


def test_inputs_are_not_written_to():
    weight, stats = torch.randn(4, 3, 1).double(), statistics(4)
    before = [weight.clone(), *(s.clone() for s in stats if torch.is_tensor(s))]
    fuse_conv_bn_weights(weight, None, *stats)
    after = [weight, *(s for s in stats if torch.is_tensor(s))]
    assert all(torch.equal(a, b) for a, b in zip(before, after, strict=True))


def test_channel_mismatch_names_both():
    with pytest.raises(ValueError, match=r"shape \(5,\).*makes 4 channels"):
        fuse_conv_bn_weights(torch.randn(4, 3, 1), None, *[torch.ones(5)] * 2, 0.0, None, None)
    with pytest.raises(ValueError, match=r"bias has shape \(3,\).*makes 4"):
        fuse_conv_bn_weights(
            torch.randn(4, 3, 1), torch.ones(3), *[torch.ones(4)] * 2, 0.0, None, None
        )


@pytest.mark.parametrize(("value", "eps"), [(-1.0, 1e-3), (math.nan, 1e-3), (0.0, 0.0)])
def test_variances_that_make_no_scale(value, eps):
    """The weights were NaN or infinite in silence."""
    var = torch.tensor([1.0, value, 1.0, 1.0])
    with pytest.raises(ValueError, match=r"batch norm var has a value .*must be positive"):
        fuse_conv_bn_weights(torch.randn(4, 3, 1), None, torch.ones(4), var, eps, None, None)


def test_what_is_no_tensor_is_named():
    one = torch.ones(1)
    # These tests check annotations as well; users' calls are not so checked.
    fold, fold_linear = map(inspect.unwrap, (fuse_conv_bn_weights, fuse_linear_bn_weights))
    with pytest.raises(TypeError, match="the layer's weight: expected floating-point numbers"):
        fold(torch.ones(1, 1, 1, dtype=torch.int8), None, one, one, 0.1, None, None)
    for place, name in enumerate(("weight", "bias", "running mean", "running variance")):
        given = [torch.ones(1, 1, 1), None, one, one, 0.0, None, None]
        given[place] = "ones"
        with pytest.raises(TypeError, match=f"{name}: expected a tensor, got str"):
            fold(*given)
    with pytest.raises(TypeError, match="weight: expected a tensor, got list"):
        fold_linear([[1.0]], None, one, one, 0.0, None, None)


def test_groups_that_do_not_divide():
    with pytest.raises(ValueError, match="cannot have 3 groups"):
        fuse_conv_bn_weights(
            torch.randn(4, 3, 1), None, *[torch.ones(9)] * 2, 0.0, None, None, True, 3
        )


def test_sparse_rank_must_fit_the_layout():
    ones = torch.ones(2)
    with pytest.raises(ValueError, match="cannot be in layout VCK"):
        fuse_sparse_conv_bn_weights(
            torch.ones(3, 3, 3, 2, 2), None, ones, ones, 0.0, None, None, layout=WeightLayout.VCK
        )
    with pytest.raises(ValueError, match="cannot be in layout KRSC"):
        fuse_sparse_conv_bn_weights(
            torch.ones(2, 2), None, ones, ones, 0.0, None, None, layout=WeightLayout.KRSC
        )


@pytest.mark.parametrize("layout", [WeightLayout.KRSC, WeightLayout.RSCK, WeightLayout.KCRS])
@pytest.mark.parametrize("rank", [0, 1, 4, 5])
def test_sparse_kernels_have_one_to_four_axes(layout, rank):
    weight, ones = torch.ones([2] * (rank + 2)), torch.ones(2)
    if 1 <= rank <= 4:
        fused, _ = fuse_sparse_conv_bn_weights(
            weight, None, ones, ones, 0.0, None, None, layout=layout
        )
        assert fused.shape == weight.shape
    else:
        with pytest.raises(ValueError, match=f"cannot be in layout {layout.name}"):
            fuse_sparse_conv_bn_weights(weight, None, ones, ones, 0.0, None, None, layout=layout)


@pytest.mark.parametrize("axes", [2, 4])
def test_kernels_in_one_axis_have_three(axes):
    with pytest.raises(ValueError, match="cannot be in layout VCK"):
        fuse_sparse_conv_bn_weights(
            torch.ones([2] * axes), None, *[torch.ones(2)] * 2, 0.0, None, None,
            layout=WeightLayout.VCK,
        )  # fmt: skip


@pytest.mark.parametrize("eps", [-1.0, float("nan"), float("inf")])
def test_an_eps_that_is_no_number_is_named(eps):
    one = torch.ones(2)
    with pytest.raises(ValueError, match="batch norm eps"):
        inspect.unwrap(fuse_conv_bn_weights)(torch.eye(2), None, one, one, eps, one, one)


@pytest.mark.parametrize("place", [0, 2, 3])
def test_sparse_operands_that_are_no_tensors_are_named(place):
    one = torch.ones(2)
    operands = [torch.ones(27, 3, 2), None, one, one, 1e-5, one, one]
    operands[place] = [1.0]
    with pytest.raises(TypeError, match="expected a tensor, got list"):
        inspect.unwrap(fuse_sparse_conv_bn_weights)(*operands, layout=WeightLayout.VCK)
