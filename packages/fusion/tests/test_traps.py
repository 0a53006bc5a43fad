"""What other tools get wrong when they fold batch norm."""

import threading
from collections import OrderedDict

import pytest
import torch
from torch import nn

from bevquant_fusion import (
    fuse_conv_bn_weights,
    fuse_model,
    fuse_parts,
    fuse_sparse_conv_bn,
    fuse_sparse_conv_bn_weights,
)
from bevquant_sparse import WeightLayout, use_bevquant_kernels


@pytest.mark.parametrize(
    ("layer", "bn", "rank"),
    [
        (nn.ConvTranspose2d(4, 8, 2, stride=2, bias=False), nn.BatchNorm2d(8), 2),
        (nn.ConvTranspose2d(4, 8, 3, groups=4), nn.BatchNorm2d(8), 2),
        (nn.ConvTranspose1d(4, 8, 3, groups=2), nn.BatchNorm1d(8), 1),
        (nn.Conv1d(4, 8, 3), nn.BatchNorm1d(8), 1),
        (nn.Linear(4, 8, bias=False), nn.BatchNorm1d(8), 0),
    ],
)
def test_trap_01_deconv_linear_conv1d_are_folded(layer, bn, rank, randomise, error_of):
    model = randomise(nn.Sequential(layer, bn, nn.ReLU()))
    x = torch.randn(3, 4, *(6,) * rank).double()
    result = fuse_model(model, x)
    assert [(f.conv, f.bn) for f in result.fused] == [("0", "1")]
    assert error_of(result.model(x), model(x)) <= 1e-10


def test_trap_02_decided_by_data_flow(randomise):
    relu_between = nn.Sequential(nn.Conv2d(4, 4, 3), nn.ReLU(), nn.BatchNorm2d(4))
    deconv_between = nn.Sequential(
        nn.Conv2d(4, 4, 3), nn.ConvTranspose2d(4, 4, 3), nn.BatchNorm2d(4)
    )
    x = torch.randn(2, 4, 8, 8).double()
    refused = fuse_model(randomise(relu_between), x)
    assert refused.fused == ()
    assert refused.skipped[0].reason == "follows 1 (ReLU), not a convolution or linear layer"
    assert torch.equal(refused.model(x), relu_between(x))
    # The batch norm belongs to the deconvolution, never to the convolution before it.
    folded = fuse_model(randomise(deconv_between), x)
    assert [f.conv for f in folded.fused] == ["1"]
    assert torch.equal(folded.model[0].weight, deconv_between[0].weight)


@pytest.mark.parametrize("members", [1, 2, 3, 4, 5, 6, 7])
def test_trap_03_sequential_of_any_length_is_kept(members, spconv, cloud, randomise, error_of):
    layers = [
        spconv.SubMConv3d(4, 4, 3, bias=False, indice_key="a"),
        nn.BatchNorm1d(4),
        nn.ReLU(),
        spconv.SubMConv3d(4, 4, 3, indice_key="a"),
        nn.BatchNorm1d(4),
        nn.ReLU(),
        nn.Linear(4, 4),
    ][:members]
    model = randomise(spconv.SparseSequential(*layers))
    use_bevquant_kernels(model)
    x = cloud(4)
    result = fuse_model(model, x)
    kinds = [type(m) for m in model if not isinstance(m, nn.BatchNorm1d)]
    assert [type(m) for m in result.model] == kinds
    assert list(result.model._modules) == [str(i) for i in range(len(kinds))]
    assert error_of(result.model(x).features, model(x).features) <= 1e-10


def test_trap_03_names_given_as_strings_stay(spconv, cloud, randomise, error_of):
    model = spconv.SparseSequential(
        OrderedDict(
            conv=spconv.SubMConv3d(4, 6, 3), norm=nn.BatchNorm1d(6), act=nn.ReLU(), last=nn.Tanh()
        )
    )
    use_bevquant_kernels(randomise(model))
    x = cloud(4)
    result = fuse_model(model, x)
    assert list(result.model._modules) == ["conv", "act", "last"]
    assert error_of(result.model(x).features, model(x).features) <= 1e-10


@pytest.mark.parametrize("kind", ["SubMConv3d", "SparseConv3d"])
@pytest.mark.parametrize(("channels", "stride"), [((4, 4), 1), ((3, 5), 1), ((3, 5), 2)])
def test_trap_04_kernels_of_one(kind, channels, stride, spconv, cloud, randomise, error_of):
    if kind == "SubMConv3d" and stride != 1:
        return  # a submanifold convolution has no stride; the other cases cover it
    conv = getattr(spconv, kind)(*channels, 1, stride=stride)
    conv, bn = randomise(nn.ModuleList([conv, nn.BatchNorm1d(channels[1])]))
    fused = fuse_sparse_conv_bn(conv, bn)
    x = cloud(channels[0])
    expected_conv = conv.train()  # spconv's own CPU code takes a bias in training mode only
    torch.set_num_threads(1)
    expected = bn(expected_conv(x).features)
    if stride == 1:
        by_hand = x.features @ conv.weight.view(*channels) + conv.bias
        torch.testing.assert_close(bn(by_hand), expected, rtol=1e-12, atol=1e-12)
    use_bevquant_kernels(fused)
    assert error_of(fused(x).features, expected) <= 1e-12


def test_trap_05_zero_weight_gives_exact_zero(spconv, cloud, randomise):
    conv, bn = randomise(nn.ModuleList([spconv.SubMConv3d(4, 4, 3), nn.BatchNorm1d(4)]))
    bn.weight.data.zero_()
    bn.running_var[1] = 0.0
    fused = use_bevquant_kernels(conv) and fuse_sparse_conv_bn(conv, bn)
    out = fused(cloud(4)).features
    assert torch.equal(out, bn.bias.expand_as(out))
    bn.bias.data.zero_()
    assert not fuse_sparse_conv_bn(conv, bn)(cloud(4)).features.any()


def test_trap_06_layout_is_said_never_guessed():
    """A [16, 3, 3, 3, 16] weight fits two layouts, and the two answers differ."""
    weight, ones = torch.randn(16, 3, 3, 3, 16).double(), torch.ones(16).double()
    stats = (torch.zeros(16).double(), ones, 0.0, torch.arange(16.0).double(), None)
    krsc = fuse_sparse_conv_bn_weights(weight, None, *stats, layout=WeightLayout.KRSC)[0]
    rsck = fuse_sparse_conv_bn_weights(weight, None, *stats, layout=WeightLayout.RSCK)[0]
    torch.testing.assert_close(krsc, weight * stats[3].reshape(-1, 1, 1, 1, 1))
    torch.testing.assert_close(rsck, weight * stats[3])
    with pytest.raises(TypeError, match=r"missing .*layout"):
        fuse_sparse_conv_bn_weights(weight, None, *stats)
    with pytest.raises(Exception, match="layout"):
        fuse_sparse_conv_bn_weights(weight, None, *stats, layout="KRSC")


@pytest.mark.parametrize("groups", [1, 2, 4])
def test_trap_21_transposed_weights_are_scaled_along_their_own_axis(groups):
    """[in, out/groups, k]: output channel o of group g is column o of the rows of group g."""
    weight, gamma = torch.randn(4, 8 // groups, 2).double(), torch.arange(8.0).double()
    zero, one = torch.zeros(8).double(), torch.ones(8).double()
    fused, _ = fuse_conv_bn_weights(weight, None, zero, one, 0.0, gamma, None, True, groups)
    for row in range(4):
        for column in range(8 // groups):
            channel = (row // (4 // groups)) * (8 // groups) + column
            torch.testing.assert_close(fused[row, column], weight[row, column] * gamma[channel])


def test_what_cannot_be_copied_is_named() -> None:
    net = nn.Sequential(nn.Conv2d(1, 1, 1), nn.BatchNorm2d(1)).eval()
    net.lock = threading.Lock()
    refused = r"attribute 'lock' .* cannot be copied .* Remove it for this call$"
    with pytest.raises(ValueError, match=f"^fuse_model: {refused}"):
        fuse_model(net, torch.ones(1, 1, 2, 2))
    with pytest.raises(ValueError, match=f"^fuse_parts: {refused}"):
        fuse_parts(net, (torch.ones(1, 1, 2, 2),), ["0"])
